"""Fetches stored encoder outputs before the connector promises them. vLLM does not encode what was
promised, and stops if a promise is broken. An output is therefore either held here, every byte
verified and no longer the agent's, or treated as missing."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from threading import Condition
from time import monotonic

import numpy as np

from objkv.agent.client import CALL_S, AgentCalls
from objkv.agent.payloads import PayloadReader, PayloadTransfer, ReadOutcome
from objkv.background import Steps, StepThread
from objkv.cache.lookup import LOOKUP_QUEUE_MAX
from objkv.config import Config
from objkv.connector.encoder.items import EncoderOutput, Pages
from objkv.errors import StoreError
from objkv.keys.chunk import ChunkKey
from objkv.telemetry import FailureLog, Recorder

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
    held_bytes: int = 0
    """Memory that it has."""
    state: State = State.WAITING
    is_stored: bool = False
    """Whether its lookup found that it is stored."""
    pages: Pages | None = None
    began: float = 0.0
    """When its read began."""

    @property
    def is_needed(self) -> bool:
        return self.state is State.WAITING

    def take_pages(self, pages: Sequence[memoryview]) -> None:
        self.pages = np.frombuffer(pages[0], np.uint8).copy()  # nothing can take a copy away

    def end(self, outcome: ReadOutcome, nbytes: int) -> None:
        self.ended(self, outcome, nbytes)


class EncoderFetcher:
    """Fetches outputs. Only the scheduler's thread calls public methods. A request gets memory for
    all outputs that it is the first to need at once, after those that asked before it, and has none
    while it waits. So requests do not wait for each other for ever."""

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
        """``reader``: on the same clock; ``close`` closes it. None: outputs are looked up only.
        ``config``: an output has twice its ``lookup_deadline_ms``. ``held_bytes_max``: memory for
        what is held or fetched, without a copy that is discarded."""
        self._index, self._reader = index, reader
        self._config, self._recorder, self._clock = config, recorder, clock
        self._failure_log = FailureLog(logger, "lookups of encoder outputs")
        self._changed = Condition()
        self._entries: dict[EncoderOutput, WantedOutput] = {}
        self._nbytes_max = held_bytes_max
        self.held_bytes = 0
        """Memory of all outputs. Changes with the lock held."""
        self.queue: dict[str, float] = {}
        """Requests that wait for memory, and until when."""
        self._thread = StepThread(
            "objkv-lookup-outputs", answer_s=CALL_S, failed=self._note_failure
        )

    def want(self, owner: str, outputs: Sequence[EncoderOutput]) -> bool:
        """Fetch outputs that are not fetched yet. Returns whether nothing is waited for."""
        known = [self._entries.get(output) for output in outputs]
        if not all(entry is not None and owner in entry.owners for entry in known):
            # New, or preempted since: it queues for memory with all that it needs, and holds none.
            self._release(owner, outputs)
            if not self._fetch(owner, outputs):
                return False
        else:  # it waits for nothing that it does not have, as after an image became vLLM's
            self.queue.pop(owner, None)
        return not any(self.state(output) is State.WAITING for output in outputs)

    def state(self, output: EncoderOutput) -> State:
        """Return the state of an output. After its deadline it is treated as missing."""
        entry = self._entries.get(output)
        if entry is None:
            return State.ABSENT
        if entry.state is State.WAITING and self._clock() >= entry.deadline:
            state = State.STORED if entry.is_stored else State.ABSENT
            self._settle(entry, state, "load_deadlines")
        return entry.state

    def pop_pages(self, output: EncoderOutput) -> Pages:
        """Return the bytes of a held output and forget it. The caller owns the bytes."""
        pages = self._entries[output].pages
        assert pages is not None
        self.forget(output)
        return pages

    def drop(self, owner: str, outputs: Iterable[EncoderOutput]) -> None:
        """Remove ``owner`` from the owners of outputs. Those without owners are forgotten."""
        self.queue.pop(owner, None)
        self._release(owner, outputs)

    def forget(self, output: EncoderOutput) -> None:
        """Forget an output, although requests need it: vLLM has it now. Its read is discarded."""
        if (entry := self._entries.pop(output, None)) is None:
            return
        with self._changed:
            was_needed, entry.state = entry.is_needed, State.ABSENT
            self._free(entry)
        if was_needed and self._reader is not None:
            self._reader.recheck()

    def submit(self, job: Callable[[], Steps[None] | None]) -> bool:
        """See ``StepThread.run``. Exceptions of the job are counted."""
        is_full = self._thread.unfinished >= LOOKUP_QUEUE_MAX
        return not is_full and self._thread.run(job)

    def wait(self, seconds: float) -> None:
        """Block until a state changes, at most for ``seconds``, if anything waits."""
        with self._changed:
            if self.queue or any(entry.is_needed for entry in self._entries.values()):
                self._changed.wait(seconds)

    def close(self) -> None:
        """Stop the threads."""
        self._thread.close(0.0)
        if self._reader is not None:
            self._reader.close()

    def _release(self, owner: str, outputs: Iterable[EncoderOutput]) -> None:
        for output in outputs:
            if (entry := self._entries.get(output)) is not None:
                entry.owners.discard(owner)
                if not entry.owners:
                    self.forget(output)

    def _fetch(self, owner: str, outputs: Iterable[EncoderOutput]) -> bool:
        """Fetch what no other request needs, once there is memory for all of it; False until then.
        What exceeds all memory is treated as missing, and everything after the deadline."""
        now, wait_s = self._clock(), 2 * self._config.lookup_deadline_ms / 1000
        deadline = self.queue.setdefault(owner, now + wait_s)
        is_late = now >= deadline
        fits, nbytes = set[EncoderOutput](), 0
        for output in outputs:
            size = output.layer.nbytes
            if not is_late and output not in self._entries and nbytes + size <= self._nbytes_max:
                fits.add(output)
                nbytes += size
        first = next(one for one, until in self.queue.items() if until > now or one == owner)
        if nbytes and (first != owner or self.held_bytes + nbytes > self._nbytes_max):
            return False
        del self.queue[owner]
        waiting = sum(entry.is_needed for entry in self._entries.values())
        for output in outputs:
            entry = self._entries.get(output)
            if entry is None:
                entry = WantedOutput(output.claim, (output.layer,), deadline, self._ended)
                self._entries[output] = entry
                if output in fits and waiting < LOOKUP_QUEUE_MAX:
                    self._begin(entry)
                else:
                    self._settle(
                        entry, State.ABSENT, "load_deadlines" if is_late else "load_refused"
                    )
            entry.owners.add(owner)
        return True

    def _begin(self, entry: WantedOutput) -> None:
        with self._changed:
            entry.held_bytes = entry.layers[0].nbytes
            self.held_bytes += entry.held_bytes
        if not self._thread.run(partial(self._look_up, entry)):
            self._settle(entry, State.ABSENT, "load_refused")

    def _note_failure(self, error: Exception) -> None:
        self._recorder.count("background_errors")
        if not isinstance(error, StoreError):
            logger.error("encoder job failed unexpectedly", exc_info=error)

    def _look_up(self, entry: WantedOutput) -> Steps[None]:
        """Look an output up, by itself, because a folder that is its own index ends its answer at
        the first missing key of several. Have it read if it is stored."""
        key = entry.claim.key
        try:
            (found,) = yield from self._index.find(key.namespace, [key.prefix_hash], [key.field])
            entry.is_stored = bool(found)
            self._failure_log.worked()
        except StoreError as exc:
            self._recorder.count("lookup_errors")
            self._failure_log.failed(exc)
        finally:  # also after another exception, because requests wait for the output
            if not entry.is_stored:
                self._settle(entry, State.ABSENT)
        if not entry.is_stored:
            return
        if self._reader is None:
            self._settle(entry, State.STORED)
            self._touch(key)
        else:
            entry.began = self._clock()
            self._reader.read([entry])

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
            self.held_bytes -= entry.held_bytes
            entry.held_bytes, entry.pages = 0, None
