"""Fetches one payload into the arena and verifies it there, frame by frame, as it arrives.

An uncompressed payload goes from the socket to its place in the arena. Others arrive in a buffer of
the fetching thread, and each frame is decoded to its place: the arena holds uncompressed, unsealed
payloads. A frame is announced to readers when it is verified.

Payloads for which a forward pass waits come in parts, so that the first layers of all payloads
arrive before the last layers of any.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock
from typing import Any, Final, NamedTuple

import numpy as np

from objkv.agent.arena_cache import ArenaCache, CachedPayload
from objkv.agent.messages import MissReason
from objkv.cache.chunks import ChunkCache
from objkv.codec.header import header_bytes_needed
from objkv.codec.payload import frame_pages, plain_header, read_claimed
from objkv.codec.values import Claim, Header, LayerSpec, digest
from objkv.errors import PayloadError, TransferError
from objkv.index.base import ShardRecord
from objkv.stores.base import Arrived, copy_bytes

LAYOUTS_MAX: Final = 1024
"""Layouts with a number. Later ones have none until the agent ends."""
_SHARDS_MAX = 1024
"""Shards whose layout is remembered, so that headers are parsed quickly."""


class KnownLayout(NamedTuple):
    """Where frames are: the pages follow the header, uncompressed and without a gap."""

    layers: tuple[LayerSpec, ...] = ()
    header_bytes: int = 0
    """Length of the header; 0 if it is not known."""
    number: int = 0
    """Never another layout's as long as the agent runs. 0: it has none."""


UNKNOWN: Final = KnownLayout()


class KnownLayouts:
    """The layouts of payloads in the arena, each with a number. Thread-safe.

    Nearly all payloads of a model have one of a few layouts. A reader that knows its number reads
    no header, because of each payload with this number the agent promises: its header is valid, and
    no frame is compressed; its layers, and the places of all frames from its start on, are equal;
    it is as long as its header states; its shard, parent hash and range of tokens are those of the
    opening. A number is valid on one connection to one agent.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._numbers: dict[tuple[int, tuple[LayerSpec, ...]], KnownLayout] = {}
        self._layers: dict[tuple[LayerSpec, ...], tuple[LayerSpec, ...]] = {}
        """One object for equal layers, since the header's parser goes by its identity."""
        self._last: dict[tuple[str, str], KnownLayout] = {}

    def last(self, namespace: str, field: str) -> KnownLayout:
        """Return the layout of the last payload of a shard: most probably the next one's, too."""
        return self._last.get((namespace, field), UNKNOWN)

    def note(
        self, namespace: str, field: str, layers: tuple[LayerSpec, ...], header_bytes: int
    ) -> int:
        """Return the layout's number of an uncompressed payload whose header was verified."""
        last = self._last.get((namespace, field))
        if last is not None and last.layers is layers and last.header_bytes == header_bytes:
            return last.number
        with self._lock:
            layout = self._numbers.get((header_bytes, layers))
            if layout is None:
                layout = self._new(layers, header_bytes)
            self._last.pop((namespace, field), None)
            while len(self._last) >= _SHARDS_MAX:
                del self._last[next(iter(self._last))]
            self._last[namespace, field] = layout
        return layout.number

    def _new(self, layers: tuple[LayerSpec, ...], header_bytes: int) -> KnownLayout:
        if len(self._numbers) >= LAYOUTS_MAX:
            return KnownLayout(layers, header_bytes)
        layers = self._layers.setdefault(layers, layers)
        layout = KnownLayout(layers, header_bytes, len(self._numbers) + 1)
        self._numbers[header_bytes, layers] = layout
        return layout


_LENGTH_BYTES = 8
_HEADER_BYTES = 32 << 10
"""The first part of a payload has this much room for the header, which is nearly always enough."""


@dataclass(frozen=True, slots=True)
class DiskCopy:
    """A copy of a payload outside of the stores: uncompressed, and sealed if payloads are."""

    nbytes: int
    get_into: Callable[[memoryview, Arrived], int | None]
    """See ``ReadStore``."""


