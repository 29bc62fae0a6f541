"""Waiting for what other threads and processes do."""

import time
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 120.0
"""For other threads to come, on a machine that is busy with other things."""
SERVER_PAUSE_S = 0.02
"""Between looks at a server, which cost it something."""


def wait_until(
    condition: Callable[[], bool],
    what: str = "it",
    *,
    bound_s: float = PATIENCE_S,
    pause_s: float = 0.001,
) -> None:
    assert wait_for(condition, bound_s=bound_s, pause_s=pause_s), f"waited {bound_s:g} s for {what}"


def wait_for(
    condition: Callable[[], bool], *, bound_s: float = 30.0, pause_s: float = 0.001
) -> bool:
    """Whether it came in time."""
    end = time.monotonic() + bound_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(pause_s)
    return True


wait_for_server = partial(wait_until, pause_s=SERVER_PAUSE_S)


def at_once(call: Callable[[], T], seconds_max: float = 20.0) -> T:
    """What ``call`` returns, which must not wait for anything that has not come."""
    found: list[T] = []
    thread = Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(seconds_max)
    assert not thread.is_alive(), "it waits"
    return found[0]
