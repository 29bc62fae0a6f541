"""Background threads: pools that run jobs in order, a thread that asks many questions before it
waits for answers, and alarms that wake a waiting thread.

An exception in a job never ends a thread, a waiting thread keeps no finished job alive, and closing
gives back the jobs that no thread has started. The owner limits the number and age of jobs. The
threads are daemons, so a process can exit while a file system hangs: ``ThreadPoolExecutor`` would
wait forever.
"""

import ctypes
import logging
import os
import select
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from threading import Condition, Event, Lock, Thread
from time import monotonic, sleep
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

logger = logging.getLogger(__name__)

_HOLDING_GIL = ctypes.PyDLL(None)
_FAULT_S = 0.1
"""Pause after a fault of a thread's own work, which may be there again at once."""
JOIN_S = 1.0
"""The shortest time to wait for idle threads when closing."""
Job = TypeVar("Job")
T = TypeVar("T")


class Line(Protocol):
    """Answers questions in order. Its methods never wait, and raise if it is lost."""

    def fileno(self) -> int:
        """Return the descriptor that is readable when an answer has arrived."""

    def send(self, message: bytes) -> bool:
        """Send a question. False if there is no room before an earlier one is answered."""

    def receive(self) -> bytes | None:
        """Return the next answer, or None if it has not arrived."""

    def close(self) -> None:
        """Give up the line. Idempotent."""


class ClosedError(TimeoutError):
    """The thread of the work is closed before the answer: no fault of the line."""


class Question(NamedTuple):
    """What a step asks for."""

    line: Line
    message: bytes


Steps = Generator[Question | None, bytes, T]
"""Work in steps: yields a question, which gives its answer or raises, or None to let others go."""


def in_steps(outcome: T | Steps[T]) -> Steps[T]:
    """Return the outcome of a call that is done in steps, as by an agent, or was done at once."""
    if isinstance(outcome, Generator):
        return (yield from cast("Steps[T]", outcome))
    return outcome


