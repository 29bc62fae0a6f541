"""Fetches stored encoder outputs into the scheduler's memory before the connector promises them.

vLLM does not encode outputs that a connector has promised, and the engine stops if a promise is
broken. An output is therefore either held here, every byte verified and no longer the agent's, or
treated as missing. One thread looks outputs up, another reads them by the agent. The scheduler's
thread polls and never waits for either.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from threading import Condition
from time import monotonic

import numpy as np

from objkv.agent.calls import AgentCalls
from objkv.agent.client import CALL_S
from objkv.agent.payloads import PayloadReader, PayloadTransfer, ReadOutcome
from objkv.background import Steps, StepThread
from objkv.cache.lookup import LOOKUP_QUEUE_MAX
from objkv.config import Config
from objkv.connector.encoder.items import EncoderOutput, Pages
from objkv.errors import StoreError
from objkv.keys.chunk import ChunkKey
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
    ReadOutcome.READ: State.HELD,
    ReadOutcome.MISSING: State.ABSENT,
    ReadOutcome.CORRUPT: State.ABSENT,
}
"""What an output is after its read. After any other end it is still stored."""


@dataclass(slots=True, eq=False)
class WantedOutput(PayloadTransfer):
    """An output that requests need."""

    ended: Callable[["WantedOutput", ReadOutcome, int], None]
    """Called by the thread that reads."""
    owners: set[str] = field(default_factory=set)
    """Requests that need it. Without owners it is forgotten."""
    state: State = State.WAITING
    is_stored: bool = False
    """Whether its lookup found that it is stored."""
    pages: Pages | None = None
    began: float = 0.0
    """When it had memory."""

    @property
    def is_needed(self) -> bool:
        return self.state is State.WAITING

    def take(self, pages: Sequence[memoryview]) -> None:
        self.pages = np.frombuffer(pages[0], np.uint8).copy()  # nothing can take a copy away

    def end(self, outcome: ReadOutcome, nbytes: int) -> None:
        self.ended(self, outcome, nbytes)


class OutputMemory:
    """A bounded number of bytes for outputs, granted to batches in the order in which they ask.

    vLLM queries for all of its waiting requests in one step, and frees memory request by request. A
    batch has the outputs that one request was the first to need. It gets memory for all of them at
    once, and none before the batches ahead of it: so the first request that waits can always have
    what it waits for. Not thread-safe: the caller holds one lock around every call.
    """

    def __init__(self, nbytes_max: int) -> None:
        self._nbytes_max = nbytes_max
        self._taken: dict[WantedOutput, int] = {}
        self._batches: deque[list[WantedOutput]] = deque()
        self.held_bytes = 0

    def ask(self, batch: Sequence[WantedOutput]) -> Sequence[WantedOutput]:
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
            batch = {one: one.nbytes for one in self._batches[0] if one.is_needed}
            nbytes = sum(batch.values())
            if self.held_bytes + nbytes > self._nbytes_max:
                break
            self._batches.popleft()
            self.held_bytes += nbytes
            self._taken |= batch
            granted += batch
        return granted

    def free(self, one: WantedOutput) -> None:
        """Free an output's memory. Idempotent."""
        self.held_bytes -= self._taken.pop(one, 0)


