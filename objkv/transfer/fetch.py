"""Fetching: one span of one payload through memory of the caller's into its blocks.

A move is what its header says from the first byte to the last: nothing shorter, nothing longer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from objkv.cache.tiered import ChunkCache
from objkv.codec.payload import Claim, Header
from objkv.errors import PayloadError
from objkv.keys.chunk import ChunkKey
from objkv.telemetry import Recorder
from objkv.transfer.landing import Landing, Strip
from objkv.transfer.lanes import Lane
from objkv.transfer.plan import LoadMove
from objkv.transfer.sources import Source, Sources
from objkv.transfer.spans import FetchSpan, opening_bytes, remaining, span_count
from objkv.transfer.taskqueue import Task
from objkv.transfer.traced import PayloadTrace


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
        if count == 1:
            got = self._cache.get_into(key, buffer, hot=hot, arrived=arrived, on_hot=on_hot)
        else:
            got = self._cache.get_range_into(
                key, 0, buffer, hot=hot, arrived=arrived, on_hot=on_hot
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
        got = self._cache.get_range_into(
            key, span.start, buffer, hot=hot, arrived=arrived, on_hot=trace.came_hot
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
