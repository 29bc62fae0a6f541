"""Alarms: what wakes a thread that waits for several things at once, in this process or another."""

import os
import select
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock


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

    def ring(self) -> None:
        """Wake who waits for it, now or next. Never waits, never raises."""
        with self._lock:  # a closed number may name another file
            if self._fd >= 0:
                with suppress(BlockingIOError):  # it has rung 2^64 times, which is enough
                    os.eventfd_write(self._fd, 1)

    def calm(self) -> None:
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
    """Wait until an alarm rings, for at most ``seconds``. Those that have rung are calmed.

    Returns False if the other side of the socket ``until_hangup`` has gone, which ends the wait.
    """
    poll = select.poll()
    for alarm in alarms:
        poll.register(alarm.fileno(), select.POLLIN)
    if until_hangup >= 0:
        poll.register(until_hangup, select.POLLRDHUP)
    ready = {fd for fd, _ in poll.poll(max(0.0, 1000 * seconds))}
    for alarm in alarms:
        if alarm.fileno() in ready:
            alarm.calm()
    return until_hangup not in ready
