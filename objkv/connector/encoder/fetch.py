"""Fetches stored encoder outputs into the scheduler's memory before the connector promises them.

vLLM does not encode outputs that a connector has promised, and the engine stops if a promise is
broken. An output is therefore either held here with every byte verified, or treated as missing.
Slow work runs on background threads. The scheduler's thread polls them and never waits for a store.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from threading import Condition
from time import monotonic

import numpy as np

from objkv.background import Pool, Steps, at_once, in_steps
from objkv.cache.chunks import ChunkCache
from objkv.codec.payload import LayerSpec, frame_pages, open_payload, payload_bytes_max, read_header
from objkv.connector.encoder.items import EncoderOutput, Pages
from objkv.errors import PayloadError, StoreError, ValueTooLong
from objkv.index.base import ShardRecord, Shards, WriteIndex
from objkv.keys.chunk import ChunkKey
from objkv.keys.encoder import ENCODER_FIELD
from objkv.telemetry import Recorder, Trouble

logger = logging.getLogger(__name__)


class State(Enum):
    """The state of one output."""

    WAITING = "waiting"
    HELD = "held"
    """Verified and in memory."""
    ABSENT = "absent"
    """Not stored, or unknown. The replica encodes and saves it."""
    UNREAD = "unread"
    """Stored but not loaded. The replica encodes it."""
    CORRUPT = "corrupt"
    """Stored but corrupt. The replica encodes it and replaces the stored payload."""


class OutputReader:
    """Reads stored outputs and verifies every byte. Thread-safe. Raises only ``StoreError``."""

    def __init__(
        self,
        cache: ChunkCache,
        recorder: Recorder,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._cache = cache
        self._recorder = recorder
        self._clock = clock

    def bytes_needed(self, output: EncoderOutput, shards: Shards) -> int:
        """Return the memory that ``read`` needs for the payload and, if it is compressed, for the
        decoded output."""
        record, layer = shards[ENCODER_FIELD], output.layer
        decoded = 0 if record.codec == "none" else layer.nbytes
        return max(_room(record, layer), layer.nbytes) + decoded

    def read(self, output: EncoderOutput, shards: Shards) -> tuple[State, Pages | None]:
        """Get the payload that ``shards`` records, and verify length, claim, dtype, shape and
        checksums. The record of a missing or corrupt payload is removed."""
        key = output.claim.key
        try:
            return self._read(output, shards)
        except (PayloadError, ValueTooLong) as exc:
            logger.warning("encoder output refused, encoding it reason=%s", exc)
            self._recorder.count("load_corrupt")
            self._cache.reject(key, shards, corrupt=True)
            return State.CORRUPT, None

    def _read(self, output: EncoderOutput, shards: Shards) -> tuple[State, Pages | None]:
        record, claim, layer = shards[ENCODER_FIELD], output.claim, output.layer
        payload = np.empty(_room(record, layer), dtype=np.uint8)
        started = self._clock()
        got = self._get(claim.key, payload.data, record)
        if got is None:
            self._recorder.count("load_ghosts")
            self._cache.reject(claim.key, shards, corrupt=False)
            return State.ABSENT, None
        seconds = self._clock() - started
        found = read_header(payload.data[:got], seal=self._cache.seal)
        if found.claim == claim and found.frames.layers != (layer,):
            # The payload is intact but has another width or dtype. This replica's expectation may
            # be wrong, so the payload is not rejected.
            self._recorder.count("load_refused")
            return State.UNREAD, None
        header = open_payload(payload.data[:got], claim, (layer,), seal=self._cache.seal)
        scratch = None
        if header.frames.codecs[0] != "none":
            scratch = np.empty(layer.nbytes, dtype=np.uint8).data
        pages = np.frombuffer(frame_pages(header, 0, payload.data[:got], scratch), dtype=np.uint8)
        self._recorder.count("loads")
        self._recorder.count("load_bytes", got)
        self._recorder.observe("load_seconds", seconds)
        self._cache.note_load(header, hot=record.hot, seconds=seconds)
        return State.HELD, pages

    def _get(self, key: ChunkKey, buffer: memoryview, record: ShardRecord) -> int | None:
        """Get the payload, or only its beginning if it is longer than this output's can be."""
        start = 0 if record.nbytes > len(buffer) else None
        return self._cache.get_into(key, buffer, hot=record.hot, start=start)