class EncoderFetcher:
    """Fetches outputs. Only the scheduler's thread calls public methods."""

    def __init__(
        self,
        index: AgentCalls,
        reader: PayloadReader | None,
        config: Config,
        recorder: Recorder,
        *,
        held_bytes_max: int,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """
        Args:
            reader: on the same clock; ``close`` closes it. None: outputs are looked up only.
            config: its ``encoder_deadline_ms`` is for an output. Requests are refused while
                ``LOOKUP_QUEUE_MAX`` outputs wait, and other jobs while as many are in progress.
            held_bytes_max: memory for outputs that are held or read, without one copy of an output
                that is not needed any more.
        """
        self._index, self._reader = index, reader
        self._config, self._recorder, self._clock = config, recorder, clock
        self._trouble = Trouble(logger, "lookups of encoder outputs")
        self._changed = Condition()
        self._entries: dict[EncoderOutput, WantedOutput] = {}
        self.memory = OutputMemory(held_bytes_max)
        self._thread = StepThread(
            "objkv-lookup-outputs",
            answer_s=CALL_S,
            failed=self._note_failure,
        )

    def want(self, owner: str, outputs: Sequence[EncoderOutput]) -> bool:
        """Fetch outputs for ``owner``, except those already fetched or in progress. Returns whether
        none is in progress."""
        known = [self._entries.get(output) for output in outputs]
        if not all(entry is not None and owner in entry.owners for entry in known):
            # New, or preempted since: it queues for memory with all that it needs, and holds none.
            self.drop(owner, outputs)
            self._fetch(owner, outputs)
        return not any(self.state(output) is State.WAITING for output in outputs)

    def state(self, output: EncoderOutput) -> State:
        """Return the state of an output. After its deadline it is treated as missing."""
        entry = self._entries.get(output)
        if entry is None:
            return State.ABSENT
        if entry.state is State.WAITING and self.is_late(entry.deadline):
            state = State.STORED if entry.is_stored else State.ABSENT
            self._settle(entry, state, "load_deadlines")
        return entry.state

    def take(self, output: EncoderOutput) -> Pages:
        """Return the bytes of a held output and forget it. The caller owns the bytes."""
        pages = self._entries[output].pages
        assert pages is not None
        self.forget(output)
        return pages

    def drop(self, owner: str, outputs: Iterable[EncoderOutput]) -> None:
        """Remove ``owner`` from the owners of outputs. Those without owners are forgotten."""
        for output in outputs:
            if (entry := self._entries.get(output)) is not None:
                entry.owners.discard(owner)
                if not entry.owners:
                    self.forget(output)

    def forget(self, output: EncoderOutput) -> None:
        """Forget an output, although requests need it: vLLM has it now. Its read is discarded."""
        if (entry := self._entries.pop(output, None)) is None:
            return
        with self._changed:
            was_needed, entry.state = entry.is_needed, State.ABSENT
            self._free(entry)
        if was_needed and self._reader is not None:
            self._reader.look()

    def submit(self, job: Callable[[], Steps[None] | None]) -> bool:
        """See ``StepThread.run``. Exceptions of the job are counted."""
        is_full = self._thread.unfinished >= LOOKUP_QUEUE_MAX
        return not is_full and self._thread.run(job)

    def deadline(self) -> float:
        """Return the deadline, on this clock, of a fetch that starts now."""
        return self._clock() + self._config.encoder_deadline_ms / 1000

    def is_late(self, deadline: float) -> bool:
        """Whether ``deadline`` has passed."""
        return self._clock() >= deadline

    def wait(self, seconds: float) -> None:
        """Block until a state changes, for at most ``seconds``. Returns at once if no output
        waits."""
        with self._changed:
            if any(entry.is_needed for entry in self._entries.values()):
                self._changed.wait(seconds)

    def close(self) -> None:
        """Stop the threads."""
        self._thread.close(0.0)
        with self._changed:  # or each that a closed reader ends would let it read the next
            for entry in self._entries.values():
                self._settle(entry, State.ABSENT)
        if self._reader is not None:
            self._reader.close()

    def _fetch(self, owner: str, outputs: Iterable[EncoderOutput]) -> None:
        fresh = []
        with self._changed:
            waiting = sum(entry.is_needed for entry in self._entries.values())
            for output in outputs:
                if (entry := self._entries.get(output)) is None:
                    layers, deadline = (output.layer,), self.deadline()
                    entry = WantedOutput(output.claim, layers, deadline, self._ended)
                    self._entries[output] = entry
                    fresh.append(entry)
                entry.owners.add(owner)
            is_full = waiting >= LOOKUP_QUEUE_MAX
            if fresh and (is_full or not self._thread.run(partial(self._look_up, fresh))):
                for entry in fresh:
                    self._settle(entry, State.ABSENT, "load_refused")

    def _note_failure(self, error: Exception) -> None:
        self._recorder.count("background_errors")
        if not isinstance(error, StoreError):
            logger.error("encoder job failed unexpectedly", exc_info=error)

    def _look_up(self, batch: list[WantedOutput]) -> Steps[None]:
        """Look up the outputs of a request, and queue for the memory of those that are stored.

        Outputs are looked up one by one. A folder that is its own index ends its answer at the
        first missing key of several, as is right for prefixes.
        """
        try:
            for entry in batch:
                if entry.is_needed:
                    entry.is_stored = yield from self._is_stored(entry.claim.key)
        finally:  # also after an exception, because requests wait for the entries
            with self._changed:
                for entry in batch:
                    if not entry.is_stored:
                        self._settle(entry, State.ABSENT)
                    elif self._reader is None:
                        self._settle(entry, State.STORED)
                        self._touch(entry.claim.key)
                for entry in self.memory.ask([one for one in batch if one.is_needed]):
                    self._settle(entry, State.STORED, "load_refused")
                self._read()

    def _is_stored(self, key: ChunkKey) -> Steps[bool]:
        """Whether the index has an output. False if there is no answer."""
        try:
            find = self._index.find(key.namespace, [key.prefix_hash], [key.field])
            (found,) = yield from find
        except StoreError as exc:
            self._recorder.count("lookup_errors")
            self._trouble.failed(exc)
            return False
        self._trouble.worked()
        return bool(found)

    def _read(self) -> None:
        """Read the outputs that now have memory. The lock is held."""
        granted = self.memory.grant()
        if self._reader is not None and granted:
            for entry in granted:
                entry.began = self._clock()
            self._reader.read(granted)

    def _ended(self, entry: WantedOutput, outcome: ReadOutcome, nbytes: int) -> None:
        """A read has ended. Called by the thread that reads."""
        with self._changed:
            if entry.is_needed and outcome is ReadOutcome.READ:
                self._recorder.count("load_bytes", nbytes)
                self._recorder.observe("load_seconds", self._clock() - entry.began)
            self._settle(entry, _ENDS.get(outcome, State.STORED), outcome.value)
        if entry.state is State.HELD:
            self._touch(entry.claim.key)

    def _touch(self, key: ChunkKey) -> None:
        """Extend the record's life after a hit. No request waits for this."""
        hashes, ttl_s = [key.prefix_hash], self._config.ttl_s
        self.submit(partial(self._index.touch, key.namespace, hashes, ttl_s=ttl_s))

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
        """Free its memory, unless a request may use it. The lock is held."""
        if entry.state is not State.HELD:
            entry.pages = None
            self.memory.free(entry)
            self._read()
