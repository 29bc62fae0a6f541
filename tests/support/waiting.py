"""Waiting for what other threads and processes do."""

import time
from collections.abc import Callable

PATIENCE_S = 120.0
"""For other threads to come, on a machine that is busy with other things."""


def wait_until(condition: Callable[[], bool], seconds_max: float = PATIENCE_S) -> None:
    """Poll for something that other threads do."""
    end = time.monotonic() + seconds_max
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.001)
