"""Who is asked next, and who is left alone."""

from dataclasses import dataclass

import pytest

from objkv.ops.warm.fleet import PrefillFleet
from objkv.ops.warm.prefill import PrefillError, PrefillReply, PrefillRequest
from objkv.ops.warm.prompts import WarmPrompt
from tests.contracts.clock import ManualClock


@dataclass
class Nobody:
    """Is never really asked."""

    name: str
    at_once: int = 2

    def check(self) -> None: ...

    def tokenize(self, prompt: WarmPrompt) -> list[int]:
        return []

    def ask(self, ask: PrefillRequest) -> PrefillReply:
        return PrefillReply(None)

    def close(self) -> None: ...


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def fleet(clock: ManualClock) -> PrefillFleet:
    return PrefillFleet([Nobody("one"), Nobody("two")], clock=clock, first_pause_s=1.0)


def taken(fleet: PrefillFleet, root: bytes) -> str:
    return fleet.take(root).asker.name


def test_prompts_of_one_tree_go_to_the_same_one_while_it_has_room(fleet: PrefillFleet) -> None:
    first, second = taken(fleet, b"a"), taken(fleet, b"b")
    assert {first, second} == {"one", "two"}
    assert (taken(fleet, b"a"), taken(fleet, b"b")) == (first, second)
    assert not fleet.has_room()


def test_when_its_own_is_full_a_prompt_goes_to_another(fleet: PrefillFleet) -> None:
    names = [taken(fleet, b"a") for _ in range(4)]
    assert sorted(names) == ["one", "one", "two", "two"]


def test_one_that_does_not_answer_is_left_to_the_others_until_it_passes_a_check(
    fleet: PrefillFleet, clock: ManualClock
) -> None:
    seat = fleet.take(b"a")
    fleet.failed(seat, PrefillError("down", "refused"))
    assert {taken(fleet, b"a"), taken(fleet, b"a")} == {"one", "two"} - {seat.asker.name}
    assert not fleet.has_room()
    clock.advance(0.9)
    assert fleet.to_check() == []
    clock.advance(0.2)
    assert fleet.to_check() == [seat]
    assert not fleet.has_room()  # not before it has passed
    fleet.passed(seat)
    assert fleet.take(b"a") is seat
