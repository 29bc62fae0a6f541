"""Files that others plant in a shared folder do not stop a walk or raise an error."""

import errno
import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from objkv.errors import StoreDenied
from objkv.stores.base import KEY_BYTES_MAX
from objkv.stores.local import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path)
    store.put("ns/aa/x", b"1")
    return store


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

    def forbid(store: LocalStore, folder: str, number: int) -> None:
        opens = store._beneath.open

        def refusing(path: str, flags: int) -> int:
            if path == folder:
                raise OSError(number, os.strerror(number))
            return opens(path, flags)

        monkeypatch.setattr(store._beneath, "open", refusing)

    return forbid


@pytest.mark.parametrize("levels", [600, 1_500, 3_000])
def test_folders_nested_deeper_than_any_key_end_no_walk(
    store: LocalStore, tmp_path: Path, levels: int
) -> None:
    with nested(tmp_path / "0evil", "a", levels):
        assert [entry.key for entry in store.scan("")] == ["ns/aa/x"]
        assert list(store.unfinished()) == []


def test_the_deepest_key_is_found(store: LocalStore) -> None:
    deepest = "/".join("a" * (KEY_BYTES_MAX // 2))
    assert len(deepest) == KEY_BYTES_MAX - 1
    store.put(deepest, b"2")
    store.put(deepest + "b", b"3")
    assert [entry.key for entry in store.scan("")] == [deepest, deepest + "b", "ns/aa/x"]


@pytest.mark.parametrize("name", ["~tmp-1-1", "a b", "\x1b[31m", "n" * 201])
def test_no_walk_enters_a_folder_that_no_key_can_name(
    store: LocalStore, tmp_path: Path, forbid: Callable[[LocalStore, str, int], None], name: str
) -> None:
    (tmp_path / "d" / name).mkdir(parents=True)
    forbid(store, f"d/{name}", errno.EIO)
    assert [entry.key for entry in store.scan("")] == ["ns/aa/x"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG])
def test_a_folder_inside_that_cannot_be_read_is_left_out_and_told_once(
    store: LocalStore,
    forbid: Callable[[LocalStore, str, int], None],
    caplog: pytest.LogCaptureFixture,
    number: int,
) -> None:
    caplog.set_level(logging.WARNING)
    store.put("0evil/x", b"2")
    forbid(store, "0evil", number)
    assert [entry.key for entry in store.scan("")] == ["ns/aa/x"]
    assert list(store.unfinished()) == []
    (told,) = caplog.records
    assert "0evil" in told.getMessage()


def test_the_folder_that_was_asked_for_must_be_readable(
    store: LocalStore, forbid: Callable[[LocalStore, str, int], None]
) -> None:
    """Otherwise hiding the documents of pins would delete the pinned chunks."""
    store.put("ns/pins/x", b"2")
    forbid(store, "ns/pins", errno.EACCES)
    with pytest.raises(StoreDenied, match="ns/pins"):
        list(store.scan("ns/pins/"))


def test_another_fault_inside_ends_the_walk(
    store: LocalStore, forbid: Callable[[LocalStore, str, int], None]
) -> None:
    forbid(store, "ns/aa", errno.EACCES)
    assert list(store.scan("")) == []
    forbid(store, "ns", errno.EIO)
    with pytest.raises(Exception, match="ns"):
        list(store.scan(""))
