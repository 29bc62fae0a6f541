"""Meters: recent throughput and durations, in bounded memory."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from objkv.cache.speed import LinkSpeed, Typical


def test_what_moved_nothing_or_took_no_time_says_nothing() -> None:
    typical = Typical()
    for nbytes, seconds in ((0, 1.0), (-1, 1.0), (1, 0.0), (1, -1.0), (1, float("nan"))):
        typical.observe(nbytes, seconds)
    assert (typical.count, typical.seconds_per_unit) == (0, None)


def test_many_threads_may_observe_at_once() -> None:
    typical = Typical()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: typical.observe(100, 0.1), range(500)))
    assert (typical.count, typical.seconds_per_unit) == (500, pytest.approx(0.001))


def test_a_link_is_as_fast_as_its_gets_once_a_few_were_seen() -> None:
    link = LinkSpeed()
    assert link.bytes_per_s is None
    link.puts.observe(100, 1.0)
    for _ in range(7):
        link.gets.observe(300, 1.0)
    assert link.bytes_per_s == pytest.approx(100)
    link.gets.observe(300, 1.0)
    assert link.bytes_per_s == pytest.approx(300)


def test_what_is_typical_is_a_median_of_the_last_few() -> None:
    typical = Typical()
    for seconds in (9.0, 9.0, *(1.0, 2.0, 300.0) * 3):
        typical.observe(1, seconds)
    assert typical.seconds_per_unit == 2.0
    assert typical.count == 11


def test_larger_work_is_more_typical_but_one_piece_is_never_all_of_it() -> None:
    typical = Typical()
    for units, seconds in ((1, 1.0), (1, 1.0), (3, 6.0)):
        typical.observe(units, seconds)
    assert typical.seconds_per_unit == 2.0
    for _ in range(5):
        typical.observe(1, 1.0)
    typical.observe(1_000_000, 1e9)
    assert typical.seconds_per_unit == 1.0
