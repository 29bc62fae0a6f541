"""Which payloads become hot: small ones at once, larger ones when they are loaded often."""

from dataclasses import replace

import pytest

from objkv.cache.promotion import HOUR_S, HotLimits, OftenLoaded, belongs_in_hot
from tests.contracts.clock import ManualClock

LIMITS = HotLimits(
    payload_bytes_max=1000, save_bytes_max=100, promote_loads=3, promote_bytes_max=2000
)


@pytest.mark.parametrize(
    ("payload_max", "save_max", "nbytes", "hot"),
    [
        (1000, 100, 100, True),
        (1000, 100, 101, False),
        (50, 100, 51, False),
        (0, 100, 1, False),
        (1000, 0, 1, False),
    ],
)
def test_what_is_hot_at_once_is_small_enough_for_both_limits(
    payload_max: int, save_max: int, nbytes: int, hot: bool
) -> None:
    limits = replace(LIMITS, payload_bytes_max=payload_max, save_bytes_max=save_max)
    assert belongs_in_hot(nbytes, limits) is hot


def often(**changes: int) -> tuple[OftenLoaded, ManualClock]:
    clock = ManualClock()
    return OftenLoaded(replace(LIMITS, **changes), clock=clock), clock


def test_the_third_load_within_an_hour_makes_a_payload_hot_and_the_fourth_does_not_again() -> None:
    loads, _ = often()
    assert [loads.note("a", 10) for _ in range(6)] == [False, False, True, False, False, False]
    assert not loads.note("b", 10)


def test_loads_of_another_hour_do_not_count() -> None:
    loads, clock = often()
    assert [loads.note("a", 10) for _ in range(2)] == [False, False]
    clock.advance(HOUR_S)
    assert [loads.note("a", 10) for _ in range(3)] == [False, False, True]


def test_a_payload_above_the_cap_never_becomes_hot() -> None:
    loads, _ = often(promote_loads=1)
    assert not loads.note("a", 1001)
    assert loads.note("b", 1000)


def test_no_budget_promotes_nothing() -> None:
    loads, _ = often(promote_loads=1, promote_bytes_max=0)
    assert not loads.note("a", 1)


def test_no_hour_promotes_more_than_its_budget_and_what_waits_comes_next() -> None:
    loads, clock = often(promote_loads=1)
    assert loads.note("a", 1000)
    clock.advance(HOUR_S / 2)
    assert loads.note("b", 1000)
    assert not loads.note("c", 1)
    clock.advance(HOUR_S / 2 + 60)
    assert loads.note("c", 1000)
    assert not loads.note("d", 1)


def test_what_could_not_be_copied_is_counted_anew() -> None:
    loads, _ = often()
    assert [loads.note("a", 10) for _ in range(3)] == [False, False, True]
    loads.forget("a")
    assert [loads.note("a", 10) for _ in range(3)] == [False, False, True]


def test_the_counts_take_bounded_memory() -> None:
    loads, _ = often()
    for i in range(70_000):
        loads.note(str(i), 1)
    assert len(loads._loads) == 65_536
    loads, clock = often(promote_loads=1, promote_bytes_max=1_000)
    for i in range(10_000):
        clock.advance(1.0)
        loads.note(f"again {i}", 1)
    assert len(loads._spent) <= 62
