"""Lookups on background threads, memoised per request, bounded, with a deadline.

``ask`` never waits and does no work on the prompt: it answers None ("ask again") until the index
has answered or the deadline has passed, and from then on the same answer, to which only what a
grown prompt adds is asked for. A failed, late or refused lookup is "no match".
"""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from math import inf
from threading import BoundedSemaphore
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar

from objkv.background import Pool
from objkv.errors import StoreError
from objkv.index.base import ReadIndex, Shards
from objkv.telemetry import Recorder
from objkv.tracing import NO_TRACING, Span, Tracing

T = TypeVar("T")
Records = tuple[Shards | None, ...]
"""What was found of each chunk of a prompt, in order."""
_THREADS = 4
"""Redis answers a prompt in one round trip; a few threads hide one slow answer from the others."""
_CLOSE_S_MAX = 5.0


class Hashes(Protocol):
    """The prefix hashes of a prompt, perhaps yet to be computed."""

    def __len__(self) -> int:
        """How many there are; at once."""

    def __getitem__(self, chunks: slice, /) -> Sequence[bytes]:
        """Some of them. May take long, and is called on lookup threads only."""


@dataclass(frozen=True, slots=True)
class LookupLimits:
    """How long, how many, how old."""

    deadline_s: float
    """After which a lookup is no match; ``close`` waits as long for those under way, or 5 s."""
    queue_max: int
    """Jobs that wait or run at once."""
    age_max_s: float = inf
    """A request that still waits so long after its answer is looked up anew."""


@dataclass(slots=True)
class _Memo:
    known: Records
    """Of the leading chunks, from an earlier answer."""
    count: int
    deadline: float
    future: Future[list[Shards | None]] | None = None
    answer: Records | None = None
    told: float = 0.0

    @property
    def no_match(self) -> Records:
        return self.known + (None,) * (self.count - len(self.known))


class _Job(Generic[T]):
    """Work whose outcome is asked for later, and which can be cancelled until it begins."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.future: Future[T] = Future()
        self._work = work

    def run(self) -> None:
        """Do it; what it raises is the future's."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            outcome = self._work()
        except BaseException as exc:  # whoever asks for the outcome gets it
            self.future.set_exception(exc)
        else:
            self.future.set_result(outcome)


