"""A store in a directory: one file per value, shared by every process that can reach the folder.

Values are files named by their key. A value is written to a temporary file beside its place, synced
to the disk, and only then linked or renamed to its name, so no crash leaves half a value under
a key. The folder is synced as well, so that a finished put stays: that is 0.2-0.5 ms of the 7-8 ms
that a put of 2 MiB into a folder of its own takes (ext4, 2026-11-20). A killed writer leaves its
temporary file; ``sweep_temporary`` removes it.
Works on any POSIX file system with hard links (NFS, CephFS and Lustre included); how long a call
takes when a network mount hangs is the mount's affair, and no deadline here can shorten it.
"""

import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from objkv.errors import StoreUnavailable
from objkv.stores.base import (
    Arrived,
    Buffer,
    Entry,
    Unfinished,
    check_fits,
    check_key,
    check_prefix,
    is_key,
)
from objkv.stores.local_disk import make_folders, read_into, some_of, sync_folder, translated

# "~" is not allowed in keys, so a temporary file can neither be read nor collide with a value.
_TEMPORARY = "~tmp-"
_FOLDER_TRIES = 10


class LocalStore:
    """Values as files under ``root``, which is created by the first put or ``check``.

    Files and folders get the modes that the umask leaves (as with ``cp``), so a group can share a
    folder by its umask. Keys cannot lead out of ``root``; symbolic links that somebody with write
    access put there are followed.
    """

    def __init__(self, root: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._root = os.path.abspath(root)
        self._clock = clock

    def __repr__(self) -> str:
        return f"<LocalStore {self._root}>"

    def get(self, key: str) -> bytes | None:
        """The whole file, or None."""
        with translated("get", key), self._opened(key) as opened:
            if opened is None:
                return None
            fd, nbytes = opened
            value = os.read(fd, nbytes)
            while len(value) < nbytes:  # one read returns at most 2 GiB
                value += some_of(os.read(fd, nbytes - len(value)), key)
            return value

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        """Bytes ``[start, end)`` of the file, or None."""
        with translated("get_range", key), self._opened(key) as opened:
            if opened is None:
                return None
            fd, nbytes = opened
            end, value = min(end, nbytes), b""
            while start + len(value) < end:
                at = start + len(value)
                value += some_of(os.pread(fd, end - at, at), key)
            return value

    def get_into(self, key: str, buffer: memoryview, arrived: Arrived | None = None) -> int | None:
        """Read the file straight into ``buffer``: no copy in between."""
        with self._opened(key) as opened:
            if opened is None:
                return None
            fd, nbytes = opened
            check_fits(key, nbytes, buffer)
            read_into(key, fd, 0, buffer[:nbytes], arrived)
            return nbytes

    def get_range_into(
        self, key: str, start: int, buffer: memoryview, arrived: Arrived | None = None
    ) -> int | None:
        """Read the bytes straight into ``buffer``."""
        with self._opened(key) as opened:
            if opened is None:
                return None
            fd, nbytes = opened
            part = buffer[: max(0, nbytes - start)]
            read_into(key, fd, start, part, arrived)
            return len(part)

    def head(self, key: str) -> Entry | None:
        """Size and age of the file, or None."""
        check_key(key)
        with translated("head", key):
            try:
                found = os.stat(self._path(key))
            except (FileNotFoundError, NotADirectoryError):
                return None
            if not stat.S_ISREG(found.st_mode):
                return None
            return Entry(key, found.st_size, found.st_mtime)

    def scan(self, prefix: str) -> Iterator[Entry]:
        """Entries in key order, one folder's listing in memory at a time (per level)."""
        check_prefix(prefix)
        for key, is_folder in self._walk(prefix.rpartition("/")[0], prefix):
            if not is_folder and is_key(key) and (entry := self.head(key)) is not None:
                yield entry

    def folders(self, folder: str) -> list[str]:
        """One listing."""
        check_prefix(f"{folder}/" if folder else "")
        with translated("folders", folder or self._root):
            try:
                with os.scandir(self._path(folder)) as found:
                    return sorted(e.name for e in found if e.is_dir() and is_key(e.name))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def put_if_absent(self, key: str, value: Buffer) -> bool:
        """Link a synced temporary file to the key's name; the link fails where a file is."""
        with translated("put_if_absent", key):
            if self.head(key) is not None:  # spares the write; the link below decides
                return False
            with self._written(key, value) as temporary:
                try:
                    os.link(temporary, self._path(key))
                except FileExistsError:
                    return False
                sync_folder(os.path.dirname(temporary))
                return True

    def put(self, key: str, value: Buffer) -> None:
        """Rename a synced temporary file to the key's name."""
        with translated("put", key), self._written(key, value) as temporary:
            os.rename(temporary, self._path(key))
            with suppress(FileNotFoundError):  # somebody deleted the value, and its folder with it
                sync_folder(os.path.dirname(temporary))

    def delete(self, key: str) -> bool:
        """Remove the file, and the folders that it leaves empty."""
        check_key(key)
        with translated("delete", key):
            try:
                os.unlink(self._path(key))
            except (FileNotFoundError, NotADirectoryError):
                return False
            self._remove_empty(key.rpartition("/")[0])
            return True

    def check(self) -> None:
        """Create the folder if there is none, and look into it."""
        with translated("check", self._root):
            os.makedirs(self._root, exist_ok=True)
            with os.scandir(self._root) as found:
                next(found, None)
            if not os.access(self._root, os.R_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def close(self) -> None:
        """Nothing to release: files are open only within a call."""

    def sweep_temporary(self, older_than_s: float) -> int:
        """Remove temporary files that killed writers left ``older_than_s`` seconds ago or more.

        Returns how many. Choose an age beyond any save's deadline: a younger file may be in use.
        """
        limit = self._clock() - older_than_s
        return sum(self.discard(left) for left in self.unfinished() if left.modified_s <= limit)

    def unfinished(self) -> Iterator[Unfinished]:
        """Temporary files; of their key nothing but the folder is known."""
        for path, is_folder in self._walk("", ""):
            folder, _, name = path.rpartition("/")
            if is_folder or not name.startswith(_TEMPORARY):
                continue
            with translated("unfinished", path):
                try:
                    found = os.lstat(self._path(path))
                except FileNotFoundError:
                    continue
            yield Unfinished(folder, name, found.st_size, found.st_mtime)

    def discard(self, unfinished: Unfinished) -> bool:
        """Remove the file, and the folders that it leaves empty. Its value, if it became one, has
        a name of its own."""
        folder, name = unfinished.key, unfinished.name
        assert name.startswith(_TEMPORARY)
        with translated("discard", name):
            try:
                os.unlink(self._path(f"{folder}/{name}" if folder else name))
            except FileNotFoundError:
                return False
            self._remove_empty(folder)
            return True

    def _remove_empty(self, folder: str) -> None:
        with suppress(OSError):  # not empty, or somebody else removed it
            while folder:
                os.rmdir(self._path(folder))
                folder = folder.rpartition("/")[0]

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    @contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, int] | None]:
        """The file's descriptor and length in bytes, or None if there is no such file."""
        check_key(key)
        with translated("get", key):
            try:
                fd = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                fd = -1
        if fd < 0:
            yield None
            return
        try:
            found = os.fstat(fd)
            yield (fd, found.st_size) if stat.S_ISREG(found.st_mode) else None
        finally:
            os.close(fd)

    @contextmanager
    def _written(self, key: str, value: Buffer) -> Iterator[str]:
        """The path of a temporary file beside the key's place that holds ``value``, on the disk."""
        check_key(key)
        folder = os.path.dirname(self._path(key))
        path = f"{folder}/{_TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
        fd = self._create(path, folder)
        try:
            try:
                with memoryview(value) as view:
                    at = 0
                    while at < len(view):
                        at += os.write(fd, view[at:])
                os.fsync(fd)
            finally:
                os.close(fd)
            yield path
        finally:
            with suppress(FileNotFoundError):  # renamed
                os.unlink(path)

    def _create(self, path: str, folder: str) -> int:
        for _ in range(_FOLDER_TRIES):
            try:
                return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:  # also when a delete removed the empty folder just now
                make_folders(folder)
        raise StoreUnavailable(f"put: {folder} is removed as fast as it is created")

    def _walk(self, folder: str, prefix: str) -> Iterator[tuple[str, bool]]:
        """(key, is a folder) of all that is under ``folder`` and may start with ``prefix``, in
        key order: a folder sorts as the keys in it do, with its ``/``."""
        with translated("scan", folder):
            try:
                with os.scandir(self._path(folder)) as found:
                    names = [e.name + "/" if e.is_dir() else e.name for e in found]
            except (FileNotFoundError, NotADirectoryError):
                return
        for name in sorted(names):
            key = f"{folder}/{name}" if folder else name
            if not key.startswith(prefix):
                continue
            if key.endswith("/"):
                yield key[:-1], True
                yield from self._walk(key[:-1], prefix)
            else:
                yield key, False