class Pool(Generic[Job]):
    """Thread-safe. Only ``drain`` and ``close`` block. No callback runs under its lock."""

    def __init__(
        self,
        name: str,
        threads: int,
        run: Callable[[Job], None],
        *,
        failed: Callable[[Job, Exception], None] | None = None,
        begin: Callable[[], None] | None = None,
    ) -> None:
        """``failed``: receives exceptions of ``run``; by default they are logged as errors.
        ``begin``: each thread's first call. If it fails, jobs run all the same."""
        self._name, self._run, self._failed, self._begin = name, run, failed, begin
        self._lock = Lock()
        self._came, self._ended = Condition(self._lock), Condition(self._lock)
        self._jobs: deque[Job] = deque()
        self._begun = 0
        self._closed = False
        self._threads = [
            Thread(target=self._work, name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:  # the machine has no more threads
            with self._lock:
                self._closed = True
                self._came.notify_all()
            raise

    @property
    def threads(self) -> int:
        """Threads that have not ended."""
        return sum(thread.is_alive() for thread in self._threads)

    @property
    def waiting(self) -> int:
        """Jobs that no thread has taken yet."""
        return len(self._jobs)

    @property
    def busy(self) -> int:
        """Jobs that are running."""
        return self._begun

    @property
    def is_closed(self) -> bool:
        """Whether the pool refuses new jobs."""
        return self._closed

    def put(self, jobs: Iterable[Job]) -> bool:
        """Queue all jobs. Return False and queue none after ``close``."""
        jobs = list(jobs)
        with self._lock:
            if self._closed:
                return False
            self._jobs.extend(jobs)
            self._came.notify(len(jobs))
        return True

    def drain(self, seconds: float) -> bool:
        """Wait at most ``seconds`` until no job is waiting or running; return whether none is."""
        with self._lock:
            return self._ended.wait_for(lambda: not self._jobs and not self._begun, seconds)

    def close(
        self, join_s: float = JOIN_S, *, give_up: Callable[[Sequence[Job]], object] = lambda _: None
    ) -> list[str]:
        """Refuse new jobs, pass those that have not started to ``give_up``, and wait at most
        ``join_s`` for the others. Return the names of threads that are still busy; they end with
        their job. Idempotent."""
        with self._lock:
            self._closed = True
            left = list(self._jobs)
            self._jobs.clear()
            self._came.notify_all()
            self._ended.notify_all()
        give_up(left)
        return join_all(self._threads, join_s)

    def _work(self) -> None:
        try:
            if self._begin is not None:
                self._begin()
        except Exception:  # a dead thread would never end a job, and what waits for one
            logger.exception("thread not prepared pool=%s", self._name)
        while True:
            with self._lock:
                self._came.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._begun += 1
            try:
                self._run(job)
            except Exception as exc:  # a dead thread would let the queue fill up
                self._take_error(job, exc)
            finally:
                del job  # release its memory now rather than when the next job arrives
                with self._lock:
                    self._begun -= 1
                    if not self._jobs and not self._begun:
                        self._ended.notify_all()

    def _take_error(self, job: Job, error: Exception) -> None:
        try:
            if self._failed is None:
                raise error
            self._failed(job, error)
        except Exception:
            logger.exception("job failed unexpectedly pool=%s", self._name)


def at_once(steps: Steps[T]) -> T:
    """Return the outcome of work that asks no other process."""
    try:
        while True:
            question = next(steps)
            assert question is None
    except StopIteration as end:
        return cast("T", end.value)


@dataclass(slots=True, eq=False)
class _Task:
    steps: Steps[Any]
    future: Future[Any] = field(default_factory=Future)


@dataclass(slots=True)
class _Traffic:
    """The questions of a line that have no answer yet."""

    sent: deque[_Task] = field(default_factory=deque)
    unsent: deque[tuple[_Task, bytes]] = field(default_factory=deque)
    heard_at: float = 0.0
    """When the last answer came, or the first question was sent."""


class StepThread:
    """One thread for much work that mostly waits for answers. It sends all questions before it
    waits, and goes on with whichever is answered. No exception ends it: those of work go to its
    future. Thread-safe."""

    def __init__(
        self,
        name: str,
        *,
        answer_s: float,
        queue_max: float = inf,
        failed: Callable[[Exception], object] = lambda _: None,
    ) -> None:
        """``answer_s``: a line without an answer for this time is lost. ``queue_max``: most work
        that may wait or have begun. ``failed``: receives what the work of ``run`` raises. Raises
        ``OSError`` if the process is out of descriptors."""
        self._name, self._answer_s, self._queue_max = name, answer_s, queue_max
        self._failed = failed
        self._lock, self._alarm, self._ended = Lock(), Alarm(), Event()
        self._new: deque[_Task] = deque()
        self._ready: deque[tuple[_Task, bytes | BaseException | None]] = deque()
        self._traffic: dict[Line, _Traffic] = {}
        self._unfinished = 0
        self._end_at: float | None = None
        self._has_ended = False
        self.is_idle = False
        """Whether the thread waits for work."""
        self._thread: Thread | None = None
        self._has_thread()

    @property
    def unfinished(self) -> int:
        """Work that waits or has begun."""
        return self._unfinished

    def start(self, work: Steps[Any]) -> Future[Any] | None:
        """Have work done on the thread. ``cancel`` ends it until it begins. Returns None if it is
        refused: the queue is full, the system is out of threads, or after ``close``."""
        task = _Task(work)
        with self._lock:
            if self._unfinished >= self._queue_max or self._end_at is not None:
                return None
            if self._thread is None and not self._has_thread():
                return None
            self._unfinished += 1
            self._new.append(task)
        if self.is_idle:
            self._alarm.set()
        return task.future

    def cancel(self, future: Future[Any]) -> None:
        """Cancel work that has not begun. No effect on other work."""
        if not future.cancelled() and future.cancel():
            self._note_end()

    def run(self, job: Callable[[], Steps[None] | None]) -> bool:
        """Have a job done, in steps if it takes long. False if it is refused, as by ``start``."""

        def work() -> Steps[None]:
            try:
                yield from in_steps(job())
            except Exception as exc:
                logger.debug("job failed thread=%s reason=%r", self._name, exc)
                self._failed(exc)

        return self.start(work()) is not None

    def wait(self, seconds: float) -> None:
        """Wait at most ``seconds`` until work ends, or has since the last call. For one thread."""
        self._ended.wait(seconds)
        self._ended.clear()

    def close(self, seconds: float) -> None:
        """Cancel what has not begun. Questions of the rest fail after ``seconds``. Idempotent."""
        with self._lock:
            if self._end_at is None:
                self._end_at = monotonic() + seconds
            left = list(self._new)
            self._new.clear()
        for task in left:
            self.cancel(task.future)
        if self._thread is None:  # there was none to be had
            self._alarm.close()
            return
        self._alarm.set()
        self._thread.join(seconds + JOIN_S)

    def _has_thread(self) -> bool:
        if self._thread is not None:
            return True
        thread = Thread(target=self._run, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # thread limit reached, or the interpreter is shutting down
            return False
        self._thread = thread
        return True

    def _run(self) -> None:
        fault: Exception | None = None
        while True:
            try:
                if fault is not None:  # a bug, or no memory: later work must find the thread
                    self._fail_all(fault)
                    fault = None
                self._work()
                end = self._end_at
                if end is not None and (not self._unfinished or monotonic() >= end):
                    break
                self._listen()
            except Exception as exc:
                fault = exc
                with suppress(Exception):
                    logger.exception("background work failed unexpectedly thread=%s", self._name)
                sleep(_FAULT_S)
        self._has_ended = True
        self._fail_all(ClosedError("closed"))
        while self._ready or self._new:
            self._work()
        self._alarm.close()

    def _work(self) -> None:
        for _ in range(len(self._ready)):
            task, answer = self._ready.popleft()
            self._go_on(task, answer)
        while self._new:
            with suppress(IndexError):  # closed meanwhile
                task = self._new.popleft()
                if task.future.set_running_or_notify_cancel():
                    self._go_on(task, None)

    def _go_on(self, task: _Task, answer: bytes | BaseException | None) -> None:
        try:
            if isinstance(answer, BaseException):
                question = task.steps.throw(answer)
            else:
                question = task.steps.send(cast("bytes", answer))
        except StopIteration as end:
            task.future.set_result(end.value)
            self._note_end()
        except BaseException as exc:
            task.future.set_exception(exc)
            self._note_end()
        else:
            if self._has_ended:
                self._ready.append((task, ClosedError("closed")))
            elif question is None:
                self._ready.append((task, None))
            else:
                traffic = self._traffic.setdefault(question.line, _Traffic())
                traffic.unsent.append((task, question.message))
                self._send(question.line, traffic)

    def _note_end(self) -> None:
        with self._lock:
            self._unfinished -= 1
        self._ended.set()

    def _send(self, line: Line, traffic: _Traffic) -> None:
        """Send what there is room for. The rest follows after an answer."""
        try:
            while traffic.unsent and line.send(traffic.unsent[0][1]):
                if not traffic.sent:
                    traffic.heard_at = monotonic()
                traffic.sent.append(traffic.unsent.popleft()[0])
        except Exception as exc:
            self._fail_line(line, exc)

    def _listen(self) -> None:
        """Wait for answers and new work, unless something can go on at once."""
        poll = select.poll()
        poll.register(self._alarm.fileno(), select.POLLIN)
        lines = {}
        for line, traffic in list(self._traffic.items()):
            if not traffic.sent:  # not even its first question can be sent
                self._fail_line(line, TimeoutError("no room for a question"))
            else:
                poll.register(line.fileno(), select.POLLIN)
                lines[line.fileno()] = line
        self.is_idle = True  # before the last look at new work
        events = poll.poll(0 if self._new or self._ready else self._wait_ms())
        self.is_idle = False
        for fd, _ in events:
            if fd in lines:
                self._hear(lines[fd], self._traffic[lines[fd]])
            else:
                self._alarm.clear()
        late = monotonic() - self._answer_s
        for line, traffic in list(self._traffic.items()):
            if traffic.heard_at <= late:
                self._fail_line(line, TimeoutError(f"no answer within {self._answer_s:g} s"))

    def _wait_ms(self) -> float | None:
        ends = [traffic.heard_at + self._answer_s for traffic in self._traffic.values()]
        if self._end_at is not None:
            ends.append(self._end_at)
        return 1000 * max(0.0, min(ends) - monotonic()) + 1 if ends else None

    def _hear(self, line: Line, traffic: _Traffic) -> None:
        try:
            while traffic.sent and (answer := line.receive()) is not None:
                traffic.heard_at = monotonic()
                self._ready.append((traffic.sent.popleft(), answer))
        except Exception as exc:
            self._fail_line(line, exc)
            return
        self._send(line, traffic)
        if not traffic.sent and not traffic.unsent:
            del self._traffic[line]

    def _fail_line(self, line: Line, error: Exception) -> None:
        traffic = self._traffic.pop(line)
        tasks = [*traffic.sent, *(task for task, _ in traffic.unsent)]
        self._ready.extend((task, error) for task in tasks)
        with suppress(Exception):
            line.close()

    def _fail_all(self, error: Exception) -> None:
        for line in list(self._traffic):
            self._fail_line(line, error)


def join_all(threads: Sequence[Thread], seconds: float) -> list[str]:
    """Wait for the threads, at most ``seconds`` in all; return the names of those still running."""
    end = monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - monotonic()))
    return [thread.name for thread in threads if thread.is_alive()]


class Alarm:
    """An eventfd. Thread-safe: after ``close`` it does nothing."""

    def __init__(self, fd: int | None = None) -> None:
        """``fd``: an eventfd, which this object closes; by default a new one."""
        if fd is None:
            fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._fd = fd
        self._lock = Lock()

    def fileno(self) -> int:
        """Return the descriptor; -1 after ``close``."""
        return self._fd

    def set(self) -> None:
        """Wake who waits for it, now or next. Never waits, never raises. Keeps the GIL: the woken
        thread would take it, and return it milliseconds later."""
        with self._lock:  # a closed number may name another file
            if self._fd >= 0:
                _HOLDING_GIL.eventfd_write(self._fd, ctypes.c_uint64(1))  # fails after 2^64 times

    def clear(self) -> None:
        """Forget that it has rung."""
        with suppress(BlockingIOError):  # another thread has done so
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def wait_for(alarms: Sequence[Alarm], seconds: float, *, until_hangup: int = -1) -> bool:
    """Wait at most ``seconds`` until an alarm rings. Those that have rung are cleared. Returns
    False if the other side of the socket ``until_hangup`` has gone, which ends the wait."""
    poll = select.poll()
    for alarm in alarms:
        poll.register(alarm.fileno(), select.POLLIN)
    if until_hangup >= 0:
        poll.register(until_hangup, select.POLLRDHUP)
    ready = dict(poll.poll(max(0.0, 1000 * seconds)))
    for alarm in alarms:
        if alarm.fileno() in ready:
            alarm.clear()
    return until_hangup not in ready
