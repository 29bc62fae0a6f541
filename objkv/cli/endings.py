"""What was started ends in order, also when a command is asked to end."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Within the block, being asked to end ends what was started, as Ctrl-C does."""

    def end(number: int, _frame: Any) -> None:
        sys.exit(128 + number)

    old = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
