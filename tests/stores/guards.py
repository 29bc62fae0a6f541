"""What tests of stores and of indexes share: lenient guards, and calls that must end."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from objkv.net.breaker import BreakerLimits, Breakers
from objkv.net.guard import Guard
from objkv.stores.guarded import STORE_VERBS
from objkv.telemetry import NullRecorder, Recorder

PATIENCE_S = 60.0
"""Far more than any deadline, but less than the calls would take without one."""


def guard_of(
    name: str = "bulk",
    recorder: Recorder | None = None,
    *,
    breakers: Breakers | None = None,
    verbs: Any = STORE_VERBS,
    **options: Any,
) -> Guard:
    recorder = recorder or NullRecorder()
    breakers = breakers or Breakers(name, BreakerLimits(), NullRecorder())
    return Guard(name, verbs, recorder, breakers, **options)


def assert_all_end(
    calls: Mapping[str, tuple[Callable[[Any], object], object]], error: type[Exception]
) -> None:
    """Each call of its store, all at once, raises ``error``, and before long."""
    outcomes: dict[str, object] = {}

    def run(name: str) -> None:
        call, store = calls[name]
        try:
            outcomes[name] = call(store)
        except BaseException as exc:
            outcomes[name] = exc

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert outcomes.keys() == calls.keys(), f"these go on: {calls.keys() - outcomes.keys()}"
    assert {k: v for k, v in outcomes.items() if not isinstance(v, error)} == {}
