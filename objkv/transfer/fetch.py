"""Fetching: one span of one payload through memory of the caller's into its blocks.

A move is what its header says from the first byte to the last: nothing shorter, nothing longer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

from objkv.cache.chunks import ChunkCache
from objkv.codec.payload import Claim, Header, frame_pages, header_bytes_needed, read_claimed
from objkv.codec.seal import Seal
from objkv.errors import PayloadError, TransferError
from objkv.keys.chunk import ChunkKey
from objkv.stores.base import Arrived
from objkv.telemetry import Recorder
from objkv.tracing import NO_SPAN, Span, now_ns
from objkv.transfer.job import LoadJob
from objkv.transfer.lanes import Lane
from objkv.transfer.plan import LoadMove
from objkv.transfer.queue import FetchSpan, Task, opening_bytes, remaining, span_count
from objkv.transfer.sources import Source, Sources

# Landing: a payload is verified and written into its blocks while it is still arriving.
#
# Each frame as soon as its last byte is there, when it is still in the processor's cache. Nothing
# is written that was not verified: the header with its claim and layers first, then each frame.

_LENGTH_BYTES = 8
_BURST_BYTES = 1 << 20
"""Pages written between ``enter`` and ``leave``: whoever closes the job waits for no more, and
many small frames share the cost of the two."""


class UnwantedError(TransferError):
    """Nobody needs the bytes any more: the job was closed, or an earlier chunk failed."""


@dataclass(frozen=True, slots=True)
class Strip:
    """Where one span's pages go, and through which memory."""

    job: LoadJob
    index: int
    """Which move of the job's plan."""
    source: Source
    """The payload, as it most probably is."""
    lane: Lane
    payload: memoryview
    """Each byte of the payload has its place here, wherever its span begins."""
    lease_scratch: Callable[[], memoryview]
    """Memory to decode the span's frames into, all side by side; leased for as long as
    ``payload``. Raises ``TransferError``."""
    seal: Seal | None = None
    """What payloads must be sealed with."""


class Landing:
    """One span of one move. Belongs to one thread."""

    def __init__(self, strip: Strip, span: FetchSpan, header: Header | None = None) -> None:
        self._strip = strip
        self._span = span
        self.header = header
        """None until it was verified; the first span brings it."""
        self.layer = span.first
        """The first that is not in its blocks yet."""
        self._scratch: memoryview | None = None
        self._scratch_at = 0
        move = strip.job.plan.moves[strip.index].move
        self._first_block = move.first_block
        self._block_ids = move.block_ids
        self._placed: Any = None
        self._source = strip.source
        if header is not None:
            self._source = strip.source.reading(header.frames.layers)

    def open(self, nbytes: int, claim: Claim) -> None:
        """The payload's first ``nbytes`` are there: take the header if that is enough.

        Raises ``PayloadError`` if it is not the one of ``claim``, or holds other layers.
        """
        if self.header is not None or nbytes < _LENGTH_BYTES:
            return
        payload, room = self._strip.payload, self._span.nbytes
        header_bytes = header_bytes_needed(payload[:_LENGTH_BYTES])
        if header_bytes > room:
            raise PayloadError(f"a header of {header_bytes} bytes, at most {room} can be")
        if nbytes < header_bytes:
            return
        header = read_claimed(
            payload[:header_bytes], claim, self._source.layers, seal=self._strip.seal
        )
        self._source = self._source.reading(header.frames.layers)
        if header.nbytes > len(payload):
            raise PayloadError(f"{header.nbytes} bytes, at most {len(payload)} can be")
        self.header = header

    def arrived(self, nbytes: int) -> None:
        """The span's first ``nbytes`` are there: write what is complete of it.

        Raises ``PayloadError`` for a frame that is not what the header says, ``UnwantedError`` if
        the job may write no more.
        """
        if self.header is None:
            return
        until = self._span.start + nbytes
        while self._is_complete(until):
            self._write_burst(until)

    def check_end(self, nbytes: int) -> None:
        """The span's bytes have all come, ``nbytes`` of them, one more having been asked for of
        the last span: raise ``PayloadError`` unless that is what the header says."""
        if nbytes != self._span.nbytes:
            raise PayloadError(
                f"{nbytes} bytes from {self._span.start} on, where {self._span.nbytes} are due"
            )
        assert self.layer == self._span.end

    def _is_complete(self, until: int) -> bool:
        if self.layer == self._span.end:
            return False
        assert self.header is not None
        return self.header.frames.ends[self.layer] <= until

    def _write_burst(self, until: int) -> None:
        job, index, lane = self._strip.job, self._strip.index, self._strip.lane
        if not job.enter(index):
            raise UnwantedError("nobody waits for it any more")
        first, mark = self.layer, None
        try:
            if self._placed is None:
                self._placed = lane.place(self._block_ids)
            written = 0
            while written < _BURST_BYTES and self._is_complete(until):
                written += self._write_frame(self._placed)
        finally:
            try:
                mark = lane.mark()  # also on a fault: something may have been given to the lane
            finally:  # whoever closes the job waits for this
                job.leave(index, self._source.fills(range(first, self.layer)), lane, mark)

    def _write_frame(self, placed: Any) -> int:
        """The bytes that were written; none of a layer that is other ranks'."""
        assert self.header is not None
        strip, source, frame = self._strip, self._source, self.layer
        nbytes = 0
        if source.fills(range(frame, frame + 1)):
            nbytes = source.layer_bytes[frame]
            room = None
            if self.header.frames.codecs[frame] != "none":
                if self._scratch is None:
                    self._scratch = strip.lease_scratch()
                room = self._scratch[self._scratch_at : self._scratch_at + nbytes]
                self._scratch_at += nbytes
            pages = frame_pages(self.header, frame, strip.payload, room)
            source.scatter(strip.lane, frame, pages, self._first_block, placed)
        self.layer += 1  # last: what raised was not written
        return nbytes


