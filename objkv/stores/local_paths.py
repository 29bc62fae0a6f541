"""Opens files under a folder without following symbolic links.

Otherwise anyone who may write below a store's folder, even in only one namespace, could plant a
link. Replicas would then read that user's files as payloads, or write and delete files that only
the replicas may change. The folder's own path belongs to the operator and may contain links.

Each component is opened separately, which takes 6 us for four (2-core x86, 2026-11-22).
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY
"""A folder that can be listed, synced, and used as ``dir_fd``."""
PLACE: Final = os.O_PATH
"""A file of any type, only for ``fstat``."""
VALUE: Final = os.O_RDONLY | os.O_NONBLOCK
"""A file to read. Opening a pipe with this flag does not wait for a writer. The caller checks at
once that it is a regular file; the flag has no effect on those."""


class Beneath:
    """Opens paths relative to ``root``, an absolute path. Thread-safe. It keeps nothing open, so
    ``root`` may be created, removed or mounted while it is in use."""

    def __init__(self, root: str, *, private: str | None = None) -> None:
        """``private`` is the folder above ``root`` that is created for this user alone."""
        self.root = root
        self._private = private

    def open(self, path: str, flags: int) -> int:
        """Return a descriptor of ``path``; the empty path means the root itself.

        ``flags`` is one of the constants above. ``path`` has no empty, ``.`` or ``..`` component.
        Raises OSError, with ``ELOOP`` if any component is a symbolic link.
        """
        if not path:
            return os.open(self.root, flags | os.O_CLOEXEC)
        first, *others = path.split("/")
        names, current = [f"{self.root}/{first}", *others], None
        try:
            for name in names[:-1]:
                inner = _open_here(current, name, PLACE | os.O_DIRECTORY)
                if current is not None:
                    os.close(current)
                current = inner
            return _open_here(current, names[-1], flags)
        finally:
            if current is not None:
                os.close(current)

    @contextmanager
    def at(self, path: str, flags: int) -> Iterator[int]:
        """Open the path, and close it afterwards."""
        fd = self.open(path, flags)
        try:
            yield fd
        finally:
            os.close(fd)

    def make_folders(self, folder: str) -> None:
        """Create ``folder`` and its missing parents, including the root. Syncs the parent of each,
        so they survive a crash. Another process may remove them again at any time."""
        self._make_root(self.root)
        with suppress(FileNotFoundError):
            current = os.open(self.root, FOLDER | os.O_CLOEXEC)
            try:
                for part in folder.split("/") if folder else ():
                    with suppress(FileExistsError):
                        os.mkdir(part, dir_fd=current)
                        os.fsync(current)
                    inner = _open_here(current, part, FOLDER)
                    os.close(current)
                    current = inner
            finally:
                os.close(current)

    def _make_root(self, folder: str) -> None:
        mode = 0o700 if folder == self._private else 0o777
        try:
            os.mkdir(folder, mode)
        except FileExistsError:
            return
        except FileNotFoundError:
            self._make_root(os.path.dirname(folder))
            with suppress(FileExistsError):
                os.mkdir(folder, mode)
        fd = os.open(os.path.dirname(folder), FOLDER | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _open_here(folder: int | None, name: str, flags: int) -> int:
    try:
        fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except NotADirectoryError:
        # A link also fails with ENOTDIR if a folder is required.
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise _is_link(name) from None
        raise
    try:
        if flags == PLACE and stat.S_ISLNK(os.fstat(fd).st_mode):
            raise _is_link(name)
    except OSError:
        os.close(fd)
        raise
    return fd


def _is_link(name: str) -> OSError:
    return OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)
