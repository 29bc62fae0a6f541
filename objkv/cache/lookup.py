"""Background lookups, memoised per request, bounded, with a deadline.

``ask`` never waits and does no work on the prompt. It returns None ("retry later") until the index
has replied or the deadline has passed, and then the same answer; if the prompt grows, only its new
part is looked up. A failed, late or refused lookup is "no match".
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import takewhile
from math import inf
from time import monotonic
from typing import Final, Protocol

from objkv.background import Steps, StepThread, in_steps
from objkv.cache.match import ENTRIES_MAX
from objkv.errors import StoreError
from objkv.index.base import Record, ShardRecords
from objkv.telemetry import FailureLog, Recorder
from objkv.tracing import NO_TRACING, Span, Tracing

logger = logging.getLogger(__name__)
Records = tuple[ShardRecords | None, ...]
"""The found shards of each chunk of a prompt, in order."""
_ANSWER_S = 2.0
"""An agent takes microseconds, unless it is stopped or busy, or its index is down."""
_CLOSE_S_MAX = 5.0
_IN_TIME_S = 10.0
"""Lookups work again if none was late for this time: no two lines of log per request."""


class Hashes(Protocol):
    """The prefix hashes of a prompt, possibly not computed yet."""

    def __len__(self) -> int:
        """Computes none."""

    def __getitem__(self, chunks: slice, /) -> Sequence[bytes]:
        """May take long; called only on the lookup thread."""


LOOKUP_TTL_S: Final = 30.0
"""How long an answer is believed. What an agent learns of ends it earlier; a chunk that another
process removed costs a failed load."""
LOOKUP_QUEUE_MAX: Final = 1024
"""Four times the requests that vLLM runs at once. With more, none is answered in time."""


@dataclass(frozen=True, slots=True)
class LookupLimits:
    """Limits of time, number and age."""

    deadline_s: float
    """After this time a lookup is a miss. ``close`` waits this long, at most 5 s."""
    queue_max: int = LOOKUP_QUEUE_MAX
    """Of jobs that wait or run."""
    age_max_s: float = inf
    """If a request waits this long after its answer, the lookup is repeated."""


@dataclass(slots=True)
class _Memo:
    known: Records
    """Results for the leading chunks from an earlier answer."""
    count: int
    deadline: float
    future: Future[list[ShardRecords | None]] | None = None
    answer: Records | None = None
    answered_at: float = 0.0

    @property
    def no_match(self) -> Records:
        return self.known + (None,) * (self.count - len(self.known))


class FindIndex(Protocol):
    """The part of an index that lookups use."""

    def find(
        self, namespace: str, prefix_hashes: Sequence[bytes], fields: Sequence[str]
    ) -> Steps[list[ShardRecords | None]] | list[ShardRecords | None]:
        """See ``ReadIndex.find``. In steps, if it is in another process."""


class LookupService:
    """Looks up the stored ``fields`` of each chunk in the background, on one thread. Only one
    thread may call ``ask`` and ``forget``."""

    def __init__(
        self,
        index: FindIndex,
        fields: Sequence[str],
        recorder: Recorder,
        limits: LookupLimits,
        *,
        clock: Callable[[], float] = monotonic,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        self._index = index
        self._fields = tuple(fields)
        self._recorder = recorder
        self._limits = limits
        self._clock = clock
        self._tracing = tracing
        # Started here, because starting takes longer than the rest of ``ask``.
        self._thread = StepThread(
            "objkv-lookup",
            answer_s=_ANSWER_S,
            queue_max=limits.queue_max,
            failed=lambda _: recorder.count("background_errors"),
        )
        self._memos: dict[str, _Memo] = {}
        self._failure_log, self._late_at = FailureLog(logger, "lookups"), -inf

    def ask(
        self, request_id: str, namespace: str, hashes: Hashes, trace: str | None = None
    ) -> Records | None:
        """Return the found shards of each chunk in order, or None while the lookup is in flight."""
        memo = self._memos.get(request_id)
        if memo is None:
            return self._start(request_id, namespace, hashes, trace, ()).answer
        if (answer := memo.answer) is not None:
            if self._clock() - memo.answered_at > self._limits.age_max_s:
                memo = self._start(request_id, namespace, hashes, trace, ())
            elif len(hashes) > memo.count:
                memo = self._start(request_id, namespace, hashes, trace, answer)
        if memo.answer is None:
            self._poll(memo)
        return memo.answer

    def forget(self, request_id: str) -> None:
        """Forget a request. Cancels a queued lookup; a running one finishes unused."""
        memo = self._memos.pop(request_id, None)
        if memo is not None and memo.future is not None:
            self._thread.cancel(memo.future)

    def deadline(self) -> float:
        """Return the time, for ``is_late``, until which a lookup that starts now is waited for."""
        return self._clock() + self._limits.deadline_s

    def is_late(self, deadline: float) -> bool:
        return self._clock() >= deadline

    def submit(self, job: Callable[[], Steps[None] | None]) -> bool:
        """See ``StepThread.run``. Exceptions of the job are counted."""
        return self._thread.run(job)

    @property
    def in_flight(self) -> int:
        """Jobs that wait or run."""
        return self._thread.unfinished

    def wait(self, seconds: float) -> None:
        self._thread.wait(seconds)

    def wait_for(self, request_id: str, seconds: float) -> bool:
        """Wait for the request's pending lookup. Return whether there was one that finished."""
        memo = self._memos.get(request_id)
        if memo is None or memo.future is None:
            return False
        return bool(wait((memo.future,), seconds).done)

    def close(self) -> None:
        """Refuse further lookups and end the thread. Lookups that outlast the deadline fail."""
        self._thread.close(min(self._limits.deadline_s, _CLOSE_S_MAX))

    def _start(
        self, request_id: str, namespace: str, hashes: Hashes, trace: str | None, known: Records
    ) -> _Memo:
        started = self._clock()
        memo = _Memo(known, len(hashes), started + self._limits.deadline_s)
        self._memos[request_id] = memo
        # By identity: comparing each record with None takes eight times as long.
        if memo.count == len(known) or (known and any(one is None for one in known)):
            # A match ends at the first missing chunk, so the later ones do not matter.
            self._answer(memo, memo.no_match)
            return memo
        span = self._tracing.begin("objkv.lookup", trace, request_id=request_id)
        memo.future = self._thread.start(self._find(memo, namespace, hashes, started, span))
        if memo.future is None:
            self._recorder.count("lookup_refused")
            span.end("refused: the queue is full", namespace=namespace)
            self._answer(memo, memo.no_match)
        return memo

    def _find(
        self, memo: _Memo, namespace: str, hashes: Hashes, started: float, span: Span
    ) -> Steps[list[ShardRecords | None]]:
        found = None
        try:
            wanted = hashes[len(memo.known) : memo.count]
            found = yield from in_steps(self._index.find(namespace, wanted, self._fields))
            _decode(found)
            return found
        finally:
            self._recorder.observe("lookup_seconds", self._clock() - started)
            if span.is_on:
                error = "the lookup failed" if found is None else None
                stored = sum(one is not None for one in found or ())
                chunks = memo.count - len(memo.known)
                span.end(error, namespace=namespace, chunks=chunks, chunks_found=stored)

    def _poll(self, memo: _Memo) -> None:
        future, answer, error = memo.future, None, None
        assert future is not None
        if future.done() and not future.cancelled():
            if (error := future.exception()) is not None:
                self._recorder.count("lookup_errors")
            else:
                answer = memo.known + tuple(future.result())
                if self._clock() - self._late_at >= _IN_TIME_S:
                    self._failure_log.worked()
        elif future.cancelled() or self.is_late(memo.deadline):
            self._thread.cancel(future)
            self._recorder.count("lookup_deadlines")
            self._late_at = self._clock()
            self._failure_log.failed(
                TimeoutError(f"no answer within {self._limits.deadline_s:g} s")
            )
        else:
            return
        self._answer(memo, memo.no_match if answer is None else answer)
        if error is not None and not isinstance(error, StoreError):
            raise error

    def _answer(self, memo: _Memo, answer: Records) -> None:
        memo.answer, memo.answered_at, memo.future = answer, self._clock(), None


