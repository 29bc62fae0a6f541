"""``Burst``: several close to each other are one, few or far between are none."""

from hypothesis import given
from hypothesis import strategies as st

from objkv.net.breaker import Burst


def test_so_many_close_to_each_other_are_a_burst_and_the_next_begins_anew() -> None:
    burst = Burst(3, seconds=3.0, calls=30)
    assert [burst.add(0.0, n) for n in range(7)] == [False, False, True, False, False, True, False]


def test_what_is_far_apart_in_time_or_in_calls_is_none() -> None:
    burst = Burst(3, seconds=3.0, calls=30)
    assert not any(burst.add(n * 1.6, n) for n in range(100))
    burst = Burst(3, seconds=3.0, calls=30)
    assert not any(burst.add(0.0, n * 16) for n in range(100))


@given(st.lists(st.tuples(st.floats(0.0, 4.0), st.integers(0, 40)), max_size=50))
def test_each_burst_has_its_own_within_the_bounds(steps: list[tuple[float, int]]) -> None:
    burst, now_s, number = Burst(3, seconds=3.0, calls=30), 0.0, 0
    since: list[tuple[float, int]] = []
    for wait_s, calls in steps:
        now_s, number = now_s + wait_s, number + calls
        since.append((now_s, number))
        close = len(since) >= 3 and now_s - since[-3][0] <= 3.0 and number - since[-3][1] <= 30
        assert burst.add(now_s, number) == close
        if close:
            since = []