def _room(record: ShardRecord, layer: LayerSpec) -> int:
    return min(record.nbytes, payload_bytes_max((layer,)))


@dataclass(slots=True, eq=False)
class WantedOutput:
    """An output that requests need."""

    output: EncoderOutput
    deadline: float
    owners: set[str] = field(default_factory=set)
    """Requests that need it. Without owners it is dropped."""
    state: State = State.WAITING
    pages: Pages | None = None
    shards: Shards | None = None
    """Its index records, once the lookup has found it."""
    nbytes: int = 0
    """Bytes of memory that it needs."""
    wanted: bool = True
    busy: bool = False
    """Whether a thread writes into its memory."""


class OutputMemory:
    """A bounded number of bytes for outputs, granted in order of arrival to those that fit.

    vLLM queries for all of its waiting requests in one step, and frees memory request by request.
    An output without memory therefore waits until its deadline. Not thread-safe: the caller holds
    one lock around every call.
    """

    def __init__(self, nbytes_max: int) -> None:
        self._nbytes_max = nbytes_max
        self._taken: dict[WantedOutput, None] = {}
        self._parked: dict[WantedOutput, None] = {}
        self.held_bytes = 0

    @property
    def parked(self) -> int:
        """Number of outputs that wait for memory."""
        return len(self._parked)

    def ask(self, entry: WantedOutput, nbytes: int) -> None:
        """Queue an output for memory, which ``share_out`` grants."""
        entry.nbytes = nbytes
        self._parked[entry] = None

    def free(self, entry: WantedOutput) -> None:
        """Free an output's memory or its place in the queue. Idempotent."""
        self._parked.pop(entry, None)
        if entry in self._taken:
            del self._taken[entry]
            self.held_bytes -= entry.nbytes

    def share_out(self) -> tuple[list[WantedOutput], list[WantedOutput]]:
        """Return the outputs that now have memory, and those that must give up. Call it whenever an
        output queues, frees memory, settles, or loses an owner."""
        granted: list[WantedOutput] = []
        refused: list[WantedOutput] = []
        for entry in self._parked:
            if entry.nbytes > self._nbytes_max:
                refused.append(entry)
            elif self.held_bytes + entry.nbytes <= self._nbytes_max:
                self.held_bytes += entry.nbytes
                self._taken[entry] = None
                granted.append(entry)
        self._unpark(granted)
        self._unpark(refused)
        if self._parked and not granted:
            refused += self._unpark(self._deadlocked())
        return granted, refused

    def _deadlocked(self) -> list[WantedOutput]:
        """Return one request's outputs if all memory belongs to requests that wait for more. That
        request continues without them and then frees its memory."""
        waiting = set[str]().union(*(entry.owners for entry in self._parked))
        first = next(iter(self._taken))
        for entry in self._taken:
            if entry.state is not State.HELD or not entry.owners <= waiting:
                return []
        owner = min(first.owners)
        return [entry for entry in self._parked if owner in entry.owners]

    def _unpark(self, entries: list[WantedOutput]) -> list[WantedOutput]:
        for entry in entries:
            del self._parked[entry]
        return entries


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Bounds of the fetcher."""

    deadline_s: float
    """An output that takes longer is treated as missing."""
    queue_max: int
    """Most outputs that may wait at once."""
    held_bytes_max: int
    """Memory for payloads in progress and held outputs."""
    threads: int = 4
    ttl_s: int = 14_400
    """Life of an index record after a hit."""


_Key = tuple[str, bytes]


class EncoderFetcher:
    """Fetches outputs by namespace and hash. Only the scheduler's thread calls public methods."""

    def __init__(
        self,
        reader: OutputReader,
        index: WriteIndex,
        limits: FetchLimits,
        recorder: Recorder,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._reader = reader
        self._index = index
        self._limits = limits
        self._recorder = recorder
        self._clock = clock
        self._trouble = Trouble(logger, "encoder outputs")
        self._changed = Condition()
        self._entries: dict[_Key, WantedOutput] = {}
        self._room = OutputMemory(limits.held_bytes_max)
        self._pool: Pool[Callable[[], None]] = Pool(
            "objkv-encoder", limits.threads, _run, failed=self._failed, clock=clock
        )

    def want(self, owner: str, outputs: Iterable[EncoderOutput]) -> None:
        """Fetch outputs for ``owner``, except those already fetched or in progress."""
        fresh = []
        with self._changed:
            for output in outputs:
                if (entry := self._entries.get(_key(output))) is None:
                    entry = WantedOutput(output, self.deadline())
                    self._entries[_key(output)] = entry
                    fresh.append(entry)
                entry.owners.add(owner)
            if not fresh:
                return
            waiting = sum(entry.state is State.WAITING for entry in self._entries.values())
            room = self._limits.queue_max - (waiting - len(fresh))
            if self._pool.is_closed or self._is_stuck():
                room = 0
            queued, refused = fresh[: max(room, 0)], fresh[max(room, 0) :]
            for entry in refused:
                entry.state = State.ABSENT
                self._recorder.count("load_refused")
            self._pool.put(partial(self._bring, entry) for entry in queued)

    def state(self, output: EncoderOutput) -> State:
        """Return the state of an output. After its deadline it is treated as missing."""
        entry = self._entries.get(_key(output))
        if entry is None:
            return State.ABSENT
        if entry.state is State.WAITING and self.is_late(entry.deadline):
            self._settle(entry, State.UNREAD if entry.shards else State.ABSENT)
            self._recorder.count("load_deadlines")
        return entry.state

    def take(self, output: EncoderOutput) -> Pages:
        """Return the bytes of a held output and forget it. The caller owns the bytes."""
        pages = self._entries[_key(output)].pages
        assert pages is not None
        self._forget(output)
        return pages

    def drop(self, owner: str, output: EncoderOutput) -> None:
        """Remove ``owner`` from an output's owners. Without owners, a fetch in progress continues
        and its result is discarded."""
        if (entry := self._entries.get(_key(output))) is not None:
            with self._changed:
                entry.owners.discard(owner)
                if entry.owners:
                    self._share_out()  # the other owners may wait for memory
                else:
                    self._forget(output)

    def submit(self, job: Callable[[], Steps[None] | None]) -> bool:
        """Run ``job`` on a background thread, or return False if the queue is full. A
        ``StoreError`` is counted."""

        def run() -> None:
            try:
                at_once(in_steps(job()))
            except StoreError:
                self._recorder.count("background_errors")

        return self._pool.waiting < self._limits.queue_max and self._pool.put((run,))

    def deadline(self) -> float:
        """Return the deadline, on this clock, of a fetch that starts now."""
        return self._clock() + self._limits.deadline_s

    def is_late(self, deadline: float) -> bool:
        """Whether ``deadline`` has passed."""
        return self._clock() >= deadline

    def wait(self, seconds: float) -> None:
        """Block until a state changes, for at most ``seconds``. Returns at once if no output
        waits."""
        with self._changed:
            if any(entry.state is State.WAITING for entry in self._entries.values()):
                self._changed.wait(seconds)

    def close(self) -> None:
        """Stop the threads. A thread whose store hangs ends when the call returns."""
        self._pool.close()

    @property
    def held_bytes(self) -> int:
        """Memory of payloads in progress and held outputs."""
        return self._room.held_bytes

    def __repr__(self) -> str:
        held = sum(entry.state is State.HELD for entry in self._entries.values())
        limit = self._limits.held_bytes_max >> 20
        return f"<EncoderFetcher {held} held, {self.held_bytes >> 20}/{limit} MiB>"

    def _forget(self, output: EncoderOutput) -> None:
        with self._changed:
            entry = self._entries.pop(_key(output))
            entry.wanted = False
            self._give_back(entry)

    def _is_stuck(self) -> bool:
        """Whether every thread has worked on one job for longer than an output's deadline, so that
        queueing is pointless."""
        return self._pool.hanging(self._limits.deadline_s) >= self._limits.threads

    def _failed(self, _job: Callable[[], None], error: Exception) -> None:
        self._recorder.count("load_errors")
        logger.error("encoder job failed unexpectedly", exc_info=error)

    def _bring(self, entry: WantedOutput) -> None:
        """Look up one output, and queue for its memory if it is stored.

        Outputs are looked up one by one. A folder that is its own index ends its answer at the
        first missing key of several, as is right for prefixes.
        """
        shards, nbytes = None, 0
        try:
            if (found := self._find(entry)) is not None:
                nbytes = self._reader.bytes_needed(entry.output, found)
                shards = found
        except StoreError as exc:
            self._recorder.count("lookup_errors")
            self._trouble.failed(exc)
        finally:  # also after an exception, because requests wait for the entry
            if shards is None:
                self._settle(entry, State.ABSENT)
        if shards is None:
            return
        with self._changed:
            if entry.wanted and entry.state is State.WAITING:
                entry.shards = shards
                self._room.ask(entry, nbytes)
                self._share_out()

    def _load(self, entry: WantedOutput) -> None:
        """Read one output whose memory was granted."""
        with self._changed:
            shards = entry.shards
            if shards is None or not entry.wanted or entry.state is not State.WAITING:
                return
            entry.busy = True
        state, pages = State.UNREAD, None
        try:
            state, pages = self._reader.read(entry.output, shards)
            self._trouble.worked()
        except StoreError as exc:
            self._recorder.count("load_errors")
            self._trouble.failed(exc)
        finally:  # as above
            with self._changed:
                entry.busy = False
            self._settle(entry, state, pages)
        if pages is not None:
            self._touch(entry.output)

    def _find(self, entry: WantedOutput) -> Shards | None:
        """Return the output's index records. None if there are none, or no request waits."""
        if not entry.wanted or entry.state is not State.WAITING:
            return None
        output = entry.output
        (found,) = self._index.find(output.namespace, [output.item_hash], [ENCODER_FIELD])
        return found or None

    def _touch(self, output: EncoderOutput) -> None:
        """Extend the record's life after a hit. No request waits for this."""
        try:
            self._index.touch(output.namespace, [output.item_hash], ttl_s=self._limits.ttl_s)
        except StoreError:
            self._recorder.count("background_errors")

    def _settle(self, entry: WantedOutput, state: State, pages: Pages | None = None) -> None:
        """End the wait for ``entry``. Later calls have no effect on its state."""
        with self._changed:
            if entry.state is State.WAITING and entry.wanted:
                entry.pages = pages
                entry.state = state  # last, because it is read without the lock
            self._give_back(entry)
            self._changed.notify_all()

    def _give_back(self, entry: WantedOutput) -> None:
        """Free its memory, unless a thread still writes to it or an owner may use it."""
        if not entry.busy and (entry.state is not State.HELD or not entry.wanted):
            self._room.free(entry)
        self._share_out()

    def _share_out(self) -> None:
        """Continue the outputs that now have memory, before later ones."""
        granted, refused = self._room.share_out()
        for entry in refused:
            entry.state = State.UNREAD
            self._recorder.count("load_refused")
        self._pool.put((partial(self._load, entry) for entry in granted), first=True)
        if granted or refused:
            self._changed.notify_all()


def _run(job: Callable[[], None]) -> None:
    job()


def _key(output: EncoderOutput) -> _Key:
    return output.namespace, output.item_hash