@dataclass(frozen=True, slots=True)
class PartPolicy:
    """How payloads that a forward pass waits for are divided into requests."""

    parts_max: int = 4
    part_bytes_min: int = 1 << 20
    """Smallest part that is worth a separate request."""

    def count(self, nbytes: int) -> int:
        """Return the number of parts of a payload."""
        return max(1, min(self.parts_max, nbytes // self.part_bytes_min))


NO_PARTS = PartPolicy(parts_max=1)


@dataclass(frozen=True, slots=True)
class PayloadRequest:
    """A payload to fetch."""

    claim: Claim
    record: ShardRecord
    """Its record, which gives its size, and is forgotten if the payload is not as promised."""


class MissError(TransferError):
    """The payload cannot be had now, whatever its bytes."""

    def __init__(self, reason: MissReason) -> None:
        super().__init__(reason.name)
        self.reason = reason


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
    """One fetch. Belongs to one thread at a time."""

    def __init__(
        self,
        one: CachedPayload,
        wanted: PayloadRequest,
        arena_cache: ArenaCache,
        cache: ChunkCache,
        layouts: KnownLayouts,
        *,
        disk_copy: DiskCopy | None = None,
        part_policy: PartPolicy = NO_PARTS,
    ) -> None:
        """``layouts``: of earlier payloads; gets this one's. ``disk_copy``: read instead of the
        stores, and announced as a whole: after a fault the stores' bytes may come elsewhere."""
        self.header: Header | None = None
        """The stored payload's header, once it is verified."""
        self.is_complete = False
        """Whether the whole payload is in the arena."""
        self.is_hot = False
        self._is_encrypted = False
        self._memory: memoryview | None = None
        self._stored = memoryview(b"")
        """The buffer of the store's bytes: the same memory, or a staging buffer."""
        self._one, self.wanted, self._disk_copy = one, wanted, disk_copy
        self._arena_cache, self._cache, self._layouts = arena_cache, cache, layouts
        key = wanted.claim.key
        self._shard = key.namespace, key.field
        self._known = layouts.last(*self._shard)
        is_plain = disk_copy is not None or wanted.record.is_plain
        self._is_direct = is_plain and cache.seal is None
        self.nbytes = wanted.record.nbytes if disk_copy is None else disk_copy.nbytes
        """Length of the payload where it is read."""
        # A sealed payload is announced as a whole, since its header hides the frames' checksums.
        count = part_policy.count(self.nbytes) if disk_copy is None and cache.seal is None else 1
        self._parts: list[tuple[int, int]] = []
        """The byte ranges that are left, once the header is known."""
        self._count, self.is_whole = count, count == 1
        self._sums: list[str] = []
        self._pages_at = 0
        self.layers = 0
        """Leading frames that readers know of."""

    def run(self, staging: Staging) -> bool:
        """Fetch the payload, or its next part: see ``is_complete``. Returns False if it is not
        stored. Raises ``PayloadError`` or ``ValueTooLong`` if it is not what its key and its record
        promise, ``MissError``, and ``StoreError``."""
        if self.nbytes > self._arena_cache.payload_bytes_max:
            raise MissError(MissReason.NO_ROOM)
        if not self.nbytes:
            raise PayloadError("an empty payload by the record")
        try:
            is_stored = self._take_memory(staging) and self._next_part()
            if is_stored and self.is_whole and not self.is_complete:
                is_stored = self._whole()
            return is_stored
        finally:
            self._stored = memoryview(b"")
            if self.is_complete:
                self._memory = None

    def _take_memory(self, staging: Staging) -> bool:
        """Have the buffer for the store's bytes, and the payload's place if its size is known.
        Returns False if it is not stored: before, nothing is evicted for it that no store has."""
        spare = not self.is_whole  # shows a payload that is too long
        if not self._is_direct:
            if self._memory is None and (size := self._known.header_bytes):
                size += self.wanted.record.raw_bytes
                self._memory = self._arena_cache.allocate(self._one, size, is_sure=False)
            self._stored = staging.view(self.nbytes + spare)
            return True
        if self._memory is None and self._disk_copy is None:
            self._memory = self._arena_cache.allocate(self._one, self.nbytes, spare, is_sure=False)
            if self._memory is None and self._get(staging.view(1), 0, 0) is None:
                return False
        self._stored = self._memory or self._allocate(self.nbytes, spare)
        return True

    def _whole(self) -> bool:
        got = self._get(self._stored[: self.nbytes], 0, None)
        if got is None:
            return False
        self._arrived(got)
        header = self.header
        if header is None or header.nbytes != got:
            due = "more" if header is None else header.nbytes
            raise PayloadError(f"{got} bytes, expected {due} by the header")
        if self._is_encrypted:  # its header hides the checksums of its pages
            self._finish(header)
        self.is_complete = True
        return True

    def _next_part(self) -> bool:
        """Fetch a part, or all if the record is wrong about its length. False if not stored."""
        if self.is_whole:
            return True
        is_first = self.header is None
        opening = min(self.nbytes, self.nbytes // self._count + _HEADER_BYTES)
        start, end = (0, opening) if is_first else self._parts.pop(0)
        is_last = end == self.nbytes
        got = self._get(self._stored[start : end + is_last], start, start)
        if got is None:
            return False
        self._arrived(start + min(got, end - start))
        header = self.header
        if header is None or (is_first and header.nbytes != self.nbytes):
            self.is_whole = True
            return True
        if got != end - start:
            raise PayloadError(f"{got} bytes from {start} on, expected {end - start}")
        if is_first:
            self._parts = list(self._cut(header, end))
        self.is_complete = not self._parts
        return True

    def _cut(self, header: Header, done: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges after the first ``done`` bytes, each with about as many frames."""
        starts, first = header.frames.starts, len(self._sums)
        left = len(starts) - first
        count = min(self._count - 1, left)
        cuts = [starts[first + left * n // count] for n in range(count)] if left else []
        if cuts and self._is_direct:  # a frame that has begun to arrive stays in its place
            cuts[0] = done
        yield from pairwise([*cuts, self.nbytes])

    def _get(self, buffer: memoryview, first: int, start: int | None) -> int | None:
        """Read the payload from byte ``first`` on; ``start``: see ``ReadStore.get_into``."""

        def arrived(nbytes: int) -> None:
            self._arrived(min(first + nbytes, self.nbytes))

        if self._disk_copy is not None:
            return self._disk_copy.get_into(buffer, arrived)
        key = self.wanted.claim.key
        if self.wanted.record.hot:
            got = self._cache.hot.get_into(key.path(), buffer, arrived, start)
            if got is not None:
                self.is_hot = True
                return got
        return self._cache.get_into(key, buffer, arrived, start)

    def _allocate(self, nbytes: int, spare: int = 0) -> memoryview:
        room = self._arena_cache.allocate(self._one, nbytes, spare)
        if room is None:
            raise MissError(MissReason.NO_ROOM)
        self._memory = room
        return room

    def _resize(self, nbytes: int) -> memoryview:
        """Return the payload's place in the arena, of this size. No reader knows the place yet."""
        if self._memory is None or len(self._memory) != nbytes:
            self._arena_cache.deallocate(self._one)
            return self._allocate(nbytes)
        return self._memory

    def _arrived(self, nbytes: int) -> None:
        """Verify the frames that are complete after the first ``nbytes``."""
        if self._one.leases <= 1 and self._disk_copy is None:  # the lease is this fetch's own
            raise MissError(MissReason.STORE)  # if another client comes meanwhile
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
            if self._disk_copy is None:
                self._arena_cache.advance(self._one, self.layers)

    def _open(self, nbytes: int) -> None:
        """Read and verify the header if the first ``nbytes`` contain it."""
        needed = header_bytes_needed(self._stored[:_LENGTH_BYTES])
        if nbytes < needed:
            return
        header = read_claimed(
            self._stored[:needed], self.wanted.claim, self._known.layers, seal=self._cache.seal
        )
        record = self.wanted.record  # a folder that is its own index knows only a file's length
        if record.raw_bytes not in (header.raw_bytes, record.nbytes):
            raise PayloadError(f"{header.raw_bytes} bytes of pages, not those of the record")
        if header.nbytes > self.nbytes:
            raise PayloadError(f"{header.nbytes} bytes, expected at most {self.nbytes}")
        if self._is_direct:
            if header.codec != "none":
                raise PayloadError(f"codec {header.codec}, expected none by the record")
            if header.nbytes != self.nbytes:  # the rest of its memory would be served too
                raise PayloadError(f"{header.nbytes} bytes, expected {self.nbytes}")
            header_bytes = header.data_start
        else:
            self._is_encrypted = header.cipher is not None
            text = plain_header(header, header.frames.raw_checksums)
            self._pages_at = header_bytes = len(text)
            self._resize(header_bytes + header.raw_bytes)[:header_bytes] = text
        self._one.layout = self._layouts.note(*self._shard, header.frames.layers, header_bytes)
        self.header = header

    def _verify(self, header: Header, frame: int) -> str:
        """Verify one frame and have it in its place. Returns the checksum of its pages."""
        if self._is_direct:
            frame_pages(header, frame, self._stored, None)
            return header.frames.raw_checksums[frame]
        assert self._memory is not None
        layers = header.frames.layers
        start = self._pages_at
        end = start + layers[frame].nbytes
        self._pages_at = end
        room = self._memory[start:end]
        pages = frame_pages(header, frame, self._stored, room)
        if header.frames.codecs[frame] == "none":
            copy_bytes(room, pages, len(pages))
        return digest(room) if self._is_encrypted else header.frames.raw_checksums[frame]

    def _finish(self, header: Header) -> None:
        assert self._memory is not None
        text = plain_header(header, self._sums)
        self._memory[: len(text)] = text
        self.layers = len(self._sums)
