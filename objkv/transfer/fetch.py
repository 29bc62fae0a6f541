"""Fetching one span of one payload: its bytes are verified while they arrive, and given to a lane.

Each frame is decoded as soon as its last byte is there, when it is still in the processor's cache.
Nothing is written that was not verified: the header with its claim and layers first, then each
frame. A payload is what its header says from the first byte to the last: nothing shorter, nothing
longer.
"""

from dataclasses import dataclass
from time import monotonic
from types import TracebackType
from typing import Any, Self

from objkv.codec.payload import Claim, Header, frame_pages, header_bytes_needed, read_claimed
from objkv.codec.seal import Seal
from objkv.errors import PayloadError, TransferError
from objkv.index.base import ShardRecord
from objkv.keys.chunk import ChunkKey
from objkv.tracing import NO_SPAN, Span, now_ns
from objkv.transfer.job import LoadJob
from objkv.transfer.lanes import Lane
from objkv.transfer.plan import LoadMove
from objkv.transfer.queue import FetchSpan, Task, opening_bytes, remaining, span_count
from objkv.transfer.slabs import Slab, SlabPool
from objkv.transfer.sources import Source

_LENGTH_BYTES = 8
_BURST_BYTES = 1 << 20
"""Pages written between ``enter`` and ``leave``: closing a job waits for no more, and many small
frames share the cost of the two."""
_TRACED_PAYLOADS_MAX = 64
"""Of one load; the hundreds of a long prompt all look alike."""


class UnwantedError(TransferError):
    """The bytes are not needed any more: the job was closed, or an earlier chunk failed."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """Into how many requests a payload may be cut."""

    step_spans_max: int = 4
    """For loads within the step, so that the first layers of all chunks come first. Between steps
    it is one: no layer is waited for by itself."""
    span_bytes_min: int = 1 << 20
    """What a request of its own is worth; smaller payloads come in one."""


class PayloadTrace:
    """Where the time of one get goes, as spans: decoded while it came, copied at the end. Belongs
    to one thread."""

    def __init__(self, job: LoadJob, index: int) -> None:
        """``index``: of the move in the job's plan."""
        self._get: Span = NO_SPAN
        if job.span.is_on and index < _TRACED_PAYLOADS_MAX:
            self._get = job.span.child("objkv.get", chunk=job.plan.moves[index].move.chunk)
        self.is_on = self._get.is_on
        self.hot = False
        """Whether the bytes came from the hot store."""
        self._first_ns = self._last_ns = 0
        self._busy_s = 0.0

    def came_hot(self) -> None:
        """The hot copy is what was read."""
        self.hot = True

    def decoded(self, begun_ns: int, seconds: float) -> None:
        """Some of the bytes were verified and given to the lane."""
        self._first_ns = self._first_ns or begun_ns
        self._last_ns = now_ns()
        self._busy_s += seconds

    def copied(self, nbytes: int, codec: str) -> None:
        """All was verified, and is in its blocks."""
        if self.is_on:
            # Frames are decoded, and given to the lane, as they come: the copy is what was left.
            first, last, busy_ms = self._first_ns, self._last_ns, 1e3 * self._busy_s
            self._get.part("objkv.decode", first, last, busy_ms=busy_ms, codec=codec)
            self._get.part("objkv.copy", last, now_ns())
            self._get.end(store=self._store, bytes=nbytes)

    def failed(self, reason: str) -> None:
        """It is a miss."""
        self._get.end(reason, store=self._store)

    @property
    def _store(self) -> str:
        return "hot" if self.hot else "bulk"


