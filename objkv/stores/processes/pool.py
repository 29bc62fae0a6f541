"""The fetching processes of an agent: started at the first get, restarted, and ended when idle.

One thread watches them all. Gets never wait for it: without a free lane of a process that is ready,
a get is made in the agent itself.
"""

import os
import select
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import Condition, Lock, Thread
from time import monotonic

from objkv.stores.processes.process import FetchLane, FetchProcess, LaneLost
from objkv.telemetry import Recorder

Report = Callable[[int, object], None]
GRACE_S = 2.0
"""How long a process may still answer after the deadline of a get, before it is killed."""
_READY_S = 60.0
"""How long a process may take to start."""
_JOIN_S = 5.0
_FAULT_S = 1.0
"""Pause of the watching thread after an unexpected fault."""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Bounds of a pool."""

    processes: int
    lanes: int
    """Gets of one process at a time."""
    idle_s: float = 120.0
    """Processes end after this time without a get."""
    restart_s: float = 1.0
    """Shortest time between two starts after a process ended early. It doubles each time."""
    restart_max_s: float = 60.0


class FetchPool:
    """Thread-safe. Only ``close`` waits."""

    def __init__(
        self,
        start: Callable[[int], FetchProcess],
        limits: PoolLimits,
        recorder: Recorder,
        *,
        report: Report = lambda pid, reason: None,
    ) -> None:
        """
        Args:
            start: starts a process with a number of lanes, without waiting for it. Raises
                ``OSError``.
            report: called with the process that was lost, or 0 if none could be started, and with
                the reason.
        """
        self._start, self._limits, self._recorder = start, limits, recorder
        self._report = report
        self._changed = Condition(Lock())
        self._processes: list[FetchProcess] = []
        self._abandoned: list[FetchLane] = []
        self._lost: list[FetchProcess] = []
        self._used_s = monotonic()
        self._pause_s = 0.0
        self._next_start_s = 0.0
        self._closed = False
        self._thread: Thread | None = None
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def take(self) -> FetchLane | None:
        """Return a lane of the process with the fewest gets under way; None if there is none.
        Processes that owe an answer beyond its deadline may hang, and get nothing new."""
        with self._changed:
            if self._closed:
                return None
            self._used_s = monotonic()
            if len(self._processes) < self._limits.processes:
                self._call_watcher()
            now = monotonic()
            late = [one.process for one in self._abandoned if now + GRACE_S >= one.kill_s]
            ready = [
                one for one in self._processes if one.is_ready and one.free and one not in late
            ]
            if not ready:
                return None
            return max(ready, key=lambda one: len(one.free)).free.pop()

    def leave(self, lane: FetchLane, by_s: float) -> None:
        """Give a lane back. If its last answer was not read, it becomes free with that; if that
        does not come soon after ``by_s``, a time of ``monotonic``, the process is killed."""
        with self._changed:
            if lane.process in self._processes:
                if lane.is_owed:
                    lane.kill_s = by_s + GRACE_S
                    self._abandoned.append(lane)
                    self._call_watcher()
                else:
                    lane.process.free.append(lane)
                return
        lane.close()

    def lose(self, lane: FetchLane, reason: object) -> None:
        """Give up a process that has ended or does not follow the protocol, and kill it."""
        with self._changed:
            self._drop(lane.process, reason)
            self._call_watcher()
        lane.close()

    def close(self) -> None:
        """End all processes. Gets under way continue in the agent. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
            self._wake_watcher()
            if thread is None:
                os.close(self._wake)
                self._wake = -1
        if thread is not None:
            thread.join(_JOIN_S)

    def __repr__(self) -> str:
        return f"<FetchPool {len(self._processes)}/{self._limits.processes} processes>"

    def _call_watcher(self) -> None:
        """Have the watcher look at the change. The lock must be held."""
        if self._thread is None:
            thread = Thread(target=self._watch, name="objkv-fetchers", daemon=True)
            with suppress(RuntimeError):  # the machine has no more threads: gets stay here
                thread.start()
                self._thread = thread
        self._wake_watcher()

    def _wake_watcher(self) -> None:
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def _drop(self, process: FetchProcess, reason: object) -> None:
        """Use a process no longer. The lock must be held."""
        if process not in self._processes:
            return
        self._report(process.pid, reason)
        self._recorder.count("fetch_process_losses")
        self._processes.remove(process)
        self._lost.append(process)
        now = monotonic()
        if now - process.born_s < self._limits.restart_max_s:
            longer = max(self._limits.restart_s, 2 * self._pause_s)
            self._pause_s = min(longer, self._limits.restart_max_s)
        else:
            self._pause_s = 0.0
        self._next_start_s = now + self._pause_s

    def _watch(self) -> None:
        """Start, end and kill processes until the pool is closed."""
        while not self._closed:
            try:
                self._bury()
                self._start_missing()
                self._wait(self._next_event_s())
                self._look_at_processes()
                self._look_at_lanes()
            except Exception as exc:  # without this thread, nothing is killed or started any more
                self._report(0, exc)
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, _FAULT_S)
        with self._changed:
            self._lost += self._processes
            self._processes.clear()
            abandoned, self._abandoned = self._abandoned, []
        self._bury()
        for lane in abandoned:
            lane.close()
        with self._changed:
            os.close(self._wake)
            self._wake = -1

    def _next_event_s(self) -> float:
        """Return for how many seconds nothing is due; infinite if nothing ever is."""
        with self._changed:
            due = [lane.kill_s for lane in self._abandoned]
            if self._processes:
                due.append(self._used_s + self._limits.idle_s)
                due += [one.born_s + _READY_S for one in self._processes if not one.is_ready]
            if self._is_short():
                due.append(self._next_start_s)
        return max(0.0, min(due, default=float("inf")) - monotonic())

    def _is_short(self) -> bool:
        """Whether processes should be started: some are missing, and gets were made lately."""
        is_used = monotonic() < self._used_s + self._limits.idle_s
        return len(self._processes) < self._limits.processes and is_used

    def _wait(self, seconds: float) -> None:
        """Wait until something happens, or ``seconds`` have passed."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        with self._changed:
            descriptors = [one.fileno() for one in self._processes]
            descriptors += [one.fileno() for one in self._abandoned]
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        poll.poll(None if seconds == float("inf") else 1e3 * seconds + 1)
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _start_missing(self) -> None:
        while True:
            with self._changed:
                if not self._is_short() or monotonic() < self._next_start_s or self._closed:
                    return
            try:
                process = self._start(self._limits.lanes)
            except Exception as exc:  # no memory, descriptor or process, or no such program
                self._report(0, exc)
                with self._changed:
                    self._pause_s = self._limits.restart_max_s
                    self._next_start_s = monotonic() + self._pause_s
                return
            with self._changed:
                self._processes.append(process)

    def _look_at_processes(self) -> None:
        now = monotonic()
        with self._changed:
            for one in tuple(self._processes):
                if not one.look():
                    self._drop(one, "it ended")
                elif not one.is_ready and now >= one.born_s + _READY_S:
                    self._drop(one, "it did not start")
            if now < self._used_s + self._limits.idle_s:
                return
            if any(len(one.free) < len(one.lanes) for one in self._processes):
                self._used_s = now
            else:
                self._lost += self._processes
                self._processes.clear()

    def _look_at_lanes(self) -> None:
        """Free abandoned lanes that have answered, and drop processes that have not in time."""
        with self._changed:
            lanes = tuple(self._abandoned)
        for lane in lanes:
            reason: object = None
            try:
                while lane.is_owed and lane.read(0.0) is not None:
                    pass
            except LaneLost as exc:
                reason = exc
            if reason is None and lane.is_owed:
                if monotonic() < lane.kill_s:
                    continue
                reason = "it hangs"
            with self._changed:
                self._abandoned.remove(lane)
            if reason is None:
                self.leave(lane, 0.0)
            else:
                self.lose(lane, reason)

    def _bury(self) -> None:
        """Kill the processes that were given up. Their lanes in use are closed by their users."""
        with self._changed:
            lost, self._lost = self._lost, []
        for one in lost:
            one.end()
            for lane in one.free:
                lane.close()
            one.free.clear()
            one.lanes = ()  # lanes refer to their process, and would keep its memory
