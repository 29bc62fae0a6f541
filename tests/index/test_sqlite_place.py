"""Who may access the file of an index, and which files are refused in its place."""

import os
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from objkv.errors import StoreDenied, StoreError
from objkv.index.sqlite import file as sqlite_place
from objkv.index.sqlite.index import SqliteIndex
from tests.contracts.index_contract import NAMESPACE, chunk, shard

CHUNK = chunk()


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in sorted(folder.iterdir())}


def used(path: Path) -> SqliteIndex:
    index = SqliteIndex(path)
    index.publish(CHUNK, {"0.L0-1_H0-1": shard()}, ttl_s=60)
    assert index.lookup(NAMESPACE, [CHUNK.prefix_hash])[0] is not None
    return index


@pytest.fixture(autouse=True)
def no_umask() -> Iterator[None]:
    old = os.umask(0)
    yield
    os.umask(old)


def test_the_file_and_its_folder_are_for_this_user_alone(tmp_path: Path) -> None:
    used(tmp_path / "objkv" / "index.sqlite")
    assert modes(tmp_path) == {"objkv": 0o700}
    assert modes(tmp_path / "objkv") == {
        "index.sqlite": 0o600,
        "index.sqlite-shm": 0o600,
        "index.sqlite-wal": 0o600,
    }


def test_a_folder_of_a_group_makes_it_the_groups(tmp_path: Path) -> None:
    os.umask(0o077)
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o2770)
    used(folder / "index.sqlite")
    assert set(modes(folder).values()) == {0o660}


def test_a_folder_where_everybody_may_write_does_not(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    used(tmp_path / "index.sqlite")
    assert set(modes(tmp_path).values()) == {0o600}


def test_a_file_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "index.sqlite").touch(0o640)
    used(tmp_path / "index.sqlite")
    assert set(modes(tmp_path).values()) == {0o640}


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-journal"])
@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_somebody_else_planted_is_refused(
    tmp_path: Path, kind: str, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shared").mkdir(0o1777)
    place = tmp_path / "shared" / f"index.sqlite{suffix}"
    if kind == "file":
        place.write_bytes(b"")
    else:
        place.symlink_to(tmp_path / "theirs")
    (tmp_path / "theirs").write_bytes(b"theirs")
    if os.getuid() == 0:
        os.lchown(place, 1234, 1234)
    else:
        monkeypatch.setattr(sqlite_place.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StoreDenied, match="belongs to another user"):
        used(tmp_path / "shared" / "index.sqlite")
    assert (tmp_path / "theirs").read_bytes() == b"theirs"


def test_a_link_of_the_operators_is_followed(tmp_path: Path) -> None:
    (tmp_path / "fast").mkdir()
    (tmp_path / "index.sqlite").symlink_to(tmp_path / "fast" / "index.sqlite")
    used(tmp_path / "index.sqlite")
    assert "index.sqlite" in modes(tmp_path / "fast")


@pytest.mark.parametrize("kind", ["pipe", "folder", "loop"])
def test_what_is_no_file_is_refused_and_nobody_waits(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "index.sqlite"
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    else:
        place.symlink_to(place)
    with pytest.raises(StoreDenied):
        used(place)


def test_a_row_of_any_length_is_an_error_and_no_memory(tmp_path: Path) -> None:
    used(tmp_path / "index.sqlite").close()
    connection = sqlite3.connect(tmp_path / "index.sqlite")
    connection.execute("UPDATE shards SET value = zeroblob(20000000)")
    connection.commit()
    connection.close()
    with pytest.raises(StoreError):
        SqliteIndex(tmp_path / "index.sqlite").lookup(NAMESPACE, [CHUNK.prefix_hash])