class LookupService:
    """Asks an index in the background for what of each chunk is stored in ``fields``.

    ``ask`` and ``forget`` are called by one thread only.
    """

    def __init__(
        self,
        index: ReadIndex,
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
        self._slots = BoundedSemaphore(limits.queue_max)
        # Started now: that takes longer than all else that ``ask`` does.
        self._pool: Pool[_Job[Any]] = Pool("objkv-lookup", _THREADS, _Job.run)
        self._memos: dict[str, _Memo] = {}

    def ask(
        self, request_id: str, namespace: str, hashes: Hashes, trace: str | None = None
    ) -> Records | None:
        """What was found of each chunk, in order, or None while it is not known yet. ``trace``: the
        trace to which a lookup belongs."""
        memo = self._memos.get(request_id)
        if memo is None:
            memo = self._start(request_id, namespace, hashes, trace=trace)
        elif (answer := memo.answer) is not None:
            if self._clock() - memo.told > self._limits.age_max_s:
                memo = self._start(request_id, namespace, hashes, trace=trace)
            elif len(hashes) > memo.count:
                memo = self._start(request_id, namespace, hashes, answer, trace=trace)
        if memo.answer is None:
            self._poll(memo)
        return memo.answer

    def forget(self, request_id: str) -> None:
        """Drop what is remembered of a request. A lookup that waits gives its place to others; one
        under way ends by itself."""
        memo = self._memos.pop(request_id, None)
        if memo is not None and memo.future is not None:
            memo.future.cancel()

    def deadline(self) -> float:
        """Until when, on this service's clock, what is asked now is worth waiting for."""
        return self._clock() + self._limits.deadline_s

    def is_late(self, deadline: float) -> bool:
        """Whether ``deadline`` has passed."""
        return self._clock() >= deadline

    def submit(self, job: Callable[[], None]) -> bool:
        """Run ``job`` on a lookup thread; False if the queue is full. A ``StoreError`` that it
        raises is counted and forgotten."""

        def run() -> None:
            try:
                job()
            except StoreError:
                self._recorder.count("background_errors")

        return self._submit(run) is not None

    def wait(self, seconds: float) -> None:
        """Block until some answer that is awaited is there, at most so long; not at all if none is.
        For a thread that has nothing better to do."""
        futures = [memo.future for memo in self._memos.values() if memo.future is not None]
        # One that is done may be of a request that nobody asks about, for a while.
        if awaited := [future for future in futures if not future.done()]:
            wait(awaited, seconds, FIRST_COMPLETED)

    def close(self) -> None:
        """Stop taking lookups and end the threads. A job that outlasts the deadline is left to end
        by itself, within the index's own time-outs."""
        seconds = min(self._limits.deadline_s, _CLOSE_S_MAX)
        self._pool.close(seconds, give_up=lambda jobs: [job.future.cancel() for job in jobs])

    def __repr__(self) -> str:
        pending = sum(memo.answer is None for memo in self._memos.values())
        return f"<LookupService {pending} pending, {len(self._memos)} remembered>"

    def _start(
        self,
        request_id: str,
        namespace: str,
        hashes: Hashes,
        known: Records = (),
        *,
        trace: str | None,
    ) -> _Memo:
        memo = _Memo(known, len(hashes), self.deadline())
        self._memos[request_id] = memo
        # By identity: asking each record whether it equals None takes eight times as long.
        if memo.count == len(known) or any(one is None for one in known):
            # A match ends at the first chunk that is not stored: what follows does not matter.
            self._tell(memo, memo.no_match)
            return memo
        started = self._clock()
        span = self._tracing.begin("objkv.lookup", trace, request_id=request_id)

        def find() -> list[Shards | None]:
            found = None
            try:
                wanted = hashes[len(known) : memo.count]
                found = self._index.find(namespace, wanted, self._fields)
                return found
            finally:
                self._recorder.observe("lookup_seconds", self._clock() - started)
                _end(span, namespace, memo.count - len(known), found)

        memo.future = self._submit(find)
        if memo.future is None:
            self._recorder.count("lookup_refused")
            span.end("refused: the queue is full", namespace=namespace)
            self._tell(memo, memo.no_match)
        return memo

    def _submit(self, job: Callable[[], T]) -> Future[T] | None:
        if not self._slots.acquire(blocking=False):
            return None
        queued = _Job(job)
        if not self._pool.put((queued,)):  # closed
            self._slots.release()
            return None
        queued.future.add_done_callback(lambda _: self._slots.release())
        return queued.future

    def _poll(self, memo: _Memo) -> None:
        assert memo.future is not None
        if memo.future.done() and not memo.future.cancelled():
            self._take(memo, memo.future)
        elif memo.future.cancelled() or self.is_late(memo.deadline):
            memo.future.cancel()
            self._recorder.count("lookup_deadlines")
            self._tell(memo, memo.no_match)

    def _take(self, memo: _Memo, future: Future[list[Shards | None]]) -> None:
        error = future.exception()
        if error is None:
            self._tell(memo, memo.known + tuple(future.result()))
            return
        self._recorder.count("lookup_errors")
        self._tell(memo, memo.no_match)
        if not isinstance(error, StoreError):
            raise error

    def _tell(self, memo: _Memo, answer: Records) -> None:
        memo.answer, memo.told, memo.future = answer, self._clock(), None


def _end(span: Span, namespace: str, chunks: int, found: list[Shards | None] | None) -> None:
    if not span.is_on:
        return
    stored = 0 if found is None else sum(one is not None for one in found)
    error = "the index did not answer" if found is None else None
    span.end(error, namespace=namespace, chunks=chunks, chunks_found=stored)
