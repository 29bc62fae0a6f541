"""Guards for tests: by default of a store, and as lenient as possible."""

from typing import Any

from objkv.net.breaker import Breakers, Patience
from objkv.net.guard import Guard, Slots
from objkv.stores.guarded import STORE_VERBS
from objkv.telemetry import NullRecorder, Recorder


def guard_of(
    name: str = "bulk",
    recorder: Recorder | None = None,
    *,
    breakers: Breakers | None = None,
    slots: tuple[int, float] | None = None,
    verbs: Any = STORE_VERBS,
    **options: Any,
) -> Guard:
    recorder = recorder or NullRecorder()
    breakers = breakers or Breakers(name, Patience(), NullRecorder())
    return Guard(name, verbs, recorder, breakers, slots=slots and Slots(*slots), **options)
