"""Opens what lies under a folder, and nothing that a symbolic link leads to.

Whoever may write below the folder of a store, and be it one of its namespaces, could otherwise
plant a link, and have replicas read files of theirs as payloads, or write and delete where only
they may. The folder's own path is the operator's, and may lead through links.

Linux resolves a path without links in one call, ``openat2``, which Python does not have. Where it
is missing (before Linux 5.6, in some sandboxes) every component is opened by itself: 6 us in place
of 2 for four components (2-core x86, 2026-11-22).
"""

import ctypes
import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Final

FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY
"""A folder that can be listed, synced, and named as ``dir_fd``."""
PLACE: Final = os.O_PATH
"""A file that can only be looked at by ``fstat``, whatever it is."""
VALUE: Final = os.O_RDONLY | os.O_NONBLOCK
"""A file to be read. Nothing waits for somebody to write into what is a pipe: whoever opens looks
at once whether it is a regular file, for which the flag means nothing."""

_OPENAT2: Final = 437
"""The same number on every architecture."""
_RESOLVE_NO_SYMLINKS: Final = 0x04
_HERE: Final = -100
"""``AT_FDCWD``; the paths that go with it are absolute."""

Opens = Callable[[int, bytes, int], int]
"""A folder's descriptor, a path from there on, flags: what is there, reached through no link."""


class Beneath:
    """Opens by paths relative to ``root``, an absolute path. Thread-safe; keeps nothing open, so
    that ``root`` may come, go, and be mounted while it is in use."""

    def __init__(self, root: str, *, private: str | None = None) -> None:
        """``private``: the one of the folders above ``root`` that is made for this user alone."""
        self.root = root
        self._private = private
        self._start = os.fsencode(root) + b"/"
        self._opens = kernel_opens()
        # The kernel refuses links in all of a path. Without one in the root's own that is one call.
        self._in_one = self._opens is not None and os.path.realpath(root) == root

    def open(self, path: str, flags: int) -> int:
        """A descriptor of what lies at ``path``; the root itself for the empty path.

        ``flags`` is one of the above; ``path`` has no empty, ``.`` or ``..`` component. Raises
        OSError, with ``ELOOP`` where a symbolic link is on the way or at its end.
        """
        if self._in_one and path:
            assert self._opens is not None
            try:
                return self._opens(_HERE, self._start + _encoded(path), flags)
            except OSError as exc:
                if exc.errno != errno.ELOOP:  # else perhaps the root has become a link meanwhile
                    raise
        root = os.open(self.root, (PLACE if path else flags) | os.O_CLOEXEC)
        if not path:
            return root
        try:
            return (self._opens or walking_opens)(root, _encoded(path), flags)
        finally:
            os.close(root)

    @contextmanager
    def at(self, path: str, flags: int) -> Iterator[int]:
        """``open``, closed afterwards."""
        fd = self.open(path, flags)
        try:
            yield fd
        finally:
            os.close(fd)

    def make_folders(self, folder: str) -> None:
        """Make ``folder`` and those above it, the root's included, where they are missing. The
        parent of each is synced, so that a crash keeps them. They may be gone again afterwards."""
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


def walking_opens(folder: int, path: bytes, flags: int) -> int:
    """What ``kernel_opens`` does, one component after the other."""
    *folders, name = path.split(b"/")
    current = folder
    try:
        for part in folders:
            inner = _open_here(current, part, PLACE | os.O_DIRECTORY)
            if current != folder:
                os.close(current)
            current = inner
        return _open_here(current, name, flags)
    finally:
        if current != folder:
            os.close(current)


def _open_here(folder: int, name: bytes | str, flags: int) -> int:
    try:
        fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except NotADirectoryError:
        # What is said of a link, too, where nothing but a folder will do.
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise _error(errno.ELOOP, name) from None
        raise
    if flags == PLACE and stat.S_ISLNK(os.fstat(fd).st_mode):
        os.close(fd)
        raise _error(errno.ELOOP, name)
    return fd


class _How(ctypes.Structure):
    """``struct open_how``."""

    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


@cache
def kernel_opens() -> Opens | None:
    """The kernel's own way, or None where there is none."""
    try:
        call: Any = ctypes.CDLL(None, use_errno=True).syscall
    except (AttributeError, OSError):
        return None
    call.restype = ctypes.c_long
    call.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t)
    hows = {
        flags: _How(flags | os.O_CLOEXEC, 0, _RESOLVE_NO_SYMLINKS)
        for flags in (FOLDER, PLACE, VALUE)
    }
    places = {flags: (ctypes.addressof(how), how) for flags, how in hows.items()}
    size = ctypes.sizeof(_How)

    def opens(folder: int, path: bytes, flags: int) -> int:
        how, _alive = places[flags]
        while True:
            fd: int = call(_OPENAT2, folder, path, how, size)
            if fd >= 0:
                return fd
            number = ctypes.get_errno()
            if number != errno.EINTR:
                raise _error(number, path)

    try:
        os.close(opens(_HERE, b"/", PLACE))
    except OSError:
        return None
    return opens


def _encoded(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")


def _error(number: int, path: bytes | str) -> OSError:
    return OSError(number, os.strerror(number), path)
