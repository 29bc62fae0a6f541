"""Which requests are followed, and how long one waits for what is read in the background."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from objkv.cache.lookup import LookupLimits, LookupService
from objkv.connector.kv.requests import RequestTracker
from objkv.connector.model.groups import Geometry
from objkv.index.memory import MemoryIndex
from objkv.keys.identity import GroupIdentity
from objkv.telemetry import MemoryRecorder
from objkv.testing.clock import ManualClock

NAMESPACE = "0" * 32
GROUP = GroupIdentity("full", None, ("l0",), heads=1, content=8, block_size=32)
FIELDS = ["0.L0-1_H0-1"]
DEADLINE_S = 0.5


def request(**more: Any) -> Any:
    """What is read of vLLM's request."""
    plain = {"request_id": "r", "all_token_ids": [7] * 64, "lora_request": None}
    plain |= {"cache_salt": None, "mm_features": [], "prompt_embeds": None, "resumable": False}
    return SimpleNamespace(**(plain | more))


def adapter(*, in_place: bool = False) -> Any:
    return SimpleNamespace(lora_path="/nowhere", lora_int_id=1, load_inplace=in_place)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def lookups(clock: ManualClock) -> Iterator[LookupService]:
    limits = LookupLimits(DEADLINE_S, queue_max=8)
    service = LookupService(MemoryIndex(), FIELDS, MemoryRecorder(), limits, clock=clock)
    yield service
    service.close()


@pytest.fixture
def tracker(lookups: LookupService) -> RequestTracker:
    return RequestTracker(Geometry((GROUP,), 32, 32, tp_size=1), lookups, MemoryRecorder())


def test_a_session_whose_prompt_changes_while_it_runs_is_left_alone(
    tracker: RequestTracker,
) -> None:
    """vLLM takes tokens back and adds images to it; hashes made before would name other KV."""
    tracked = tracker.add(request(resumable=True), NAMESPACE)
    assert (tracked.may_load, tracked.may_save) == (False, False)
    assert tracker.records(tracked) == ()


def test_an_adapter_that_was_replaced_in_place_is_not_shared(tracker: RequestTracker) -> None:
    """Its file says what it is now, not what blocks in this engine were computed with."""
    tracked = tracker.add(request(lora_request=adapter(in_place=True)), NAMESPACE)
    assert (tracked.may_load, tracked.may_save) == (False, False)
    assert tracker.records(tracked) == ()


def test_nobody_waits_for_an_adapter_longer_than_for_a_lookup(
    lookups: LookupService, clock: ManualClock
) -> None:
    """Its folder may hang, or be large."""
    cast("Any", lookups).submit = lambda _job: True
    tracker = RequestTracker(Geometry((GROUP,), 32, 32, tp_size=1), lookups, MemoryRecorder())
    tracked = tracker.add(request(lora_request=adapter()), NAMESPACE)
    assert tracker.records(tracked) is None
    clock.advance(DEADLINE_S + 0.1)
    assert tracker.records(tracked) == ()
    assert tracked.may_save
