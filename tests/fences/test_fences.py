"""No copy touches what has changed hands, at whatever moment a replica is disturbed; and whoever
takes one of the fences away is found out."""

import gc
from collections.abc import Iterator

import pytest

from tests.device.mutants import MUTANTS, Mutant
from tests.fences.device import WatchedPool
from tests.fences.explorer import WORLDS, Found, Tally, listening, play_seed, play_situations
from tests.fences.lives import EVENTS

SEEDS = range(1, 26)
STRIDE = 811
"""Of interleavings with one preemption, one of so many; ``python -m tests.fences`` plays all."""
LONG_EVENTS = frozenset({"abort", "finish", "lost", "preempt", "sleep", "update"})
"""They meet the most interleavings: two seconds and more of a processor."""
STRIDES = (29, 11, 3, 1)
"""Most mutants are found by few interleavings; the others are looked for more densely."""


@pytest.fixture(autouse=True, scope="module")
def _listening() -> Iterator[None]:
    gc.collect()  # pools that other tests left log an error when they are freed
    with listening():
        yield
    WatchedPool.begin()  # their outboxes would stay open


@pytest.mark.parametrize(
    "event", [pytest.param(e, marks=pytest.mark.slow if e in LONG_EVENTS else ()) for e in EVENTS]
)
def test_no_event_at_any_time_breaks_a_fence(event: str) -> None:
    tally = Tally()
    for _ in play_situations(preemptions=1, tally=tally, stride=STRIDE, only=f" {event} "):
        pass
    assert tally.plays > 20
    assert tally.copies > 0


def test_no_life_at_random_breaks_a_fence() -> None:
    tally = Tally()
    for seed in SEEDS:
        play_seed(seed, tally)
    assert tally.copies > 100


@pytest.mark.parametrize("mutant", [pytest.param(m, id=m.name) for m in MUTANTS if m.situation])
def test_a_fence_that_is_missing_is_found(mutant: Mutant) -> None:
    with mutant.applied(), pytest.raises(Found) as found:
        _look(mutant)
    assert not isinstance(found.value.__cause__, (AttributeError, NameError, TypeError))


def _look(mutant: Mutant) -> None:
    worlds = [WORLDS[mutant.world]]
    for stride in STRIDES:
        for _ in play_situations(
            preemptions=1, tally=Tally(), stride=stride, only=mutant.situation, worlds=worlds
        ):
            pass
