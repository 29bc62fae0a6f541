"""What a directory's store asks of the file system: reading into buffers, and errors that say what
to fix."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from objkv.errors import StoreDenied, StoreError, StoreUnavailable
from objkv.stores.base import Arrived

_SLICE_BYTES = 2 << 20
"""About what is read at once where somebody waits for the first bytes: still in the processor's
caches when they are verified."""

_FIX = {
    errno.EACCES: "give this user read, write and search permission on the folder",
    errno.EPERM: "the file system refuses this; it must allow hard links and belong to this user",
    errno.EROFS: "the file system is mounted read-only",
    errno.ENOSPC: "the disk is full: free space, or remove old payloads",
    errno.EDQUOT: "the quota is used up: raise it, or remove old payloads",
    errno.EEXIST: "a file stands where a folder is needed",
    errno.ENOTDIR: "a file stands where a folder is needed",
    errno.EISDIR: "a folder stands where a value is needed",
    errno.EOPNOTSUPP: "the file system has no hard links: choose another folder",
    errno.ENAMETOOLONG: "the path of the folder is too long: choose a shorter one",
    errno.ELOOP: "remove the symbolic link in the folder, where none is followed; or the folder's "
    "own path is a loop of them",
}
ABSENT = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ENXIO, errno.ENODEV))
"""What opening says where no value is; the last two, of sockets and of devices that are not there.
"""
_MENDS = {errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ETIMEDOUT, errno.EINTR}


def read_into(key: str, fd: int, start: int, buffer: memoryview, arrived: Arrived | None) -> None:
    """Fill ``buffer`` with the file's bytes from ``start`` on; raises ``StoreError``, and what
    ``arrived`` raises."""
    at, size = 0, len(buffer)
    count = 1 if arrived is None else max(1, round(size / _SLICE_BYTES))
    step = -(-size // count)  # of equal length: a short one at the end costs as much as a long one
    while at < size:
        try:
            got = os.preadv(fd, [buffer[at : at + step]], start + at)
        except OSError as exc:
            raise failed("get_into", key, exc) from exc
        if not got:
            raise StoreError(f"get_into {key}: the file became shorter while being read")
        at += got
        if arrived is not None:
            arrived(at)
    if not size and arrived is not None:
        arrived(0)


def some_of(part: bytes, key: str) -> bytes:
    """``part``, which is not the end of the file."""
    if not part:
        raise StoreError(f"get {key}: the file became shorter while being read")
    return part


@contextmanager
def translated(verb: str, key: str) -> Iterator[None]:
    """Raise as ``StoreError`` what the file system raises inside."""
    try:
        yield
    except OSError as exc:
        raise failed(verb, key, exc) from exc


def failed(verb: str, key: str, exc: OSError) -> StoreError:
    """What the file system's ``exc`` is, to whoever uses a store."""
    reason = f"{verb} {key}: {exc.strerror or exc}"
    if exc.errno in _MENDS:
        return StoreUnavailable(reason)
    if exc.errno in _FIX:
        return StoreDenied(f"{reason}: {_FIX[exc.errno]}")
    return StoreError(reason)
