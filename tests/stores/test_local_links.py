"""A folder with planted links, pipes and the like: nothing outside is touched."""

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from objkv.errors import StoreDenied
from objkv.stores.base import Unfinished
from objkv.stores.local import LocalStore

SECRET = b"somebody else's"
KEY = "ns/aa/hash/0.payload"

Use = Callable[[LocalStore], object]
READS: dict[str, Use] = {
    "get": lambda store: store.get(KEY),
    "get_into": lambda store: store.get_into(KEY, memoryview(bytearray(100))),
    "a part": lambda store: store.get_into(KEY, memoryview(bytearray(4)), start=0),
    "head": lambda store: store.head(KEY),
    "put_if_absent": lambda store: store.put_if_absent(KEY, b"value"),
}
BELOW: dict[str, Use] = {
    **READS,
    "put": lambda store: store.put(KEY, b"value"),
    "delete": lambda store: store.delete(KEY),
    "scan": lambda store: list(store.scan("ns/aa/hash/")),
    "folders": lambda store: store.folders("ns/aa/hash"),
    "discard": lambda store: store.discard(Unfinished("ns/aa/hash", "~tmp-1-0", 0, 0)),
}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "chunks")
    store.put("ns/aa/other/0.payload", b"ours")
    return store


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "chunks"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    for path in (folder / "0.payload", folder / "aa" / "hash" / "0.payload"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(SECRET)
        path.with_name("~tmp-1-0").write_bytes(SECRET)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


LINKS = [("ns/aa/hash", "."), ("ns", "."), (KEY, "0.payload"), (KEY, "missing"), (KEY, "aa")]


@pytest.mark.parametrize(
    ("place", "target", "use"),
    [(*link, use) for link in LINKS for use in (READS if link[0] == KEY else BELOW)],
)
def test_a_link_in_place_of_a_folder_a_namespace_or_a_value_is_not_followed(
    store: LocalStore, root: Path, outside: Path, use: str, place: str, target: str
) -> None:
    before = contents(outside)
    if (root / place).exists():
        (root / place).rename(root / "away")
    (root / place).parent.mkdir(exist_ok=True)
    (root / place).symlink_to(outside / target)
    with pytest.raises(StoreDenied, match="symbolic link"):
        BELOW[use](store)
    assert contents(outside) == before
    assert not (outside / "missing").exists()
    assert place == "ns" or store.get("ns/aa/other/0.payload") == b"ours"


def test_a_link_in_place_of_a_value_is_replaced_or_deleted_itself(
    store: LocalStore, root: Path, outside: Path
) -> None:
    before = contents(outside)
    (root / "ns" / "aa" / "hash").mkdir()
    (root / KEY).symlink_to(outside / "0.payload")
    store.put(KEY, b"value")
    assert store.get(KEY) == b"value"
    (root / KEY).unlink()
    (root / KEY).symlink_to(outside / "0.payload")
    assert store.delete(KEY)
    assert not (root / KEY).is_symlink()
    assert contents(outside) == before


def test_scans_and_sweeps_see_no_more_than_the_folder(
    store: LocalStore, root: Path, outside: Path
) -> None:
    before = contents(outside)
    (root / "linked").symlink_to(outside)
    (root / "ns" / "bb").symlink_to(outside / "aa")
    (root / "ns" / "aa" / "hash").mkdir()
    (root / KEY).symlink_to(outside / "0.payload")
    (root / "ns" / "~tmp-2-0").symlink_to(outside / "0.payload")
    assert [entry.key for entry in store.scan("")] == ["ns/aa/other/0.payload"]
    assert [entry.key for entry in store.scan("ns/")] == ["ns/aa/other/0.payload"]
    assert store.folders("") == ["ns"]
    [left] = store.unfinished()
    assert left.name == "~tmp-2-0"
    assert store.discard(left)
    assert contents(outside) == before


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder"])
def test_what_is_no_file_is_no_value_and_nobody_waits(
    store: LocalStore, root: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = root / "ns" / "aa" / "hash" / "0.payload"
    place.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    else:
        monkeypatch.chdir(place.parent)  # the whole path would be too long for a socket
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(place.name)
    assert store.get(KEY) is None
    assert store.get_into(KEY, memoryview(bytearray(4))) is None
    assert store.get_into(KEY, memoryview(bytearray(4)), start=0) is None
    assert store.head(KEY) is None
    assert store.put_if_absent(KEY, b"value") is False
    assert [entry.key for entry in store.scan("")] == ["ns/aa/other/0.payload"]


def test_a_folder_that_becomes_a_loop_is_an_error_for_everybody(
    store: LocalStore, root: Path
) -> None:
    root.rename(root.with_name("gone"))
    root.symlink_to(root)
    for use in BELOW.values():
        with pytest.raises(StoreDenied, match="loop"):
            use(store)
    with pytest.raises(StoreDenied):
        store.check()


def test_a_folder_that_becomes_a_link_is_followed(store: LocalStore, root: Path) -> None:
    root.rename(root.with_name("disk"))
    root.symlink_to(root.with_name("disk"))
    assert store.get("ns/aa/other/0.payload") == b"ours"
    assert store.put_if_absent(KEY, b"value")
    assert store.delete(KEY)


def test_a_private_folder_is_made_for_this_user_alone_and_left_as_it_is(tmp_path: Path) -> None:
    private = tmp_path / "cache" / "objkv"
    old = os.umask(0o022)
    try:
        for use in (LocalStore.check, lambda store: store.put("ns/a", b"")):
            use(LocalStore(private / "chunks", private=private))
            modes = [path.stat().st_mode & 0o777 for path in (private.parent, private)]
            assert modes == [0o755, 0o700]
            shutil.rmtree(private.parent)
        private.mkdir(parents=True)
        LocalStore(private / "chunks", private=private).put("ns/a", b"")
        assert private.stat().st_mode & 0o777 == 0o755
    finally:
        os.umask(old)
