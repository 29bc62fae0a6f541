"""A test that takes long without the marker ``slow`` fails in CI.

`make test` is for minutes; what takes longer is for `make test-all`. The rule is two seconds on a
quiet machine. Machines of CI are not quiet, and a core whose other half is busy does half the work
in a second of processor time, so only what is far over that is refused: by processor time, and by
the clock for tests that only wait.
"""

import os
import time
from collections.abc import Generator

import pytest

PROCESSOR_S = 4.0
CLOCK_S = 30.0
EXEMPT = "tests/smoke/"
"""The few real engines that `make test` starts."""


class Durations:
    """Adds a failure to the teardown of a test that was too long."""

    def __init__(self) -> None:
        self._began = (0.0, 0.0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """The clocks start before any fixture."""
        self._began = _clocks()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None]:
        """And stop after all of them."""
        yield
        processor, clock = (now - then for now, then in zip(_clocks(), self._began, strict=True))
        is_slow = item.get_closest_marker("slow") or item.nodeid.startswith(EXEMPT)
        if not is_slow and (processor > PROCESSOR_S or clock > CLOCK_S):
            pytest.fail(
                f"{processor:.1f} s of processor time in {clock:.1f} s without the marker `slow`",
                pytrace=False,
            )


def _clocks() -> tuple[float, float]:
    return time.process_time(), time.monotonic()


def register(config: pytest.Config) -> None:
    """Only in CI: elsewhere a slow machine would make a sound suite fail."""
    if os.environ.get("CI"):
        config.pluginmanager.register(Durations(), "objkv-durations")