class Decoder:
    """Decodes one span into the blocks of one move. Belongs to one thread.

    A context manager: it holds slabs until all that it gave to the lane was copied. What it raises
    is ``PayloadError`` for bytes that are not the payload that is due, ``UnwantedError`` once the
    job may write no more, and ``TransferError`` where no slab is free.
    """

    def __init__(
        self,
        task: Task,
        source: Source,
        lane: Lane,
        slabs: SlabPool,
        *,
        cuts: Cuts,
        seal: Seal | None,
    ) -> None:
        """``source``: the payload, as it most probably is. ``seal``: what payloads must be sealed
        with."""
        job, index, span = task
        self._job, self._index, self._load = job, index, job.plan.moves[index]
        self._lane, self._slabs, self._seal = lane, slabs, seal
        self._leased: list[Slab] = []
        self._placed: Any = None
        self._scratch_at, self._busy_s = 0, 0.0
        self.trace = PayloadTrace(job, index)
        self.header = header = None if span is None else job.header(index)
        """None until it was verified; the first span brings it."""
        self.claim = header.claim if header else claim_of(job.plan.namespace, self._load, source)
        self._source = source.reading(header.frames.layers) if header else source
        record = dict(self._load.records).get(self.claim.key.field)
        self.hot = record is not None and record.hot
        """Whether the record promised a copy in the hot store."""
        self._count = 1 if header else self._spans(record, cuts)
        self._span = span or self._opening()
        self._layer = self._span.first  # that is not in its blocks yet
        self.seconds: float | None = None
        """How long the store took for all of a payload, without decoding; None for a part of it."""
        self._started = monotonic()

    def __enter__(self) -> Self:
        self._payload = self._lease()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._lane.mark().wait()  # only then may others have the slabs
        finally:
            for slab in self._leased:
                slab.release()

    @property
    def buffer(self) -> memoryview:
        """Where the span's bytes go: byte n of the payload to byte n of the slab. The last of
        several spans asks for one byte more, to notice a payload longer than its header says."""
        start, nbytes = self._span.start, self._span.nbytes
        more = self._span.last and self._span.number > 0
        return self._payload[start : start + nbytes + more]

    @property
    def start(self) -> int | None:
        """Where to read from; None: all of the payload is due, in one span."""
        if self._span.number == 0 and self._count == 1:
            return None
        return self._span.start

    def arrived(self, nbytes: int) -> None:
        """The span's first ``nbytes`` are there: verify and write what is complete of it."""
        begun = monotonic()
        begun_ns = now_ns() if self.trace.is_on else 0
        if self.header is None:
            self._job.began()
            if nbytes >= _LENGTH_BYTES:
                self._open(nbytes)
        if self.header is not None:
            until, end = self._span.start + nbytes, self._span.end
            ends = self.header.frames.ends
            while self._layer < end and ends[self._layer] <= until:
                self._write_burst(self.header, until)
        seconds = monotonic() - begun
        self._busy_s += seconds
        if begun_ns:
            self.trace.decoded(begun_ns, seconds)

    def end(self, nbytes: int) -> list[FetchSpan]:
        """``nbytes`` of the span have come and no more will. What remains to be fetched of the
        payload, if this was its first span. Raises unless that is what the header says."""
        seconds = monotonic() - self._started - self._busy_s
        self._job.came(nbytes)
        self.arrived(nbytes)
        span = self._span
        if span.number:
            if nbytes != span.nbytes:
                raise PayloadError(f"{nbytes} bytes from {span.start} on, {span.nbytes} are due")
            assert self._layer == span.end
            return []
        header = self.header
        is_whole = self._count == 1 or nbytes < span.nbytes
        if header is None or header.nbytes < nbytes or (is_whole and header.nbytes > nbytes):
            due = "more" if header is None else header.nbytes
            raise PayloadError(f"{nbytes} bytes where the header says {due}")
        if is_whole:
            self.seconds = seconds
            return []
        if header.nbytes == len(self._payload):  # the last span asks for a byte more
            raise PayloadError(f"{header.nbytes} bytes, fewer than that can be")
        rest = remaining(header, self._layer, self._count - 1)
        self._job.opened(self._index, header, len(rest))
        return rest

    def _spans(self, record: ShardRecord | None, cuts: Cuts) -> int:
        """In how many the payload is fetched."""
        if not self._job.plan.sync:
            return 1
        return span_count(
            sum(self._source.layer_bytes) if record is None else record.nbytes,
            len(self._source.layers),
            spans_max=cuts.step_spans_max,
            span_bytes_min=cuts.span_bytes_min,
        )

    def _opening(self) -> FetchSpan:
        layers, nbytes = self._source.layers, self._slabs.slab_bytes
        if self._count > 1:
            tokens = self.claim.token_end - self.claim.token_start
            nbytes = min(nbytes, opening_bytes(layers, self._count, tokens=tokens))
        return FetchSpan(0, 0, len(layers), 0, nbytes, last=self._count == 1)

    def _open(self, nbytes: int) -> None:
        """Take the header if the payload's first ``nbytes`` are enough for it."""
        payload, room = self._payload, self._span.nbytes
        header_bytes = header_bytes_needed(payload[:_LENGTH_BYTES])
        if header_bytes > room:
            raise PayloadError(f"a header of {header_bytes} bytes, at most {room} can be")
        if nbytes < header_bytes:
            return
        layers = self._source.layers
        header = read_claimed(payload[:header_bytes], self.claim, layers, seal=self._seal)
        self._source = self._source.reading(header.frames.layers)
        if header.nbytes > len(payload):
            raise PayloadError(f"{header.nbytes} bytes, at most {len(payload)} can be")
        self.header = header

    def _write_burst(self, header: Header, until: int) -> None:
        job, index, lane, source = self._job, self._index, self._lane, self._source
        if not job.enter(index):
            raise UnwantedError("the load was given up")
        first, mark, written = self._layer, None, 0
        ends, end, move = header.frames.ends, self._span.end, self._load.move
        try:
            if self._placed is None:
                self._placed = lane.place(move.block_ids)
            while written < _BURST_BYTES and self._layer < end and ends[self._layer] <= until:
                frame = self._layer
                if frame in source.frames:  # others are of layers that other ranks have
                    scratch = None
                    if header.frames.codecs[frame] != "none":
                        scratch = self._scratch(source.layer_bytes[frame])
                    pages = frame_pages(header, frame, self._payload, scratch)
                    source.scatter(lane, frame, pages, move.first_block, self._placed)
                    written += source.layer_bytes[frame]
                self._layer = frame + 1  # last: what raised was not written
        finally:
            try:
                mark = lane.mark()  # also on a fault: something may have been given to the lane
            finally:  # closing the job waits for this
                job.leave(index, source.fills(range(first, self._layer)), lane, mark)

    def _scratch(self, nbytes: int) -> memoryview:
        """Memory to decode a frame into, beside that of the span's other frames."""
        memory = self._leased[1].view if len(self._leased) > 1 else self._lease()
        start = self._scratch_at
        self._scratch_at = start + nbytes
        return memory[start : start + nbytes]

    def _lease(self) -> memoryview:
        slab = self._slabs.lease()
        self._leased.append(slab)
        return slab.view


def claim_of(namespace: str, load: LoadMove, source: Source) -> Claim:
    """What the payload that this rank reads for a move must say it is."""
    move = load.move
    key = ChunkKey(namespace, move.prefix_hash, move.group, source.shard)
    return Claim(key, move.parent_hash, move.token_start, move.token_end)
