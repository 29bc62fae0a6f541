"""Lookups on background threads, memoised per request, bounded, with a deadline.

``ask`` never waits: it answers None ("ask again") until the index has answered or the deadline
has passed, and from then on the same answer. A failed, late or refused lookup is "no match".
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import BoundedSemaphore
from time import monotonic
from typing import TypeVar

from objkv.errors import StoreError
from objkv.index.base import Record, WriteIndex
from objkv.telemetry import Recorder

T = TypeVar("T")
Records = tuple[Record | None, ...]
_THREADS = 4
"""Redis answers a prompt in one round trip; a few threads hide one slow answer from the others."""


@dataclass(slots=True)
class _Memo:
    count: int
    deadline: float
    started: float
    future: Future[list[Record | None]] | None
    answer: Records | None


class LookupService:
    """Asks an index in the background. ``ask`` and ``forget`` are called by one thread only."""

    def __init__(
        self,
        index: WriteIndex,
        recorder: Recorder,
        *,
        deadline_s: float,
        queue_max: int,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._index = index
        self._recorder = recorder
        self._deadline_s = deadline_s
        self._queue_max = queue_max
        self._clock = clock
        self._slots = BoundedSemaphore(queue_max)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="objkv-lookup")
        self._memos: dict[str, _Memo] = {}

    def ask(
        self, request_id: str, namespace: str, prefix_hashes: Sequence[bytes]
    ) -> Records | None:
        """The records of the chunks, in order, or None while they are not known yet."""
        memo = self._memos.get(request_id)
        if memo is None or memo.count != len(prefix_hashes):
            memo = self._start(namespace, tuple(prefix_hashes))
            self._memos[request_id] = memo
        if memo.answer is None:
            memo.answer = self._answer(memo)
        return memo.answer

    def forget(self, request_id: str) -> None:
        """Drop what is remembered of a request; a lookup under way ends by itself."""
        self._memos.pop(request_id, None)

    def deadline(self) -> float:
        """Until when, on this service's clock, what is asked now is worth waiting for."""
        return self._clock() + self._deadline_s

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

    @property
    def pending(self) -> bool:
        """Whether any answer is still awaited."""
        return any(memo.answer is None for memo in self._memos.values())

    def close(self) -> None:
        """Stop taking lookups; those under way end within the index's own time-outs."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def __repr__(self) -> str:
        pending = sum(memo.answer is None for memo in self._memos.values())
        return f"<LookupService {pending} pending, {len(self._memos)} remembered>"

    def _start(self, namespace: str, prefix_hashes: tuple[bytes, ...]) -> _Memo:
        now = self._clock()
        memo = _Memo(len(prefix_hashes), self.deadline(), now, None, None)
        if not prefix_hashes:
            memo.answer = ()
            return memo
        memo.future = self._submit(lambda: self._index.lookup(namespace, prefix_hashes))
        if memo.future is None:
            self._recorder.count("lookup_refused")
            memo.answer = (None,) * memo.count
        return memo

    def _submit(self, job: Callable[[], T]) -> Future[T] | None:
        if not self._slots.acquire(blocking=False):
            return None
        try:
            future = self._pool.submit(job)
        except RuntimeError:  # closed
            self._slots.release()
            return None
        future.add_done_callback(lambda _: self._slots.release())
        return future

    def _answer(self, memo: _Memo) -> Records | None:
        assert memo.future is not None
        if memo.future.done() and not memo.future.cancelled():
            return self._records(memo, memo.future)
        if not self.is_late(memo.deadline) and not memo.future.cancelled():
            return None
        memo.future.cancel()
        self._recorder.count("lookup_deadlines")
        return (None,) * memo.count

    def _records(self, memo: _Memo, future: Future[list[Record | None]]) -> Records:
        self._recorder.observe("lookup_seconds", self._clock() - memo.started)
        error = future.exception()
        if error is None:
            return tuple(future.result())
        if not isinstance(error, StoreError):
            raise error
        self._recorder.count("lookup_errors")
        return (None,) * memo.count