# Where the time of one payload goes, as spans: got, decoded while it came, copied at the end.

_PAYLOADS_MAX = 64
"""Of one load; a prompt of hundreds of chunks tells the same hundreds of times."""


class PayloadTrace:
    """One get of a payload, or of a span of its layers. Belongs to one thread."""

    def __init__(self, load: Span, chunk: int, index: int) -> None:
        """``index``: of the move in its plan."""
        self._get: Span = NO_SPAN
        if load.is_on and index < _PAYLOADS_MAX:
            self._get = load.child("objkv.get", chunk=chunk)
        self._first_ns = self._last_ns = self._busy_ns = 0
        self.hot = False
        """Whether the bytes came from the hot store."""

    def came_hot(self) -> None:
        """The hot copy is what was read."""
        self.hot = True

    def decoding(self, arrived: Arrived) -> Arrived:
        """``arrived``, which decodes what has come, and is timed if anybody wants to know."""
        if not self._get.is_on:
            return arrived

        def timed(nbytes: int) -> None:
            begun_ns = now_ns()
            try:
                arrived(nbytes)
            finally:
                self._first_ns = self._first_ns or begun_ns
                self._last_ns = now_ns()
                self._busy_ns += self._last_ns - begun_ns

        return timed

    def copied(self, nbytes: int, codec: str) -> None:
        """All was verified, and is in its blocks."""
        if not self._get.is_on:
            return
        # Frames are decoded, and given to the lane, as they come: the copy is what was left to do.
        busy_ms = self._busy_ns / 1e6
        self._get.part("objkv.decode", self._first_ns, self._last_ns, busy_ms=busy_ms, codec=codec)
        self._get.part("objkv.copy", self._last_ns, now_ns())
        self._get.end(store=self._store, bytes=nbytes)

    def failed(self, reason: str) -> None:
        """It is a miss."""
        self._get.end(reason, store=self._store)

    @property
    def _store(self) -> str:
        return "hot" if self.hot else "bulk"


@dataclass(frozen=True, slots=True)
class Cuts:
    """Into how many requests a payload may be cut."""

    step_spans_max: int = 4
    """For loads within the step, so that the first layers of all chunks come first. Between steps
    it is one: nobody waits for a layer."""
    span_bytes_min: int = 1 << 20
    """What a request of its own is worth; smaller payloads come in one."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A span that was verified and is in its blocks, or on its lane's way there."""

    claim: Claim
    header: Header
    nbytes: int
    """Of the span."""
    hot: bool
    """Whether the record promised a hot copy."""
    rest: list[FetchSpan]
    """What remains to be fetched of the payload, if this was its first span."""
    seconds: float | None
    """How long the store took for it, without what became of its bytes meanwhile; None unless it
    was the whole payload."""


