from collections.abc import Callable

import pytest

from objkv.agent.ranking import Ranking

NBYTES = 100


def full(*keys: str) -> Ranking:
    ranking = Ranking(NBYTES)
    for key in keys:
        ranking.add(key, NBYTES // len(keys))
    return ranking


def evicted(ranking: Ranking, is_free: Callable[[str], bool] = lambda _: True) -> str | None:
    key = ranking.victim(is_free)
    if key is not None:
        ranking.remove(key)
    return key


def test_unread_payloads_go_first_in_their_order() -> None:
    ranking = full("a", "b", "c", "d")
    ranking.use("a")
    assert [evicted(ranking) for _ in range(2)] == ["b", "c"]
    assert {evicted(ranking), evicted(ranking)} == {"a", "d"}
    assert evicted(ranking) is None


def read(ranking: Ranking) -> None:
    ranking.use("a")


def comes_back(ranking: Ranking, **more: bool) -> None:
    assert evicted(ranking) == "a"
    ranking.add("a", 25, **more)


def comes_back_prefetched(ranking: Ranking) -> None:
    comes_back(ranking, is_unread=True)  # it was evicted before, which alone is no merit


def comes_back_never_read(ranking: Ranking) -> None:
    ranking.remove("a", was_read=False)
    ranking.add("a", 25)


@pytest.mark.parametrize(
    ("happens", "stays"),
    [
        (read, True),
        (comes_back, True),
        (comes_back_prefetched, False),
        (comes_back_never_read, False),
    ],
)
def test_a_scan_leaves_what_has_proved_itself(
    happens: Callable[[Ranking], None], stays: bool
) -> None:
    ranking = full("a", "b", "c", "d")
    happens(ranking)
    for number in range(20):
        evicted(ranking)
        ranking.add(f"scan-{number}", 25)
    assert ("a" in ranking) == stays
