"""Fetches one span of one payload, verifies its bytes while they arrive, and copies them by a lane.

Each frame is decoded when its last byte has arrived, while it is still in the CPU's cache. A host
lane copies it then, too. A device lane gets all frames of a span at once, because each submission
costs launches. Only verified bytes are written: first the header with its claim and layers is
verified, then each frame. A payload must be exactly as long as its header states.
"""

from dataclasses import dataclass
from time import monotonic
from types import TracebackType
from typing import Self

from objkv.codec.payload import Header, frame_pages, header_bytes_needed, read_claimed
from objkv.codec.seal import Seal
from objkv.errors import PayloadError
from objkv.index.base import ShardRecord
from objkv.net.deadline import ends_s
from objkv.tracing import NO_SPAN, Span, now_ns
from objkv.transfer.lanes import Lane
from objkv.transfer.loading.job import LoadJob
from objkv.transfer.loading.queue import FetchSpan, Task, opening_bytes, remaining, span_count
from objkv.transfer.loading.writing import BlockWriter, CopyUnknownError, UnwantedError, claim_of
from objkv.transfer.plan import LoadMove
from objkv.transfer.slabs import Slab, SlabPool
from objkv.transfer.sources import PayloadLayout

_LENGTH_BYTES = 8
_BURST_BYTES = 1 << 20
"""Bytes of pages that a host lane copies between ``enter`` and ``leave``. This bounds how long
closing a job waits, and lets small frames share the cost of the two calls."""
_TRACED_PAYLOADS_MAX = 64
"""Payloads traced per load. A long prompt has hundreds, which all look alike."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """How payloads are divided into requests."""

    step_spans_max: int = 4
    """Most spans per payload for loads within the step, so that the first layers of all chunks
    arrive first. Loads between steps use one span, because no step waits for a single layer."""
    span_bytes_min: int = 1 << 20
    """Smallest span that is worth a separate request."""


class PayloadTrace:
    """Trace spans of one get: decoding while bytes arrive, and the copy at the end. Belongs to one
    thread."""

    def __init__(self, job: LoadJob, index: int) -> None:
        """``index``: index of the move in the job's plan."""
        self._get: Span = NO_SPAN
        if job.span.is_on and index < _TRACED_PAYLOADS_MAX:
            self._get = job.span.child("objkv.get", chunk=job.plan.moves[index].move.chunk)
        self.is_on = self._get.is_on
        self.hot = False
        """Whether the bytes came from the hot store."""
        self._first_ns = self._last_ns = 0
        self._busy_s = 0.0

    def came_hot(self) -> None:
        """Record that the hot store's copy was read."""
        self.hot = True

    def decoded(self, begun_ns: int, seconds: float) -> None:
        """Record that some bytes were verified and submitted to the lane."""
        self._first_ns = self._first_ns or begun_ns
        self._last_ns = now_ns()
        self._busy_s += seconds

    def copied(self, nbytes: int, codec: str) -> None:
        """End the span: all bytes are verified and in their blocks."""
        if self.is_on:
            # Frames are decoded and submitted as they arrive. The copy is the rest of the time.
            first, last, busy_ms = self._first_ns, self._last_ns, 1e3 * self._busy_s
            self._get.part("objkv.decode", first, last, busy_ms=busy_ms, codec=codec)
            self._get.part("objkv.copy", last, now_ns())
            self._get.end(store=self._store, bytes=nbytes)

    def failed(self, reason: str) -> None:
        """End the span with an error: the payload is a miss."""
        self._get.end(reason, store=self._store)

    @property
    def _store(self) -> str:
        return "hot" if self.hot else "bulk"


