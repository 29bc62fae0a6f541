"""Sides take turns, and each is compared with what was measured beside it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objkv.ops.bench.harness import Compared, Target, Timings, Work, interleave, percentile


def test_every_second_round_runs_in_the_opposite_order() -> None:
    order: list[str] = []

    def side(name: str) -> Work:
        def work() -> float:
            order.append(name)
            return 1.0

        return work

    interleave({"a": side("a"), "b": side("b")}, 3, warm_ups=1)
    assert "".join(order) == "abbaabba"


def test_warm_ups_are_not_counted() -> None:
    seconds = iter([9.0, 1.0, 2.0])
    timings = interleave({"a": lambda: next(seconds)}, 2, warm_ups=1)
    assert timings.seconds == {"a": [1.0, 2.0]}


def test_the_ratio_is_the_median_of_the_rounds_own() -> None:
    """A machine that was slow in one round was slow for both sides."""
    timings = Timings({"ours": [1.0, 10.0, 3.0], "limit": [0.5, 5.0, 1.5]})
    assert timings.ratio("ours", "limit") == 2.0
    row = Compared(timings, "ours", "limit", "memcpy").throughput("x", 6_000_000_000)
    assert (row.ours, row.limit, row.ratio) == (2.0, 4.0, 0.5)


def test_a_duration_is_longer_where_a_throughput_is_smaller() -> None:
    timings = Timings({"ours": [2e-6], "limit": [1e-6]})
    row = Compared(timings, "ours", "limit", "PING").duration("x", "µs", Target(8, at_most=True))
    assert (row.ours, row.limit, row.ratio) == pytest.approx((2.0, 1.0, 2.0))
    assert row.ok


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_a_percentile_is_one_of_the_values_and_enough_do_not_exceed_it(
    values: list[float], share: float
) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-6


def test_percentiles_of_a_hundred_values() -> None:
    values = [float(number) for number in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.95, 0.99, 1.0)] == [50, 95, 99, 100]
