"""``LocalStore`` keeps what every store promises, and what only a folder has to; what others plant
in it stops no walk, and leftovers of killed writers go."""

import errno
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from objkv.errors import StoreDenied, StoreError, StoreUnavailable
from objkv.stores.base import KEY_BYTES_MAX
from objkv.stores.local import LocalStore
from tests.contracts.store_contract import StoreContract


class TestLocalStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> LocalStore:
        return LocalStore(tmp_path / "chunks")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "chunks")


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_left_over_temporary_files_are_no_values_and_can_be_discarded(tmp_path: Path) -> None:
    """With a folder that becomes empty. Some have another name: that of a value."""
    store = LocalStore(tmp_path)
    store.put("a/b", b"1")
    for name, modified_s in {"a/~tmp-1-old": 1000, "a/~tmp-1-new": 9990}.items():
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (modified_s, modified_s))
    assert [entry.key for entry in store.scan("")] == ["a/b"]
    found = {one.name: one for one in store.unfinished()}
    left = {name: (one.key, one.nbytes, one.modified_s) for name, one in found.items()}
    assert left == {"~tmp-1-old": ("a", 4, 1000.0), "~tmp-1-new": ("a", 4, 9990.0)}
    assert store.discard(found["~tmp-1-old"])
    assert not store.discard(found["~tmp-1-old"])
    assert files(tmp_path) == ["a/b", "a/~tmp-1-new"]
    os.link(tmp_path / "a/b", tmp_path / "a/~tmp-1-linked")  # killed between link and unlink
    (tmp_path / "c/d").mkdir(parents=True)
    (tmp_path / "c/d/~tmp-1-0").write_bytes(b"half")
    assert [store.discard(left) for left in store.unfinished()] == [True] * 3
    assert (files(tmp_path), os.listdir(tmp_path)) == (["a/b"], ["a"])
    assert store.get("a/b") == b"1"


@pytest.mark.parametrize("read", ["get", "head", "get_into"])
def test_a_file_whose_state_cannot_be_read_is_an_error_of_the_store(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    store.put("a/b", b"1")

    def stale(_: int) -> os.stat_result:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    more = [memoryview(bytearray(1))] if read == "get_into" else []
    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", stale)
        with pytest.raises(StoreUnavailable):
            getattr(store, read)("a/b", *more)


def test_delete_removes_the_folders_that_it_empties(store: LocalStore, tmp_path: Path) -> None:
    store.put("ns/aa/1", b"")
    store.put("ns/ab/2", b"")
    store.delete("ns/aa/1")
    assert sorted(path.name for path in (tmp_path / "chunks/ns").iterdir()) == ["ab"]


def test_a_value_that_is_deleted_the_moment_it_is_there_was_put(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def rename_and_delete(source: str, target: str, **folders: int) -> None:
        rename(source, target, **folders)
        assert store.delete("ab/cd/key")

    monkeypatch.setattr(os, "rename", rename_and_delete)
    store.put("ab/cd/key", b"value")
    assert store.get("ab/cd/key") is None


def test_files_and_folders_follow_the_umask_and_no_other_remains(
    store: LocalStore, tmp_path: Path
) -> None:
    old = os.umask(0o002)
    try:
        for _ in range(2):
            store.put_if_absent("a/b", b"1")
        store.put("a/b", b"2")
    finally:
        os.umask(old)
    assert files(tmp_path) == ["chunks/a/b"]
    assert (tmp_path / "chunks/a/b").stat().st_mode & 0o777 == 0o664
    assert (tmp_path / "chunks/a").stat().st_mode & 0o777 == 0o775


def test_a_file_and_its_folder_are_synced_before_a_put_returns(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}").partition("~")[0])
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    store.put_if_absent("a/b", b"1")
    root = f"{tmp_path}/chunks"
    assert synced == [str(tmp_path), root, f"{root}/a/", f"{root}/a"]


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.ENOSPC, StoreDenied, "free space"),
        (errno.EDQUOT, StoreDenied, "quota"),
        (errno.EACCES, StoreDenied, "permission"),
        (errno.EROFS, StoreDenied, "read-only"),
        (errno.EMFILE, StoreUnavailable, "Too many open files"),
        (errno.ESTALE, StoreUnavailable, "Stale"),
        (errno.EIO, StoreError, "Input/output error"),
    ],
)
def test_what_the_system_says_is_translated(
    store: LocalStore,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    kind: type[StoreError],
    words: str,
) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    store.put("a/first", b"")
    monkeypatch.setattr(os, "write", fail)
    for key in ("a/k", "b/c/k"):
        with pytest.raises(kind, match=words) as caught:
            store.put_if_absent(key, b"value")
        assert caught.type is kind
    monkeypatch.undo()

    def creates_none(path: Any, flags: int, *args: Any, **more: Any) -> int:
        return fail() if flags & os.O_CREAT else real(path, flags, *args, **more)

    real = os.open
    monkeypatch.setattr(os, "open", creates_none)
    with pytest.raises(kind, match=words):
        store.put_if_absent("b/c/k", b"value")
    monkeypatch.undo()
    assert [entry.key for entry in store.scan("")] == ["a/first"]
    assert store.folders("") == ["a"], "none that an audit would take for a namespace"
    assert list(store.unfinished()) == []


