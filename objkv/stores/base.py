"""What a store promises. Keys are relative paths (``ns/aa/hash/0.L0-2_H0-2.safetensors``).

Three protocols, so that a signature says what it may destroy: whoever takes a ``ReadStore``
cannot change anything, and a ``PruneStore`` is handed only to sweeps.

Every method of every store is safe to call from many threads, raises ``StoreError`` (and its
subclasses) and nothing else, and returns or fails within the deadline the store was built with.
Keys match ``[A-Za-z0-9._/-]+``, have no empty, ``.`` or ``..`` component, are at most 900 bytes,
and no component is longer than 200 bytes (a file system must be able to hold it). No key continues
another with a ``/``: a folder cannot hold both ``a`` and ``a/b``. ``check_key`` is the one place
that enforces the form, and every store calls it before it touches anything.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from objkv.errors import StoreError, ValueTooLong

Buffer = bytes | bytearray | memoryview
"""Contiguous; a memoryview is of format ``B``."""

Arrived = Callable[[int], None]
"""Told how many leading bytes of a buffer hold what was asked for, while more may still arrive: at
rising numbers, at least once, by the thread that called the store. Those bytes are not written
again before the get is over: they may be on their way to somewhere. What it raises ends the get and
reaches the caller unchanged."""

KEY_BYTES_MAX = 900
COMPONENT_BYTES_MAX = 200

# Lookaheads rather than a split: this runs once per call of every store.
_PART = rf"(?!\.{{1,2}}(?:/|\Z))[A-Za-z0-9._-]{{1,{COMPONENT_BYTES_MAX}}}"
_KEY = re.compile(rf"{_PART}(?:/{_PART})*")
_PREFIX = re.compile(rf"(?:{_PART}/)*[A-Za-z0-9._-]{{0,{COMPONENT_BYTES_MAX}}}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored value as a scan sees it."""

    key: str
    nbytes: int
    modified_s: float
    """Seconds since the epoch, by the store's clock."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Something that a writer which was killed left: no reader ever sees it."""

    key: str
    """Of what it was going to be, as far as the place tells; the folder of a temporary file."""
    name: str
    """The store's own, for ``discard``."""
    nbytes: int
    modified_s: float
    """Seconds since the epoch, by the store's clock."""


class ReadStore(Protocol):
    """A store that can be looked at."""

    def get(self, key: str) -> bytes | None:
        """The whole value, or None if there is none."""

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        """Bytes ``[start, end)`` of the value, fewer if it is shorter, None if there is none."""

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        """Write the value to the beginning of ``buffer``; return how many bytes, None if there is
        no value.

        Without ``start`` all of it: a value longer than ``buffer`` is ``ValueTooLong``. With
        ``start``, bytes ``[start, start + len(buffer))``: fewer if the value ends before, 0 if it
        ends before ``start``. ``buffer`` is writable, contiguous, of format ``B``; the caller owns
        it, and the store does not touch it after returning or raising. What it holds after an
        error is undefined.
        """

    def head(self, key: str) -> Entry | None:
        """Size and age without the value, or None if there is none."""

    def scan(self, prefix: str) -> Iterator[Entry]:
        """All entries whose key starts with ``prefix``, in key order where the place has one.

        May miss or repeat what is added or removed meanwhile. Never loads everything at once.
        """

    def folders(self, folder: str) -> list[str]:
        """The names ``x`` for which keys begin with ``<folder>/x/``, sorted; of all keys for the
        empty ``folder``. May name some below which there is no key; what names of keys cannot be is
        left out. For operators: where a place has no folders it looks at every key."""

    def check(self) -> None:
        """One cheap round trip that proves the place is there and lets us in.

        Raises ``StoreDenied`` with what to fix (no bucket, wrong credentials, not a folder)
        or ``StoreUnavailable``.
        """

    def close(self) -> None:
        """Release connections. Idempotent; the store is not used afterwards."""


class WriteStore(ReadStore, Protocol):
    """A store that can also be added to."""

    def put_if_absent(self, key: str, value: Buffer) -> bool:
        """Write ``value`` atomically unless ``key`` exists; True if this call wrote it.

        Readers see the whole value or none of it, also after a crash of the writer or the host.
        Of many writers at once exactly one gets True. ``value`` is not kept after returning.
        """

    def put(self, key: str, value: Buffer) -> None:
        """Write ``value`` atomically, replacing what is there. Only for mending a corrupt payload
        and for documents that may change; chunks are written with ``put_if_absent``."""


class PruneStore(WriteStore, Protocol):
    """A store that can also forget."""

    def delete(self, key: str) -> bool:
        """Remove the value; True if there was one (stores that cannot tell return True)."""

    def unfinished(self) -> Iterator[Unfinished]:
        """What killed writers left, and what is being written right now: only its age tells."""

    def discard(self, unfinished: Unfinished) -> bool:
        """Remove what ``unfinished`` named; False if it is gone or has become a value."""


def is_key(text: str) -> bool:
    """Whether ``text`` may name a value; scans leave out whatever else they find."""
    return len(text) <= KEY_BYTES_MAX and _KEY.fullmatch(text) is not None


def check_key(key: str) -> None:
    """Raise ``StoreError`` unless ``key`` has the one allowed form: no way out of the store."""
    if not is_key(key):
        raise StoreError(f"not a key: {key[:100]!r}")


def check_prefix(prefix: str) -> None:
    """Raise ``StoreError`` unless ``prefix`` may begin a key; the empty prefix begins them all."""
    if len(prefix) > KEY_BYTES_MAX or _PREFIX.fullmatch(prefix) is None:
        raise StoreError(f"not the beginning of a key: {prefix[:100]!r}")


def folders_of(keys: Iterable[str], folder: str) -> list[str]:
    """What ``ReadStore.folders`` says of a place where ``keys`` are all there is."""
    start = f"{folder}/" if folder else ""
    found = {
        key[len(start) :].partition("/")[0]
        for key in keys
        if key.startswith(start) and "/" in key[len(start) :]
    }
    return sorted(found)


def check_fits(key: str, nbytes: int, buffer: memoryview) -> None:
    """Raise ``ValueTooLong`` if a value of ``nbytes`` is longer than ``buffer``."""
    if nbytes > len(buffer):
        raise ValueTooLong(f"get_into {key}: {nbytes} bytes do not fit into {len(buffer)}")


def copy_into(
    key: str,
    value: Buffer,
    buffer: memoryview,
    arrived: Arrived | None = None,
    start: int | None = None,
) -> int:
    """``get_into`` for a value that is already in memory; returns how many bytes."""
    if start is not None:
        value = memoryview(value)[start : start + len(buffer)]
    nbytes = len(value)
    check_fits(key, nbytes, buffer)
    copy_bytes(buffer, value, nbytes)
    if arrived is not None:
        arrived(nbytes)
    return nbytes


def copy_bytes(target: memoryview, source: Buffer, nbytes: int) -> None:
    """Copy ``nbytes`` from the beginning of one buffer to that of another.

    numpy lets other threads run meanwhile; a slice assignment holds the GIL, 22 ms for 32 MiB (2
    cores, 2026-11), which the thread that computes would wait for.
    """
    import numpy as np  # late: a command line that only prints does without

    if nbytes:
        np.copyto(np.frombuffer(target, np.uint8, nbytes), np.frombuffer(source, np.uint8, nbytes))