def _decode(found: Sequence[ShardRecords | None]) -> None:
    """Decode shards here: the scheduler's thread would take milliseconds for a long prompt."""
    for shards in found:
        if shards is None:
            return  # a match ends here
        shards.values()


_AGAIN_S: Final = 30.0
_KEPT_S: Final = 600.0
"""How long the names of parts are asked for after they were last found."""


class RecordIndex(FindIndex, Protocol):
    """The part of an index that this needs."""

    def lookup(
        self, namespace: str, prefix_hashes: Sequence[bytes]
    ) -> Steps[list[Record | None]] | list[Record | None]:
        """See ``ReadIndex.lookup``. In steps, if it is in another process."""


class OtherShapesIndex:
    """Finds payloads that have only a part of a group, too. Implements ``FindIndex``. For one
    thread, which may have begun several lookups.

    A replica on several nodes writes one per node, whose names depend on its shape. So the whole
    record of the first chunk that lacks something is read, and the chunks from there on are looked
    up by the names in it. Where nothing is in parts, that is a small call more per ``again_s``.
    """

    def __init__(
        self,
        inner: RecordIndex,
        is_stored: Callable[[ShardRecords], bool],
        *,
        again_s: float = _AGAIN_S,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``is_stored``: whether shards have everything that a reader needs of a chunk.
        ``again_s``: how long no record is read after one without parts that help."""
        self._inner, self._is_stored = inner, is_stored
        self._again_s, self._clock = again_s, clock
        self._namespace = ""
        self._parts: tuple[str, ...] = ()
        self._parts_end = self._due = -inf

    def find(
        self, namespace: str, prefix_hashes: Sequence[bytes], fields: Sequence[str]
    ) -> Steps[list[ShardRecords | None]]:
        """Find ``fields``, and parts of leading chunks, up to the second shape not met before."""
        found = list((yield from in_steps(self._inner.find(namespace, prefix_hashes, fields))))
        if namespace != self._namespace:
            self._namespace, self._parts, self._due = namespace, (), -inf
        if self._parts and self._clock() < self._parts_end:
            yield from self._add(found, namespace, prefix_hashes, fields)
        at = self._count_stored(found)
        if at == len(found) or self._clock() < self._due:
            return found
        record = yield from self._read(namespace, prefix_hashes[at])
        found[at] = {**(found[at] or {}), **record} or None
        if self._is_stored(found[at] or {}):
            names = sorted(record.keys() - set(fields))
            if names:
                self._parts = tuple(dict.fromkeys((*names, *self._parts)))[:ENTRIES_MAX]
                self._parts_end = self._clock() + _KEPT_S
            self._due = -inf
            yield from self._add(found, namespace, prefix_hashes, fields)
        return found

    def _add(
        self,
        found: list[ShardRecords | None],
        namespace: str,
        prefix_hashes: Sequence[bytes],
        fields: Sequence[str],
    ) -> Steps[None]:
        """Find the chunks from the first that lacks something again, by the names of parts, too.
        The index may not have looked beyond it before."""
        at, names = self._count_stored(found), (*fields, *self._parts)
        if at < len(found):
            found[at:] = yield from in_steps(self._inner.find(namespace, prefix_hashes[at:], names))
            if any(one and one.keys() - set(fields) for one in found[at:]):
                self._parts_end = self._clock() + _KEPT_S

    def _count_stored(self, found: Sequence[ShardRecords | None]) -> int:
        stored = takewhile(lambda one: one is not None and self._is_stored(one), found)
        return sum(1 for _ in stored)

    def _read(self, namespace: str, prefix_hash: bytes) -> Steps[ShardRecords]:
        """Return all shards of a chunk; none if it has too many, or if the index fails: what was
        found by name is right all the same."""
        self._due = self._clock() + self._again_s  # for lookups that begin meanwhile, too
        try:
            (record,) = yield from in_steps(self._inner.lookup(namespace, [prefix_hash]))
        except StoreError:
            return {}
        return {} if record is None or len(record.shards) > ENTRIES_MAX else record.shards
