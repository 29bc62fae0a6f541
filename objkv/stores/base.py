"""The contract of a store of immutable values under relative keys, such as
``ns/aa/hash/0.L0-2_H0-2.safetensors``.

The protocols state what code may destroy: only sweeps receive a ``PruneStore``.

Any thread may call any method. It blocks until it returns, or raises ``StoreError`` (or a subclass)
and nothing else, within the deadline that the store was built with.

A key matches ``[A-Za-z0-9._/-]+``, has no empty, ``.`` or ``..`` component, and at most 900 bytes,
200 per component, so that file systems can hold it. No key extends another key with a ``/``: a
folder cannot hold both ``a`` and ``a/b``. Every store calls ``check_key`` first.
"""

import mmap
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from objkv.errors import StoreError, ValueTooLong

Buffer = bytes | bytearray | memoryview
"""Contiguous. A memoryview must have format ``B``."""

Arrived = Callable[[int], None]
"""Progress callback of a get, called at least once, on the caller's thread, with the rising number
of leading bytes of the buffer that are valid. The get does not write these bytes again, so the
callback may copy them. Its exceptions end the get and reach the caller unchanged."""

KEY_BYTES_MAX = 900
COMPONENT_BYTES_MAX = 200

# Lookaheads instead of a split, because every call of every store runs this.
_PART = rf"(?!\.{{1,2}}(?:/|\Z))[A-Za-z0-9._-]{{1,{COMPONENT_BYTES_MAX}}}"
_KEY = re.compile(rf"{_PART}(?:/{_PART})*")
_PREFIX = re.compile(rf"(?:{_PART}/)*[A-Za-z0-9._-]{{0,{COMPONENT_BYTES_MAX}}}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored value, as a scan returns it."""

    key: str
    nbytes: int
    modified_s: float
    """Seconds since the epoch, by the store's clock."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A leftover of a killed writer, or a write in progress. No reader sees it."""

    key: str
    """Of the intended value, as far as known: a local store knows its folder."""
    name: str
    """The store's own identifier, for ``discard``."""
    nbytes: int
    modified_s: float
    """Seconds since the epoch, by the store's clock."""


@dataclass(frozen=True, slots=True)
class LifecycleRules:
    """The rules of a bucket for objkv's payloads by their age, in days; None without a rule."""

    expire_days: int | None
    """Deletes them, at the earliest by the rule that does so first. 0 for a rule with a date."""
    archive_days: int | None
    """Moves them to a storage class from which they cannot be read at once."""


class ReadValues(Protocol):
    """Can be read by key."""

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes | None:
        """Return bytes ``[start, end)`` of the value, or None if the key does not exist: fewer if
        the value ends earlier, and all from ``start`` on without ``end``."""

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        """Read the value to the beginning of ``buffer``. Return the number of bytes, or None if the
        key does not exist.

        Without ``start``, read the whole value; one longer than ``buffer`` raises ``ValueTooLong``.
        With ``start``, read bytes ``[start, start + len(buffer))``: fewer, or 0, if the value ends
        earlier. ``buffer`` is the caller's, writable, contiguous and of format ``B``. It is not
        accessed after the call, and undefined after an error.
        """

    def head(self, key: str) -> Entry | None:
        """Return size and age without reading the value, or None if the key does not exist."""

    def check(self) -> None:
        """Make one cheap round trip that proves that the store exists and accepts our credentials.
        Raises ``StoreDenied`` with the fix, or ``StoreUnavailable``."""

    def close(self) -> None:
        """Release connections. Idempotent; do not use the store afterwards."""


class ReadStore(ReadValues, Protocol):
    """A store whose keys can be listed, too."""

    def scan(self, prefix: str) -> Iterator[Entry]:
        """Yield all entries whose key starts with ``prefix``, in key order if the backend has one.
        May miss or repeat entries that change meanwhile. The listing is never whole in memory."""

    def folders(self, folder: str) -> list[str]:
        """Return the sorted names ``x`` for which keys start with ``<folder>/x/``; an empty
        ``folder`` means the top level. May include folders without keys, and omits names that
        cannot be part of one. For operators: a backend without folders reads every key."""


class WriteValues(ReadValues, Protocol):
    """A store that can also be written."""

    def put_if_absent(self, key: str, value: Buffer) -> bool:
        """Write ``value`` atomically unless ``key`` exists. Return True if this call wrote it.

        Readers see the whole value or none of it, also after a crash. Of racing writers exactly one
        gets True; none, if the put that wrote was repeated. No reference to ``value`` is kept.
        """

    def put(self, key: str, value: Buffer) -> None:
        """Write ``value`` atomically, replacing an existing value. Only for repairing a corrupt
        payload and for documents that may change; chunks use ``put_if_absent``."""


class WriteStore(WriteValues, ReadStore, Protocol):
    """Can be written and listed."""


class HotStore(WriteValues, Protocol):
    """Copies of values by key, which may disappear at any time. Nothing lists them."""

    def delete(self, key: str) -> bool:
        """Remove the value. Return True if it existed; stores that cannot find out return True."""


class PruneStore(WriteStore, HotStore, Protocol):
    """Can also be swept."""

    def unfinished(self) -> Iterator[Unfinished]:
        """Yield leftovers of killed writers and writes in progress. Only age distinguishes them."""

    def discard(self, unfinished: Unfinished) -> bool:
        """Remove the leftover. Return False if it no longer exists or has become a value."""


def is_key(text: str) -> bool:
    """Whether ``text`` may name a value. Scans omit everything else."""
    return len(text) <= KEY_BYTES_MAX and _KEY.fullmatch(text) is not None


def check_key(key: str) -> None:
    """Raise ``StoreError`` unless ``key`` has the form that cannot lead out of the store."""
    if not is_key(key):
        raise StoreError(f"invalid key: {key[:100]!r}")


def check_prefix(prefix: str) -> None:
    """Raise ``StoreError`` unless a key may start with ``prefix``. The empty prefix is allowed."""
    if len(prefix) > KEY_BYTES_MAX or _PREFIX.fullmatch(prefix) is None:
        raise StoreError(f"invalid key prefix: {prefix[:100]!r}")


def check_fits(key: str, nbytes: int, buffer: memoryview) -> None:
    """Raise ``ValueTooLong`` if a value of ``nbytes`` is longer than ``buffer``."""
    if nbytes > len(buffer):
        raise ValueTooLong(
            f"get_into {key}: value of {nbytes} bytes exceeds the buffer of {len(buffer)} bytes"
        )


def copy_into(key: str, value: Buffer, buffer: memoryview, arrived: Arrived | None = None) -> int:
    """Implement ``get_into`` for a value that is already in memory. Return the number of bytes."""
    nbytes = len(value)
    check_fits(key, nbytes, buffer)
    copy_bytes(buffer, value, nbytes)
    if arrived is not None:
        arrived(nbytes)
    return nbytes


def map_memory(fd: int, nbytes: int, *, writable: bool = True) -> mmap.mmap:
    """Map memory for KV, of a memfd or, with -1, of this process alone. It is in no core dump, and
    no child process inherits it. Raises ``OSError`` and ``OverflowError``."""
    flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    mapping = mmap.mmap(fd, nbytes, flags=flags, prot=prot)
    mapping.madvise(mmap.MADV_DONTFORK)
    mapping.madvise(mmap.MADV_DONTDUMP)
    return mapping


def copy_bytes(target: memoryview, source: Buffer, nbytes: int) -> None:
    """Copy the first ``nbytes``. numpy releases the GIL meanwhile. A slice assignment holds it for
    22 ms per 32 MiB (2 cores, 2026-11) and stalls the thread that computes."""
    import numpy as np  # imported late: commands that only print do not need it

    if nbytes:
        np.copyto(np.frombuffer(target, np.uint8, nbytes), np.frombuffer(source, np.uint8, nbytes))
