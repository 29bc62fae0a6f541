"""Fetches one payload into the arena and verifies it there, frame by frame, as it arrives.

An uncompressed payload goes from the socket to its place in the arena. Others arrive in a buffer of
the fetching thread, and each frame is decoded to its place. A frame is announced to readers when
it is verified. In both cases the arena holds an uncompressed, unsealed payload.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from objkv.agent.residents import Resident, Residents
from objkv.cache.chunks import ChunkCache
from objkv.codec.payload import (
    Claim,
    Header,
    LayerSpec,
    digest,
    frame_pages,
    header_bytes_needed,
    plain_header,
    read_claimed,
)
from objkv.errors import PayloadError, TransferError
from objkv.index.base import ShardRecord
from objkv.stores.base import Arrived, copy_bytes

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Wanted:
    """A payload that a client requested."""

    claim: Claim
    record: ShardRecord
    """Its record, which gives its size, and is forgotten if the payload is not as promised."""


@dataclass(frozen=True, slots=True)
class Source:
    """A copy of a payload outside of the stores: uncompressed, and sealed if payloads are."""

    nbytes: int
    get_into: Callable[[memoryview, Arrived], int | None]
    """See ``ReadStore``."""


class NoRoomError(TransferError):
    """The arena has no memory for the payload."""


class Staging:
    """The buffer of one fetching thread, for payloads that are decoded. It grows as needed."""

    def __init__(self) -> None:
        self._memory: np.ndarray[Any, np.dtype[np.uint8]] = np.empty(0, np.uint8)

    def view(self, nbytes: int) -> memoryview:
        """Return ``nbytes`` of memory, valid until the next call."""
        if len(self._memory) < nbytes:
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory[:nbytes].data

    def clear(self) -> None:
        """Give the memory back."""
        self._memory = np.empty(0, np.uint8)

    def __len__(self) -> int:
        return len(self._memory)


class Fill:
    """One fetch. Belongs to one thread."""

    header: Header | None = None
    """The stored payload's header, once it is verified."""
    _is_encrypted = False
    _pages_at = 0
    """Position of the next frame's pages."""

    def __init__(
        self,
        one: Resident,
        wanted: Wanted,
        residents: Residents,
        cache: ChunkCache,
        known: tuple[LayerSpec, ...] = (),
        *,
        source: Source | None = None,
    ) -> None:
        """
        Args:
            known: the layers that the payload most probably has.
            source: where to read it instead of from the stores. Frames are announced only when all
                are verified: after a fault the stores' bytes may come to other places.
        """
        self._one, self._wanted, self._source = one, wanted, source
        self._residents, self._cache, self._known = residents, cache, known
        is_plain = source is not None or wanted.record.codec == "none"
        self._is_direct = is_plain and cache.seal is None
        self._place: memoryview | None = None
        """The payload's memory in the arena."""
        self._stored = memoryview(b"")
        """The buffer of the store's bytes: the same memory, or a staging buffer."""
        self._sums: list[str] = []
        self.layers = 0
        """Leading frames that readers know of."""

    def run(self, staging: Staging) -> bool:
        """Fetch the payload. Returns False if it is not stored.

        Raises ``PayloadError`` or ``ValueTooLong`` if it is not what its key and its record
        promise, ``NoRoomError``, and ``StoreError``.
        """
        nbytes = self._wanted.record.nbytes if self._source is None else self._source.nbytes
        if nbytes > self._residents.total_bytes:
            raise NoRoomError(f"a payload of {nbytes} bytes is larger than the arena")
        if not nbytes:
            raise PayloadError("an empty payload by the record")
        if self._is_direct:
            self._stored = self._allot(nbytes)
        else:
            self._stored = staging.view(nbytes)
        try:
            got = self._get()
            if got is None:
                return False
            self._arrived(got)
            header = self.header
            if header is None or header.nbytes != got:
                due = "more" if header is None else header.nbytes
                raise PayloadError(f"{got} bytes, expected {due} by the header")
            if self._is_encrypted:  # its header hides the checksums of its pages
                self._finish(header)
            return True
        finally:
            self._stored = memoryview(b"")
            self._place = None

    def _get(self) -> int | None:
        if self._source is not None:
            return self._source.get_into(self._stored, self._arrived)
        key, hot = self._wanted.claim.key, self._wanted.record.hot
        return self._cache.get_into(key, self._stored, hot=hot, arrived=self._arrived)

    def _allot(self, nbytes: int) -> memoryview:
        place = self._place = self._residents.allot(self._one, nbytes)
        if place is None:
            raise NoRoomError(f"no room for {nbytes} bytes in the arena")
        return place

    def _arrived(self, nbytes: int) -> None:
        """Verify the frames that are complete after the first ``nbytes``."""
        if self.header is None and nbytes >= _LENGTH_BYTES:
            self._open(nbytes)
        header = self.header
        if header is None:
            return
        first, ends = len(self._sums), header.frames.ends
        while len(self._sums) < len(ends) and ends[len(self._sums)] <= nbytes:
            self._sums.append(self._verify(header, len(self._sums)))
        if len(self._sums) > first and not self._is_encrypted:
            self.layers = len(self._sums)
            if self._source is None:
                self._residents.advance(self._one, self.layers)

    def _open(self, nbytes: int) -> None:
        """Read and verify the header if the first ``nbytes`` contain it."""
        needed = header_bytes_needed(self._stored[:_LENGTH_BYTES])
        if nbytes < needed:
            return
        header = read_claimed(
            self._stored[:needed], self._wanted.claim, self._known, seal=self._cache.seal
        )
        if header.nbytes > len(self._stored):
            raise PayloadError(f"{header.nbytes} bytes, expected at most {len(self._stored)}")
        if self._is_direct:
            if header.codec != "none":
                raise PayloadError(f"codec {header.codec}, expected none by the record")
            if header.nbytes != len(self._stored):  # the rest of its memory would be served too
                raise PayloadError(f"{header.nbytes} bytes, expected {len(self._stored)}")
        else:
            opened = header.opened
            self._is_encrypted = opened is not None and opened.cipher is not None
            text = plain_header(header, header.frames.raw_checksums)
            self._pages_at = len(text)
            self._allot(len(text) + header.raw_bytes)[: len(text)] = text
        self.header = header

    def _verify(self, header: Header, frame: int) -> str:
        """Verify one frame and have it in its place. Returns the checksum of its pages."""
        if self._is_direct:
            frame_pages(header, frame, self._stored, None)
            return header.frames.raw_checksums[frame]
        assert self._place is not None
        layers = header.frames.layers
        start = self._pages_at
        end = start + layers[frame].nbytes
        self._pages_at = end
        room = self._place[start:end]
        pages = frame_pages(header, frame, self._stored, room)
        if header.frames.codecs[frame] == "none":
            copy_bytes(room, pages, len(pages))
        return digest(room) if self._is_encrypted else header.frames.raw_checksums[frame]

    def _finish(self, header: Header) -> None:
        """Write the header of the decoded payload."""
        assert self._place is not None
        text = plain_header(header, self._sums)
        self._place[: len(text)] = text
        self.layers = len(self._sums)
