"""How programs that serve until they are stopped end."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def end_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM (Kubernetes, systemd) and Ctrl-C set. A process that ignores SIGINT
    keeps ignoring it."""
    ended = threading.Event()
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        numbers.append(signal.SIGINT)
    before = {number: signal.signal(number, lambda *_: ended.set()) for number in numbers}
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
