"""``LocalStore`` keeps what every store promises, and what only a folder has to."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from objkv.errors import StoreDenied, StoreError, StoreUnavailable
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


def test_no_temporary_file_remains_after_any_kind_of_put(store: LocalStore, tmp_path: Path) -> None:
    store.put_if_absent("a/b", b"1")
    store.put_if_absent("a/b", b"2")
    store.put("a/c", b"3")
    assert files(tmp_path) == ["chunks/a/b", "chunks/a/c"]


def test_left_over_temporary_files_are_no_values_and_are_swept_by_age(
    tmp_path: Path,
) -> None:
    store = LocalStore(tmp_path, clock=lambda: 10_000.0)
    store.put("a/b", b"1")
    for name, modified_s in {"a/~tmp-1-old": 1000, "a/~tmp-1-new": 9990}.items():
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (modified_s, modified_s))
    assert [entry.key for entry in store.scan("")] == ["a/b"]
    left = {found.name: (found.key, found.nbytes, found.modified_s) for found in store.unfinished()}
    assert left == {"~tmp-1-old": ("a", 4, 1000.0), "~tmp-1-new": ("a", 4, 9990.0)}
    assert store.sweep_temporary(older_than_s=3600) == 1
    assert files(tmp_path) == ["a/b", "a/~tmp-1-new"]


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


def test_files_and_folders_follow_the_umask(store: LocalStore, tmp_path: Path) -> None:
    old = os.umask(0o002)
    try:
        store.put_if_absent("a/b", b"1")
    finally:
        os.umask(old)
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
    with pytest.raises(kind, match=words) as caught:
        store.put_if_absent("a/k", b"value")
    assert caught.type is kind
    monkeypatch.undo()
    assert [entry.key for entry in store.scan("")] == ["a/first"]
    assert store.sweep_temporary(0) == 0


def test_a_file_where_the_folder_should_be_is_denied(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = LocalStore(tmp_path / "file")
    with pytest.raises(StoreError):
        store.check()
    with pytest.raises(StoreDenied, match="path must be a folder"):
        store.put("a/b", b"")


def test_a_file_that_shrinks_while_being_read_is_an_error(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("k", b"value")
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(StoreError, match="was truncated"):
        store.get_into("k", memoryview(bytearray(8)))


# Its words soon fill the pipe: however late the test is, the writer does not fill the disk.
WRITER = """
import sys
from pathlib import Path
from objkv.stores.local import LocalStore
store = LocalStore(Path(sys.argv[1]))
print("ready", flush=True)
for number in range(1_000_000):
    if store.put_if_absent(f"n/{number % 7}/{number}", bytes([number % 251]) * 500_000):
        print("put".ljust(4096), flush=True)
"""


def test_a_killed_writer_leaves_whole_values_only(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for _ in range(3):
        written = len(list(store.scan("")))
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            while len(list(store.scan(""))) < written + 3:
                pass
            writer.send_signal(signal.SIGKILL)
        for entry in store.scan(""):
            number = int(entry.key.rpartition("/")[2])
            assert store.get(entry.key) == bytes([number % 251]) * 500_000
    store.sweep_temporary(0)
    assert all("~" not in name for name in files(tmp_path))
