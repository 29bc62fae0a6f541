"""Requests that are held back for a moment, while another node puts what they need."""

from collections.abc import Iterator, Sequence
from threading import Event
from typing import Any

import pytest

from objkv.cache.admission import AdmissionPolicy, ChunkSize, LoadTime
from objkv.connector.pacing import EMPTY_STEP_S
from objkv.index.base import Shards
from objkv.index.fields import COMING
from objkv.index.memory import MemoryIndex
from objkv.telemetry import MemoryRecorder
from tests.contracts.clock import ManualClock
from tests.support.sides import ask, publish_prompt, request, scheduler_side, step
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


class World:
    """A side whose requests may wait for what another node puts."""

    def __init__(self, **settings: Any) -> None:
        self.index, self.clock, self.recorder = AskingIndex(), ManualClock(), MemoryRecorder()
        self.side = scheduler_side(
            self.index, recorder=self.recorder, **({"load_mode": "async"} | settings)
        )
        self.side._put_waits._clock = self.clock

    def begin(self) -> Any:
        """A request that has begun to wait."""
        self.side.track(one := request(PROMPT))
        wait_until(
            lambda: self.side.match(one, 0)[0] is None and self.recorder.value("put_waits") == 1
        )
        return one

    def answer(self, one: Any) -> tuple[int | None, bool]:
        wait_until(lambda: self.side.match(one, 0)[0] is not None)
        return self.side.match(one, 0)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.side.close()


def test_a_request_waits_until_its_chunks_have_come(world: World) -> None:
    one = world.begin()
    wait_until(lambda: world.side.match(one, 0)[0] is None and world.index.repeated.is_set())
    publish_prompt(world.index, PROMPT)
    assert world.answer(one) == (64, True)
    assert world.recorder.value("put_waits_given_up") == 0


def test_a_request_waits_no_longer_than_its_bound_and_only_once(world: World) -> None:
    one = world.begin()
    world.clock.advance(10)
    assert world.answer(one) == (0, False)
    world.clock.advance(10)
    assert world.side.match(one, 0) == (0, False)
    assert world.recorder.value("put_waits") == world.recorder.value("put_waits_given_up") == 1


def test_a_request_ends_its_wait_when_nothing_is_coming_any_more(world: World) -> None:
    one = world.begin()
    world.index.gives_up = True
    assert world.answer(one) == (0, False)
    assert world.recorder.value("put_waits_given_up") == 0


@pytest.mark.parametrize(("admission", "computed"), [("always", 64), ("never", 0)])
def test_what_is_computed_or_may_not_be_loaded_is_not_waited_for(
    admission: str, computed: int
) -> None:
    world = World(admission=admission)
    assert ask(world.side, request(PROMPT), computed) == (0, False)
    assert world.recorder.value("put_waits") == 0
    world.side.close()


def test_an_empty_step_does_not_spin_while_a_request_waits(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(world.side._lookups, "wait", waited.append)
    world.begin()
    world.side.plan_step(step({}, ()))
    assert waited == [EMPTY_STEP_S]


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