class Decoder:
    """Decodes one span into the blocks of one move. Belongs to one thread.

    A context manager. At its end it returns its slabs, which the pool keeps until the lane has
    copied everything. Raises ``PayloadError`` for bytes that are not the expected payload,
    ``UnwantedError`` if the job no longer allows writes, and ``TransferError`` if no slab is free.
    """

    seconds: float | None = None
    """The store's time for a whole payload, without decoding. None for a part of one."""

    def __init__(
        self,
        task: Task,
        load: LoadMove,
        source: PayloadLayout,
        lane: Lane,
        slabs: SlabPool,
        *,
        cuts: Cuts,
        seal: Seal | None,
    ) -> None:
        """``load``: the task's move. ``source``: the expected layout of the payload. ``seal``: the
        seal that payloads must have."""
        job, index, span = task
        self._job, self._index, self._writer = job, index, BlockWriter(job, index, load, lane)
        self._lane, self._slabs, self._seal = lane, slabs, seal
        self._leased: list[Slab] = []
        self._decoded: list[memoryview] = []
        self._scratch_at, self._busy_s = 0, 0.0
        self.trace = PayloadTrace(job, index)
        self._started = monotonic()
        self.header = header = None if span is None else job.header(index)
        """The verified header. None until the first span has brought it."""
        self.claim = header.claim if header else claim_of(job.plan.namespace, load, source)
        self._source = source.reading(header.frames.layers) if header else source
        record = dict(load.records).get(self.claim.key.field)
        self.hot = record is not None and record.hot
        """Whether the index record lists a copy in the hot store."""
        self._count = 1 if header else self._spans(record, cuts)
        self._span = span or self._opening()
        # The first layers that are not decoded yet, and not in their blocks yet.
        self._layer = self._written = self._span.first

    def __enter__(self) -> Self:
        self._payload = self._lease()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        mark = self._writer.mark
        for slab in self._leased:
            if mark is None:
                slab.release()
            else:
                slab.release_after(mark)

    @property
    def buffer(self) -> memoryview:
        """Memory for the span's bytes: byte n of the payload goes to byte n of the slab. The last
        of several spans has room for one more byte, to detect a payload that is too long."""
        start, nbytes = self._span.start, self._span.nbytes
        more = self._span.last and self._span.number > 0
        return self._payload[start : start + nbytes + more]

    @property
    def start(self) -> int | None:
        """Offset to read from. None: read the whole payload in one span."""
        if self._span.number == 0 and self._count == 1:
            return None
        return self._span.start

    def arrived(self, nbytes: int) -> None:
        """Verify and write the frames that are complete after the span's first ``nbytes``."""
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
                self._decode(self.header, until)
                if not self._lane.per_span or self._layer == end:
                    self._write()  # the first of several spans ends before ``end``, see ``end``
        seconds = monotonic() - begun
        self._busy_s += seconds
        if begun_ns:
            self.trace.decoded(begun_ns, seconds)

    def end(self, nbytes: int) -> list[FetchSpan]:
        """End the span after ``nbytes``. Returns the payload's other spans if this was the first.

        Raises ``PayloadError`` unless the length matches the header.
        """
        seconds = monotonic() - self._started - self._busy_s
        self._job.came(nbytes)
        self.arrived(nbytes)
        if self._written < self._layer:
            self._write()
        span = self._span
        if span.number:
            if nbytes != span.nbytes:
                raise PayloadError(f"{nbytes} bytes from {span.start} on, expected {span.nbytes}")
            assert self._layer == span.end
            return []
        header = self.header
        is_whole = self._count == 1 or nbytes < span.nbytes
        if header is None or header.nbytes < nbytes or (is_whole and header.nbytes > nbytes):
            due = "more" if header is None else header.nbytes
            raise PayloadError(f"{nbytes} bytes, expected {due} by the header")
        if is_whole:
            self.seconds = seconds
            return []
        if header.nbytes == len(self._payload):  # the last span needs room for one more byte
            raise PayloadError(f"{header.nbytes} bytes, expected fewer")
        rest = remaining(header, self._layer, self._count - 1)
        self._job.opened(self._index, header, len(rest))
        return rest

    def _spans(self, record: ShardRecord | None, cuts: Cuts) -> int:
        """Return the number of spans in which the payload is fetched."""
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
        """Read and verify the header if the payload's first ``nbytes`` contain it."""
        payload, room = self._payload, self._span.nbytes
        header_bytes = header_bytes_needed(payload[:_LENGTH_BYTES])
        if header_bytes > room:
            raise PayloadError(f"a header of {header_bytes} bytes, expected at most {room}")
        if nbytes < header_bytes:
            return
        layers = self._source.layers
        header = read_claimed(payload[:header_bytes], self.claim, layers, seal=self._seal)
        self._source = self._source.reading(header.frames.layers)
        if header.nbytes > len(payload):
            raise PayloadError(f"{header.nbytes} bytes, expected at most {len(payload)}")
        self.header = header

    def _decode(self, header: Header, until: int) -> None:
        """Decode frames that are complete after the payload's first ``until`` bytes: all of them,
        or as many as a host lane copies at once."""
        if not self._job.wanted(self._index):
            raise UnwantedError("the load was given up")
        source, end, ends, nbytes = self._source, self._span.end, header.frames.ends, 0
        while self._layer < end and ends[self._layer] <= until:
            frame = self._layer
            if frame in source.frames:  # other frames are layers of other ranks
                scratch = None
                if header.frames.codecs[frame] != "none":
                    scratch = self._scratch(source.layer_bytes[frame])
                self._decoded.append(frame_pages(header, frame, self._payload, scratch))
                nbytes += source.layer_bytes[frame]
            self._layer = frame + 1
            if nbytes >= _BURST_BYTES and not self._lane.per_span:
                return

    def _write(self) -> None:
        """Submit the decoded frames to the lane."""
        frames, self._decoded = self._decoded, []
        first, self._written = self._written, self._layer
        try:
            self._writer.write(self._source, range(first, self._written), frames)
        except CopyUnknownError:
            for slab in self._leased:
                slab.strand()
            self._leased.clear()
            raise

    def _scratch(self, nbytes: int) -> memoryview:
        """Return memory to decode a frame into, separate from the span's other frames."""
        memory = self._leased[1].view if len(self._leased) > 1 else self._lease()
        start = self._scratch_at
        self._scratch_at = start + nbytes
        return memory[start : start + nbytes]

    def _lease(self) -> memoryview:
        job = self._job
        slab = self._slabs.lease(ends_s(), wanted=lambda: job.wanted(self._index))
        self._leased.append(slab)
        return slab.view
