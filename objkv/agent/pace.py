"""How many fetching threads work at once: few with a quick store, all with a slow one.

Half as many threads as CPU cores begin at once. A payload that takes at least twice its usual CPU
time is waiting for the store, so another thread may begin. If the one that ended last was slow, all
threads may. With a store that keeps the cores busy, more threads only contend: 2 MiB from S3 on the
same two cores took 0.9 ms of CPU time with one thread and 2.5 ms with eight, each waiting for the
interpreter's lock (2026-11).
"""

import os
from threading import get_ident
from time import monotonic

_PATIENCE_MIN_S = 3e-4
_USUAL_TASKS = 8
"""Decay of the average CPU time: a task this many tasks ago has a third of the newest's weight."""


class Pace:
    """Not thread-safe: its owner's lock guards it."""

    def __init__(self, eager: int | None = None) -> None:
        """``eager``: how many threads work at once, by default half the number of CPU cores."""
        self._eager = eager or max(1, _processors() // 2)
        self._usual_s = 0.0
        self._begun: dict[int, tuple[float, float]] = {}
        """When each busy thread began, and its payload's deadline, by thread id."""
        self._progress = 0.0

    def all_late(self, threads: int) -> bool:
        """Whether all ``threads`` work beyond their payloads' deadlines. Then a file system hangs,
        its calls cannot be cancelled, and to queue more is pointless."""
        if len(self._begun) < threads:
            return False
        now = monotonic()
        return all(deadline < now for _, deadline in self._begun.values())

    def may_begin(self) -> bool:
        """Whether another thread may begin."""
        since = monotonic() - self._patience_s()
        return self._progress <= since or self._eager > sum(
            begun > since for begun, _ in self._begun.values()
        )

    def wait_s(self) -> float:
        """Return when to ask again, if nothing ends before."""
        first = min((begun for begun, _ in self._begun.values()), default=self._progress)
        late = min(first, self._progress) + self._patience_s()
        left = late - monotonic()
        return left if left > 0 else self._patience_s()

    def begin(self, deadline: float) -> None:
        """The calling thread begins to fetch a payload."""
        now = monotonic()
        if not self._begun:
            self._progress = now
        self._begun[get_ident()] = now, deadline

    def end(self, busy_s: float) -> None:
        """The calling thread has ended, with or without success. ``busy_s``: its CPU time."""
        now = monotonic()
        begun, _ = self._begun.pop(get_ident())
        if now - begun < self._patience_s():
            self._progress = now
        self._usual_s += (busy_s - self._usual_s) / _USUAL_TASKS

    def _patience_s(self) -> float:
        return max(_PATIENCE_MIN_S, 2 * self._usual_s)


def _processors() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
