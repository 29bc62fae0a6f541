"""Sides take turns, and each is compared with what was measured beside it."""

import pytest

from benchmarks.harness import (
    BenchRow,
    Compared,
    Section,
    Target,
    Timings,
    Work,
    interleave,
)


def test_every_second_round_runs_in_the_opposite_order_and_warm_ups_do_not_count() -> None:
    order: list[str] = []

    def side(name: str) -> Work:
        def work() -> float:
            order.append(name)
            return float(len(order))

        return work

    timings = interleave({"a": side("a"), "b": side("b")}, 3, warm_ups=1)
    assert "".join(order) == "abbaabba"
    assert timings.seconds["a"] == [4, 5, 8]


def test_the_ratio_is_the_median_of_the_rounds_own() -> None:
    """A machine that was slow in one round was slow for both sides."""
    timings = Timings({"ours": [1.0, 10.0, 3.0], "limit": [0.5, 5.0, 1.5]})
    compared = Compared(timings, "ours", "limit", "memcpy")
    row = compared.throughput("x", 6_000_000_000)
    assert (row.ours, row.limit, row.ratio) == (2.0, 4.0, 0.5)
    row = compared.duration("x", "µs", Target(8, at_most=True))
    assert (row.ours, row.limit, row.ratio, row.ok) == (3e6, 1.5e6, 2.0, True)


@pytest.mark.parametrize(
    ("target", "ok"),
    [
        (None, None),
        (Target(0.85), True),
        (Target(0.95), False),
        (Target(0.95, at_most=True), True),
        (Target(100, at_most=True, of="ours"), True),
        (Target(40, at_most=True, of="ours"), False),
    ],
)
def test_a_section_counts_the_rows_that_miss(target: Target | None, ok: bool | None) -> None:
    row = BenchRow("x", "µs", 50.0, limit=55.0, ratio=0.9, target=target)
    assert row.ok is ok
    assert Section("s", (row,), {}).missed == (ok is False)
