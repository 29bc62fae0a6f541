"""How programs that serve until they are stopped end."""

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager


class EndSignal:
    """Set by a signal, and then for ever. Not an ``Event``: its lock may be held by the very thread
    that the signal interrupts."""

    def __init__(self, fd: int) -> None:
        """``fd``: an eventfd, which the caller closes."""
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def wait(self, timeout: float | None = None, /) -> bool:
        """Wait for it, for at most ``timeout`` seconds. Returns whether it has come."""
        return bool(self._poll.poll(None if timeout is None else 1000 * timeout))


@contextmanager
def end_signals() -> Iterator[EndSignal]:
    """What SIGTERM (Kubernetes, systemd) and Ctrl-C set. A process that ignores SIGINT keeps
    ignoring it."""
    fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        numbers.append(signal.SIGINT)

    def end(*_: object) -> None:
        os.eventfd_write(fd, 1)

    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield EndSignal(fd)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(fd)
