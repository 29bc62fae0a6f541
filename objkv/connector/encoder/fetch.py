"""Fetches stored encoder outputs into the scheduler's memory before the connector promises them.

vLLM does not encode outputs that a connector has promised, and the engine stops if a promise is
broken. An output is therefore either held here, every byte verified and no longer the agent's, or
treated as missing. One thread looks outputs up, another reads them by the agent. The scheduler's
thread polls and never waits for either.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from threading import Condition
from time import monotonic

import numpy as np

from objkv.agent.calls import AgentCalls
from objkv.agent.client import CALL_S
from objkv.agent.messages import PayloadRequest
from objkv.agent.payloads import PayloadReader, ReadOutcome
from objkv.background import Steps, StepThread, in_steps
from objkv.codec.payload import LayerSpec
from objkv.connector.encoder.items import EncoderOutput, Pages
from objkv.errors import StoreError
from objkv.index.base import ShardRecord
from objkv.keys.encoder import ENCODER_FIELD
from objkv.telemetry import Recorder, Trouble

logger = logging.getLogger(__name__)


class State(Enum):
    """The state of one output."""

    WAITING = "waiting"
    HELD = "held"
    """Verified and in memory."""
    ABSENT = "absent"
    """Not stored, corrupt or unknown. The replica encodes and saves it."""
    STORED = "stored"
    """Stored but not loaded. A replica that only encodes need not; others encode it."""


_ENDS = {
    ReadOutcome.READ: (State.HELD, "loads"),
    ReadOutcome.MISSING: (State.ABSENT, "load_ghosts"),
    ReadOutcome.CORRUPT: (State.ABSENT, "load_corrupt"),
    # This replica's expectation of the form may be wrong, so the payload stays.
    ReadOutcome.OTHER_FORM: (State.STORED, "load_refused"),
    ReadOutcome.REFUSED: (State.STORED, "load_refused"),
    ReadOutcome.LATE: (State.STORED, "load_deadlines"),
    ReadOutcome.FAILED: (State.STORED, "load_errors"),
    ReadOutcome.UNWANTED: (State.STORED, "load_refused"),
}
"""What an output is after its read, and what counts it."""


@dataclass(slots=True, eq=False)
class WantedOutput:
    """An output that requests need: a ``PayloadRead``."""

    output: EncoderOutput
    deadline: float
    ended: Callable[["WantedOutput", ReadOutcome], None]
    """Called by the thread that reads."""
    owners: set[str] = field(default_factory=set)
    """Requests that need it. Without owners it is forgotten."""
    state: State = State.WAITING
    pages: Pages | None = None
    record: ShardRecord | None = None
    """Its index record, once the lookup has found it."""
    is_forgotten: bool = False
    is_read: bool = False
    """Whether the agent's memory is being read for it."""
    began: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it needs."""
        return self.output.layer.nbytes

    @property
    def wanted(self) -> PayloadRequest:
        """See ``PayloadRead``."""
        assert self.record is not None
        return PayloadRequest(self.output.claim, self.record)

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """See ``PayloadRead``."""
        return (self.output.layer,)

    @property
    def is_needed(self) -> bool:
        """Whether a request waits for it."""
        return not self.is_forgotten and self.state is State.WAITING

    def take(self, pages: Sequence[memoryview]) -> None:
        """Copy the verified pages, so that nothing can take them away."""
        self.pages = np.frombuffer(pages[0], np.uint8).copy()

    def end(self, outcome: ReadOutcome) -> None:
        """See ``PayloadRead``."""
        self.ended(self, outcome)


class OutputMemory:
    """A bounded number of bytes for outputs, granted to batches in the order in which they ask.

    vLLM queries for all of its waiting requests in one step, and frees memory request by request. A
    batch has the outputs that one request was the first to need. It gets memory for all of them at
    once, and none before the batches ahead of it: so the first request that waits can always have
    what it waits for. Not thread-safe: the caller holds one lock around every call.
    """

    def __init__(self, nbytes_max: int) -> None:
        self._nbytes_max = nbytes_max
        self._taken: set[WantedOutput] = set()
        self._batches: deque[list[WantedOutput]] = deque()
        self.held_bytes = 0

    @property
    def parked(self) -> int:
        """Number of outputs that wait for memory."""
        return sum(one.is_needed for batch in self._batches for one in batch)

    def ask(self, batch: Iterable[WantedOutput]) -> list[WantedOutput]:
        """Queue a batch. Returns those for which there can never be memory together with the
        others."""
        kept: list[WantedOutput] = []
        refused: list[WantedOutput] = []
        nbytes = 0
        for one in batch:
            fits = nbytes + one.nbytes <= self._nbytes_max
            (kept if fits else refused).append(one)
            nbytes += one.nbytes * fits
        self._batches.append(kept)
        return refused

    def grant(self) -> list[WantedOutput]:
        """Return the outputs that now have memory. Call it whenever a batch is queued, or an output
        frees memory or is not needed any more."""
        granted: list[WantedOutput] = []
        while self._batches:
            batch = [one for one in self._batches[0] if one.is_needed]
            nbytes = sum(one.nbytes for one in batch)
            if self.held_bytes + nbytes > self._nbytes_max:
                break
            self._batches.popleft()
            self.held_bytes += nbytes
            self._taken.update(batch)
            granted += batch
        return granted

    def free(self, one: WantedOutput) -> None:
        """Free an output's memory. Idempotent."""
        if one in self._taken:
            self._taken.remove(one)
            self.held_bytes -= one.nbytes


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Bounds of the fetcher."""

    deadline_s: float
    """An output that takes longer is treated as missing."""
    queue_max: int
    """Most outputs, and most other jobs, that may wait at once."""
    held_bytes_max: int
    """Memory for outputs that are read or held."""
    ttl_s: int = 14_400
    """Life of an index record after a hit."""


_Key = tuple[str, bytes]


class EncoderFetcher:
    """Fetches outputs by namespace and hash. Only the scheduler's thread calls public methods."""

    def __init__(
        self,
        index: AgentCalls,
        reader: PayloadReader | None,
        limits: FetchLimits,
        recorder: Recorder,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``reader``: on the same clock; ``close`` closes it. None: outputs are looked up only."""
        self._index, self._reader = index, reader
        self._limits, self._recorder, self._clock = limits, recorder, clock
        self._trouble = Trouble(logger, "lookups of encoder outputs")
        self._changed = Condition()
        self._entries: dict[_Key, WantedOutput] = {}
        self._room = OutputMemory(limits.held_bytes_max)
        self._thread = StepThread("objkv-lookup-outputs", answer_s=CALL_S)

    def want(self, owner: str, outputs: Iterable[EncoderOutput]) -> None:
        """Fetch outputs for ``owner``, except those already fetched or in progress."""
        fresh = []
        with self._changed:
            waiting = sum(entry.state is State.WAITING for entry in self._entries.values())
            for output in outputs:
                if (entry := self._entries.get(_key(output))) is None:
                    entry = WantedOutput(output, self.deadline(), self._ended)
                    self._entries[_key(output)] = entry
                    fresh.append(entry)
                entry.owners.add(owner)
            room = max(0, self._limits.queue_max - waiting)
            queued, refused = fresh[:room], fresh[room:]
            if queued and not self._start(self._look_up(queued)):
                refused = fresh
            for entry in refused:
                self._settle(entry, State.ABSENT, "load_refused")

    def is_wanted(self, owner: str, output: EncoderOutput) -> bool:
        """Whether ``owner`` has asked for an output, and has neither taken nor forgotten it."""
        entry = self._entries.get(_key(output))
        return entry is not None and owner in entry.owners

    def state(self, output: EncoderOutput) -> State:
        """Return the state of an output. After its deadline it is treated as missing."""
        entry = self._entries.get(_key(output))
        if entry is None:
            return State.ABSENT
        if entry.state is State.WAITING and self.is_late(entry.deadline):
            state = State.ABSENT if entry.record is None else State.STORED
            self._settle(entry, state, "load_deadlines")
        return entry.state

    def take(self, output: EncoderOutput) -> Pages:
        """Return the bytes of a held output and forget it. The caller owns the bytes."""
        pages = self._entries[_key(output)].pages
        assert pages is not None
        self.forget(output)
        return pages

    def drop(self, owner: str, output: EncoderOutput) -> None:
        """Remove ``owner`` from an output's owners. It is forgotten without owners."""
        entry = self._entries.get(_key(output))
        if entry is not None:
            entry.owners.discard(owner)
            if not entry.owners:
                self.forget(output)

    def forget(self, output: EncoderOutput) -> None:
        """Forget an output, although requests need it: vLLM has it now. Its read is discarded."""
        with self._changed:
            entry = self._entries.pop(_key(output), None)
            if entry is None:
                return
            entry.is_forgotten = True
            self._free(entry)
        if entry.is_read and self._reader is not None:
            self._reader.look()

    def submit(self, job: Callable[[], Steps[None] | None]) -> bool:
        """Run ``job`` on the thread of lookups, or return False if the queue is full. A
        ``StoreError`` is counted."""

        def run() -> Steps[None]:
            try:
                yield from in_steps(job())
            except StoreError:
                self._recorder.count("background_errors")

        return self._thread.unfinished < self._limits.queue_max and self._start(run())

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
        """Stop the threads."""
        self._thread.close(0.0)
        if self._reader is not None:
            self._reader.close()

    @property
    def held_bytes(self) -> int:
        """Memory of outputs that are read or held."""
        return self._room.held_bytes

    def __repr__(self) -> str:
        held = sum(entry.state is State.HELD for entry in self._entries.values())
        limit = self._limits.held_bytes_max >> 20
        return f"<EncoderFetcher {held} held, {self.held_bytes >> 20}/{limit} MiB>"

    def _start(self, job: Steps[None]) -> bool:
        future = self._thread.start(job)
        if future is not None:
            future.add_done_callback(self._note_failure)
        return future is not None

    def _note_failure(self, future: Future[None]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            self._recorder.count("load_errors")
            logger.error("encoder job failed unexpectedly", exc_info=error)

    def _look_up(self, batch: list[WantedOutput]) -> Steps[None]:
        """Look up the outputs of a request, and queue for the memory of those that are stored.

        Outputs are looked up one by one. A folder that is its own index ends its answer at the
        first missing key of several, as is right for prefixes.
        """
        try:
            for entry in batch:
                if entry.is_needed:
                    entry.record = yield from self._find(entry.output)
        finally:  # also after an exception, because requests wait for the entries
            with self._changed:
                for entry in batch:
                    if entry.record is None:
                        self._settle(entry, State.ABSENT)
                    elif self._reader is None:
                        self._settle(entry, State.STORED)
                for entry in self._room.ask(one for one in batch if one.is_needed):
                    self._settle(entry, State.STORED, "load_refused")
                self._read()
        if self._reader is None:
            for entry in batch:
                if entry.record is not None:
                    yield from self._touch(entry.output)

    def _find(self, output: EncoderOutput) -> Steps[ShardRecord | None]:
        """Return the output's index record. None if there is none, or no answer."""
        try:
            find = self._index.find(output.namespace, [output.item_hash], [ENCODER_FIELD])
            (found,) = yield from find
        except StoreError as exc:
            self._recorder.count("lookup_errors")
            self._trouble.failed(exc)
            return None
        self._trouble.worked()
        return found[ENCODER_FIELD] if found else None

    def _read(self) -> None:
        """Read the outputs that now have memory. The lock is held."""
        granted = self._room.grant()
        if self._reader is not None and granted:
            for entry in granted:
                entry.is_read, entry.began = True, self._clock()
            self._reader.read(granted)

    def _ended(self, entry: WantedOutput, outcome: ReadOutcome) -> None:
        """A read has ended, on the thread that reads, or within ``_read`` after ``close``."""
        state, counter = _ENDS[outcome]
        with self._changed:
            entry.is_read = False
            if entry.is_needed and state is State.HELD:
                assert entry.record is not None
                self._recorder.count("load_bytes", entry.record.nbytes)
                self._recorder.observe("load_seconds", self._clock() - entry.began)
            self._settle(entry, state, counter)
        if entry.state is State.HELD:
            self.submit(partial(self._touch, entry.output))

    def _touch(self, output: EncoderOutput) -> Steps[None]:
        """Extend the record's life after a hit. No request waits for this."""
        try:
            hashes, ttl_s = [output.item_hash], self._limits.ttl_s
            yield from self._index.touch(output.namespace, hashes, ttl_s=ttl_s)
        except StoreError:
            self._recorder.count("background_errors")

    def _settle(self, entry: WantedOutput, state: State, counter: str | None = None) -> None:
        """End the wait for ``entry``. Later calls have no effect on its state."""
        with self._changed:
            if entry.is_needed:
                if counter is not None:
                    self._recorder.count(counter)
                entry.state = state  # last, because it is read without the lock
            self._free(entry)
            self._changed.notify_all()

    def _free(self, entry: WantedOutput) -> None:
        """Free its memory, unless it is being read or a request may use it. The lock is held."""
        if entry.is_read or (entry.state is State.HELD and not entry.is_forgotten):
            return
        entry.pages = None
        self._room.free(entry)
        self._read()


def _key(output: EncoderOutput) -> _Key:
    return output.namespace, output.item_hash
