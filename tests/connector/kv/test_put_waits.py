"""Requests that are held back for a moment, while another node puts what they need."""

from collections.abc import Sequence
from threading import Event

import pytest

from objkv.cache.admission import AdmissionPolicy, ChunkSize, LoadTime
from objkv.connector.kv.scheduler import SchedulerSide
from objkv.connector.pacing import EMPTY_STEP_S
from objkv.index.base import Shards
from objkv.index.fields import COMING
from objkv.index.memory import MemoryIndex
from objkv.telemetry import MemoryRecorder
from tests.contracts.clock import ManualClock
from tests.support.sides import publish_prompt, request, scheduler_side, step
from tests.support.waiting import wait_until

PROMPT = [7] * 70
"""Two whole chunks of 32 tokens."""


class AskingIndex(MemoryIndex):
    """Answers as an agent that has requested every missing chunk of another node."""

    def __init__(self) -> None:
        super().__init__()
        self.gives_up = False
        self.repeated = Event()
        self._asked = 0

    def find(
        self, namespace: str, prefix_hashes: Sequence[bytes], fields: Sequence[str]
    ) -> list[Shards | None]:
        self._asked += 1
        if self._asked > 1:
            self.repeated.set()
        found = super().find(namespace, prefix_hashes, fields)
        return found if self.gives_up else [COMING if one is None else one for one in found]


def count(side: SchedulerSide, name: str) -> float:
    recorder = side._lookups._recorder
    assert isinstance(recorder, MemoryRecorder)
    return recorder.value(name)


def opened(index: MemoryIndex, **settings: object) -> tuple[SchedulerSide, ManualClock]:
    side, clock = scheduler_side(index, load_mode="async", **settings), ManualClock()
    side._put_waits._clock = clock
    return side, clock


def waits(side: SchedulerSide, name: str = "r") -> bool:
    """Whether the request has begun to wait."""
    return side.match(request(PROMPT, name), 0)[0] is None and len(side._put_waits) == 1


def test_a_request_waits_until_its_chunks_have_come() -> None:
    side, _ = opened(index := AskingIndex())
    side.track(one := request(PROMPT))
    wait_until(lambda: waits(side))
    wait_until(lambda: side.match(one, 0)[0] is None and index.repeated.is_set())
    publish_prompt(index, PROMPT)
    wait_until(lambda: side.match(one, 0)[0] is not None)
    assert side.match(one, 0) == (64, True)
    assert (count(side, "put_waits"), count(side, "put_waits_given_up")) == (1, 0)
    assert len(side._put_waits) == 0
    side.close()


def test_a_request_waits_no_longer_than_its_bound_and_only_once() -> None:
    side, clock = opened(AskingIndex())
    side.track(one := request(PROMPT))
    wait_until(lambda: waits(side))
    clock.advance(10)
    wait_until(lambda: side.match(one, 0)[0] is not None)
    assert side.match(one, 0) == (0, False)
    assert (count(side, "put_waits"), count(side, "put_waits_given_up")) == (1, 1)
    clock.advance(10)
    assert side.match(one, 0) == (0, False)
    side.close()


def test_a_request_ends_its_wait_when_nothing_is_coming_any_more() -> None:
    side, _ = opened(index := AskingIndex())
    side.track(one := request(PROMPT))
    wait_until(lambda: waits(side))
    index.gives_up = True
    wait_until(lambda: side.match(one, 0) == (0, False))
    assert count(side, "put_waits_given_up") == 0
    side.close()


@pytest.mark.parametrize(("admission", "computed"), [("always", 64), ("never", 0)])
def test_what_is_computed_or_may_not_be_loaded_is_not_waited_for(
    admission: str, computed: int
) -> None:
    side, _ = opened(AskingIndex(), admission=admission)
    side.track(one := request(PROMPT))
    wait_until(lambda: side.match(one, computed)[0] is not None)
    assert side.match(one, computed) == (0, False)
    assert count(side, "put_waits") == 0
    side.close()


def test_an_empty_step_does_not_spin_while_a_request_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side, _ = opened(AskingIndex())
    waited: list[float] = []
    monkeypatch.setattr(side._lookups, "wait", waited.append)
    side.track(request(PROMPT))
    wait_until(lambda: waits(side))
    side.plan_step(step({}, ()))
    assert waited == [EMPTY_STEP_S]
    side.close()


def test_the_bound_is_what_loading_would_save() -> None:
    policy = AdmissionPolicy("auto", MemoryRecorder())
    assert policy.spare_s(1000, 10.0) is None
    for _ in range(3):
        policy.computed(1000, 1.0)
    assert policy.spare_s(1000, 10.0) == pytest.approx(1.0)
    for _ in range(3):
        policy.loaded("bulk", LoadTime(10_000, 0.3, 0.1))
    assert policy.spare_s(1000, 10.0) == pytest.approx(1.0 - 0.2 - 0.1)
    assert policy.spare_s(1000, 100.0) == 0.0
    assert policy.admit([ChunkSize(100_000, 1000, "bulk")]) in (0, 1)
