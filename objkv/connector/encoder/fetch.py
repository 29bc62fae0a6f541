"""Brings stored encoder outputs into the scheduler's memory before anybody counts on them.

vLLM does not encode what a connector has promised, and the engine ends where the promise is not
kept. So an output is either held here, every byte verified, or it does not exist. All that is slow
runs on background threads; the scheduler's thread asks, and never waits for a store.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from threading import Condition
from time import monotonic

import numpy as np

from objkv.background import Pool
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
    """What is known of one output."""

    WAITING = "waiting"
    HELD = "held"
    """In memory, verified."""
    ABSENT = "absent"
    """Not stored, or that is not known: to be encoded and saved."""
    UNREAD = "unread"
    """Stored, but not brought in: to be encoded."""
    CORRUPT = "corrupt"
    """To be encoded, and saved over what is stored."""


class OutputReader:
    """Reads stored outputs: verified to the last byte, or not at all. Safe from many threads.
    Raises ``StoreError`` and nothing else."""

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
        """Memory that ``read`` takes: the payload, and what it is decoded into if that is known."""
        record, layer = shards[ENCODER_FIELD], output.layer
        decoded = 0 if record.codec == "none" else layer.nbytes
        return max(_room(record, layer), layer.nbytes) + decoded

    def read(self, output: EncoderOutput, shards: Shards) -> tuple[State, Pages | None]:
        """Get the payload that ``shards`` promise, and verify length, claim, dtype, shape and
        checksums. Of what is gone or wrong the record is forgotten."""
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
            # Another width or dtype, whole and of the right name: what is wrong may be what this
            # replica expects, so it is not held against the payload.
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
        self._cache.note_load(claim, header, hot=record.hot, seconds=seconds)
        return State.HELD, pages

    def _get(self, key: ChunkKey, buffer: memoryview, record: ShardRecord) -> int | None:
        """The payload; of one that is longer than this output's can be, its beginning."""
        start = 0 if record.nbytes > len(buffer) else None
        return self._cache.get_into(key, buffer, hot=record.hot, start=start)


def _room(record: ShardRecord, layer: LayerSpec) -> int:
    return min(record.nbytes, payload_bytes_max((layer,)))


@dataclass(slots=True, eq=False)
class WantedOutput:
    """An output that is wanted."""

    output: EncoderOutput
    deadline: float
    owners: set[str] = field(default_factory=set)
    """Requests that want it; without any it is dropped."""
    state: State = State.WAITING
    pages: Pages | None = None
    shards: Shards | None = None
    """What the index knows, once that has said that it is stored."""
    nbytes: int = 0
    """Memory that it asked for."""
    wanted: bool = True
    busy: bool = False
    """Whether a thread writes into its memory."""


class OutputMemory:
    """At most so many bytes for stored outputs, first come, first served among those that fit.

    vLLM asks for all of its waiting requests in one step, and gives memory back request by request.
    So an output for which there is no room yet waits, until its deadline. Not safe from several
    threads: the caller holds one lock around every call.
    """

    def __init__(self, nbytes_max: int) -> None:
        self._nbytes_max = nbytes_max
        self._taken: dict[WantedOutput, None] = {}
        self._parked: dict[WantedOutput, None] = {}
        self.held_bytes = 0

    @property
    def parked(self) -> int:
        """How many wait for memory."""
        return len(self._parked)

    def ask(self, entry: WantedOutput, nbytes: int) -> None:
        """Queue for memory; ``share_out`` says when there is some."""
        entry.nbytes = nbytes
        self._parked[entry] = None

    def free(self, entry: WantedOutput) -> None:
        """It needs no memory, or none any more. Idempotent."""
        self._parked.pop(entry, None)
        if entry in self._taken:
            del self._taken[entry]
            self.held_bytes -= entry.nbytes

    def share_out(self) -> tuple[list[WantedOutput], list[WantedOutput]]:
        """Those who have memory from now on, and those who are to give up. To be asked whenever
        one asks, frees, settles, or loses an owner."""
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
            refused += self._unpark(self._in_vain())
        return granted, refused

    def _in_vain(self) -> list[WantedOutput]:
        """Those of one request, if all memory is of requests that wait for more themselves: it goes
        on without them, and what it holds comes back."""
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
    """How long, how many, how much."""

    deadline_s: float
    """After which an output is missing."""
    queue_max: int
    """Outputs waited for at once."""
    held_bytes_max: int
    """Memory for payloads under way and outputs held."""
    threads: int = 4
    ttl_s: int = 86_400
    """Life of an index record after a hit."""