class Fetcher:
    """Safe from many threads, each with a lane of its own."""

    def __init__(
        self,
        cache: ChunkCache,
        sources: Sources,
        cuts: Cuts,
        recorder: Recorder,
    ) -> None:
        self._cache = cache
        self._sources = sources
        self._cuts = cuts
        self._recorder = recorder

    def fetch(
        self, lane: Lane, task: Task, lease: Callable[[], memoryview], trace: PayloadTrace
    ) -> Fetched | None:
        """Fetch the task's span, verify it, give it to ``lane``; None if there is no payload.

        ``trace`` is told on the way. ``lease`` gives memory for one payload, once or twice; it is
        used until a later mark of ``lane`` is done, also after an error. Raises ``StoreError``,
        ``PayloadError``, what ``lease`` raises, and ``UnwantedError`` once nobody waits for the
        move any more.
        """
        job, index, span = task
        load = job.plan.moves[index]
        source = self._sources.of(load)
        strip = Strip(job, index, source, lane, lease(), lease, self._cache.seal)
        if span is None:
            return self._open(strip, load, trace)
        return self._go_on(strip, load, span, trace)

    def _open(self, strip: Strip, load: LoadMove, trace: PayloadTrace) -> Fetched | None:
        job, layers, room = strip.job, strip.source.layers, len(strip.payload)
        move, key = load.move, chunk_key(strip.job.plan.namespace, load, strip.source)
        claim = Claim(key, move.parent_hash, move.token_start, move.token_end)
        count = self._count(strip, load, key)
        nbytes = room
        if count > 1:
            nbytes = min(
                room, opening_bytes(layers, count, tokens=move.token_end - move.token_start)
            )
        landing = Landing(strip, FetchSpan(0, 0, len(layers), 0, nbytes, last=count == 1))
        landing_s = 0.0

        def landed(nbytes: int) -> None:
            nonlocal landing_s
            since = monotonic()
            job.began()
            landing.open(nbytes, claim)
            landing.arrived(nbytes)
            landing_s += monotonic() - since

        arrived = trace.decoding(landed)
        hot, started = is_hot(load, key), monotonic()
        buffer, on_hot = strip.payload[:nbytes], trace.came_hot
        start = None if count == 1 else 0
        got = self._cache.get_into(
            key, buffer, hot=hot, arrived=arrived, on_hot=on_hot, start=start
        )
        if got is None:
            return None
        seconds = monotonic() - started - landing_s
        job.came(got)
        arrived(got)
        header = landing.header
        ended = count == 1 or got < nbytes
        if header is None or header.nbytes < got or (ended and header.nbytes > got):
            due = "more" if header is None else header.nbytes
            raise PayloadError(f"{got} bytes where the header says {due}")
        if not ended and header.nbytes == room:  # the last span asks for a byte more
            raise PayloadError(f"{room} bytes, fewer than that can be")
        self._loaded(got, trace)
        if ended:
            return Fetched(claim, header, got, hot, [], seconds)
        rest = remaining(header, landing.layer, count - 1)
        job.opened(strip.index, header, len(rest))
        return Fetched(claim, header, got, hot, rest, None)

    def _go_on(
        self, strip: Strip, load: LoadMove, span: FetchSpan, trace: PayloadTrace
    ) -> Fetched | None:
        header = strip.job.header(strip.index)
        key = header.claim.key
        landing = Landing(strip, span, header)
        hot = is_hot(load, key)
        buffer = strip.payload[span.start : span.start + span.nbytes + span.last]
        arrived = trace.decoding(landing.arrived)
        got = self._cache.get_into(
            key, buffer, hot=hot, arrived=arrived, on_hot=trace.came_hot, start=span.start
        )
        if got is None:
            return None
        strip.job.came(got)
        arrived(got)
        landing.check_end(got)
        self._loaded(got, trace)
        return Fetched(header.claim, header, got, hot, [], None)

    def _loaded(self, nbytes: int, trace: PayloadTrace) -> None:
        self._recorder.count("load_bytes", nbytes)
        self._recorder.count("hot_load_bytes" if trace.hot else "bulk_load_bytes", nbytes)

    def _count(self, strip: Strip, load: LoadMove, key: ChunkKey) -> int:
        if not strip.job.plan.sync:
            return 1
        record = dict(load.records).get(key.field)
        return span_count(
            sum(strip.source.layer_bytes) if record is None else record.nbytes,
            len(strip.source.layers),
            spans_max=self._cuts.step_spans_max,
            span_bytes_min=self._cuts.span_bytes_min,
        )


def chunk_key(namespace: str, load: LoadMove, source: Source) -> ChunkKey:
    """The payload that this rank reads for a move."""
    return ChunkKey(namespace, load.move.prefix_hash, load.move.group, source.shard)


def is_hot(load: LoadMove, key: ChunkKey) -> bool:
    """Whether the record promised a copy in the hot store."""
    return any(record.hot for field, record in load.records if field == key.field)