def test_a_file_where_the_folder_should_be_is_denied(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = LocalStore(tmp_path / "file")
    with pytest.raises(StoreError):
        store.check()
    with pytest.raises(StoreDenied, match="path must be a folder"):
        store.put("a/b", b"")


@pytest.mark.parametrize(
    "use",
    [
        LocalStore.check,
        lambda store: store.put("a/b", b"2"),
        lambda store: store.put_if_absent("a/c", b"3"),
        lambda store: store.get("a/b"),
        lambda store: store.get_into("a/b", memoryview(bytearray(1))),
        lambda store: store.head("a/b"),
    ],
)
def test_a_folder_that_disappears_with_its_disk_is_denied_until_it_is_back(
    store: LocalStore, tmp_path: Path, use: Callable[[LocalStore], object]
) -> None:
    """A disk that is no longer mounted must not be replaced by a folder, nor its values be taken
    for missing."""
    store.put("a/b", b"1")
    shutil.rmtree(tmp_path / "chunks")
    device, store._beneath._device = store._beneath._device, -1
    with pytest.raises(StoreDenied, match="chunks has disappeared with its disk: mount it"):
        use(store)
    assert files(tmp_path) == []
    (tmp_path / "chunks").mkdir()
    use(store)
    shutil.rmtree(tmp_path / "chunks")
    store._beneath._device = device
    use(store)  # it was only deleted
    store.put("a/b", b"1")


def test_a_file_that_shrinks_while_being_read_is_an_error(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("k", b"value")
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(StoreError, match="was truncated"):
        store.get_into("k", memoryview(bytearray(8)))


@pytest.fixture
def walked(tmp_path: Path) -> LocalStore:
    walked = LocalStore(tmp_path)
    walked.put("ns/aa/x", b"1")
    return walked


@contextmanager
def nested(folder: Path, name: str, levels: int) -> Iterator[None]:
    """Folders in folders, deeper than a path can be."""
    folder.mkdir()
    fd = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir(name, dir_fd=fd)
        inner = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(os.open("~tmp-1-1", os.O_WRONLY | os.O_CREAT, dir_fd=fd))
    os.close(fd)
    try:
        yield
    finally:  # too deep for Python's own way
        subprocess.run(["/bin/rm", "-rf", str(folder)], check=True)


@pytest.fixture
def forbid(monkeypatch: pytest.MonkeyPatch) -> Callable[[LocalStore, str, int], None]:
    """Makes opening a folder fail, as it does for another user: tests may run as root."""

    def forbid(walked: LocalStore, folder: str, number: int) -> None:
        opens = walked._beneath.open

        def refusing(path: str, flags: int) -> int:
            if path == folder:
                raise OSError(number, os.strerror(number))
            return opens(path, flags)

        monkeypatch.setattr(walked._beneath, "open", refusing)

    return forbid


@pytest.mark.slow
def test_folders_nested_deeper_than_any_key_end_no_walk(walked: LocalStore, tmp_path: Path) -> None:
    with nested(tmp_path / "0evil", "a", 2_100):
        assert [entry.key for entry in walked.scan("")] == ["ns/aa/x"]
        assert list(walked.unfinished()) == []


def test_the_deepest_key_is_found(walked: LocalStore) -> None:
    deepest = "/".join("a" * (KEY_BYTES_MAX // 2))
    assert len(deepest) == KEY_BYTES_MAX - 1
    walked.put(deepest, b"2")
    walked.put(deepest + "b", b"3")
    assert [entry.key for entry in walked.scan("")] == [deepest, deepest + "b", "ns/aa/x"]


@pytest.mark.parametrize("name", ["~tmp-1-1", "a b", "\x1b[31m", "n" * 201])
def test_no_walk_enters_a_folder_that_no_key_can_name(
    walked: LocalStore, tmp_path: Path, forbid: Callable[[LocalStore, str, int], None], name: str
) -> None:
    (tmp_path / "d" / name).mkdir(parents=True)
    forbid(walked, f"d/{name}", errno.EIO)
    assert [entry.key for entry in walked.scan("")] == ["ns/aa/x"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG])
def test_a_folder_inside_that_cannot_be_read_is_left_out_and_told_once(
    walked: LocalStore,
    forbid: Callable[[LocalStore, str, int], None],
    caplog: pytest.LogCaptureFixture,
    number: int,
) -> None:
    caplog.set_level(logging.WARNING)
    walked.put("0evil/x", b"2")
    forbid(walked, "0evil", number)
    assert [entry.key for entry in walked.scan("")] == ["ns/aa/x"]
    assert list(walked.unfinished()) == []
    (told,) = caplog.records
    assert "0evil" in told.getMessage()


def test_the_folder_that_was_asked_for_must_be_readable(
    walked: LocalStore, forbid: Callable[[LocalStore, str, int], None]
) -> None:
    """Otherwise hiding the documents of pins would delete the pinned chunks."""
    walked.put("ns/pins/x", b"2")
    forbid(walked, "ns/pins", errno.EACCES)
    with pytest.raises(StoreDenied, match="ns/pins"):
        list(walked.scan("ns/pins/"))
    forbid(walked, "ns", errno.EIO)
    with pytest.raises(StoreError, match="ns"):
        list(walked.scan(""))