_Key = tuple[str, bytes]


class EncoderFetcher:
    """Outputs by namespace and hash. All public methods belong to the scheduler's thread."""

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
        """Bring these in for ``owner``, unless they are on their way, or known already."""
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
        """What is known of an output that was wanted; one that is late is missing."""
        entry = self._entries.get(_key(output))
        if entry is None:
            return State.ABSENT
        if entry.state is State.WAITING and self.is_late(entry.deadline):
            self._settle(entry, State.UNREAD if entry.shards else State.ABSENT)
            self._recorder.count("load_deadlines")
        return entry.state

    def take(self, output: EncoderOutput) -> Pages:
        """The bytes of an output that is held, which the caller owns now; it is forgotten here."""
        pages = self._entries[_key(output)].pages
        assert pages is not None
        self._forget(output)
        return pages

    def drop(self, owner: str, output: EncoderOutput) -> None:
        """``owner`` does not want it any more. Without owners, what is under way ends by itself and
        is thrown away."""
        if (entry := self._entries.get(_key(output))) is not None:
            with self._changed:
                entry.owners.discard(owner)
                if entry.owners:
                    self._share_out()  # who is left may wait for memory
                else:
                    self._forget(output)

    def submit(self, job: Callable[[], None]) -> bool:
        """Run ``job`` on a background thread; False if too much waits. Counts a ``StoreError``."""

        def run() -> None:
            try:
                job()
            except StoreError:
                self._recorder.count("background_errors")

        return self._pool.waiting < self._limits.queue_max and self._pool.put((run,))

    def deadline(self) -> float:
        """Until when, on this clock, what is asked now is worth waiting for."""
        return self._clock() + self._limits.deadline_s

    def is_late(self, deadline: float) -> bool:
        """Whether ``deadline`` has passed."""
        return self._clock() >= deadline

    def wait(self, seconds: float) -> None:
        """Block until something changes, at most so long; not at all if nothing is waited for."""
        with self._changed:
            if any(entry.state is State.WAITING for entry in self._entries.values()):
                self._changed.wait(seconds)

    def close(self) -> None:
        """End the threads; one whose store does not answer is left to end by itself."""
        self._pool.close()

    @property
    def held_bytes(self) -> int:
        """Memory for payloads under way and outputs held."""
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
        """Whether every thread has been at one job for longer than an output may take: waiting for
        any of them would be in vain."""
        return self._pool.hanging(self._limits.deadline_s) >= self._limits.threads

    def _failed(self, _job: Callable[[], None], error: Exception) -> None:
        self._recorder.count("load_errors")
        logger.error("job failed unexpectedly", exc_info=error)

    def _bring(self, entry: WantedOutput) -> None:
        """Find one output and queue for its memory, or find out that it is not there.

        Each is looked up by itself: a folder that is its own index ends an answer at the first of
        several that it does not have, as prefixes do.
        """
        shards, nbytes = None, 0
        try:
            if (found := self._find(entry)) is not None:
                nbytes = self._reader.bytes_needed(entry.output, found)
                shards = found
        except StoreError as exc:
            self._recorder.count("lookup_errors")
            self._trouble.failed(exc)
        finally:  # whatever was raised: requests wait for it
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
        """Get one output for which there is memory."""
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
        """What the index knows; None too if no request waits any more."""
        if not entry.wanted or entry.state is not State.WAITING:
            return None
        output = entry.output
        (found,) = self._index.find(output.namespace, [output.item_hash], [ENCODER_FIELD])
        return found or None

    def _touch(self, output: EncoderOutput) -> None:
        """A hit renews the record's life; no request waits for this."""
        try:
            self._index.touch(output.namespace, [output.item_hash], ttl_s=self._limits.ttl_s)
        except StoreError:
            self._recorder.count("background_errors")

    def _settle(self, entry: WantedOutput, state: State, pages: Pages | None = None) -> None:
        """The end of the wait for ``entry``; the first end counts."""
        with self._changed:
            if entry.state is State.WAITING and entry.wanted:
                entry.pages = pages
                entry.state = state  # last: it is read without the lock
            self._give_back(entry)
            self._changed.notify_all()

    def _give_back(self, entry: WantedOutput) -> None:
        """Count its memory as free, unless a thread still writes there or somebody may use it."""
        if not entry.busy and (entry.state is not State.HELD or not entry.wanted):
            self._room.free(entry)
        self._share_out()

    def _share_out(self) -> None:
        """Go on with those for whom there is memory now, before those who came later."""
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
