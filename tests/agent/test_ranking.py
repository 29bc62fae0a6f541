from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

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


def test_a_scan_leaves_what_is_read() -> None:
    ranking = full("a", "b", "c", "d")
    ranking.use("a")
    for number in range(50):
        evicted(ranking)
        ranking.add(f"scan-{number}", 25)
    assert "a" in ranking


def test_a_payload_that_comes_back_is_not_on_probation() -> None:
    ranking = full("a", "b", "c", "d")
    assert evicted(ranking) == "a"
    ranking.add("a", 25)
    for number in range(20):
        evicted(ranking)
        ranking.add(f"scan-{number}", 25)
    assert "a" in ranking


def test_a_prefetched_payload_has_to_prove_itself() -> None:
    ranking = full("a", "b", "c", "d")
    assert evicted(ranking) == "a"
    ranking.add("a", 25, is_unread=True)  # it was evicted before, which alone is no merit
    for number in range(3):
        evicted(ranking)
        ranking.add(f"scan-{number}", 25)
    assert evicted(ranking) == "a"


def test_what_was_never_read_is_new_when_it_comes_back() -> None:
    ranking = full("a", "b", "c", "d")
    ranking.remove("a", was_read=False)
    ranking.add("a", 25)
    for number in range(3):
        evicted(ranking)
        ranking.add(f"scan-{number}", 25)
    assert evicted(ranking) == "a"


def test_leased_payloads_are_skipped() -> None:
    ranking = full("a", "b", "c", "d")
    assert ranking.victim(lambda key: key in "cd") == "c"
    assert ranking.victim(lambda key: False) is None
    assert len(ranking) == 4


@given(st.lists(st.tuples(st.sampled_from("arve"), st.integers(0, 12)), max_size=200))
def test_it_ranks_exactly_what_it_was_given(steps: list[tuple[str, int]]) -> None:
    ranking, known = Ranking(NBYTES), dict[str, int]()
    for step, number in steps:
        key = str(number)
        if step == "a" and key not in known:
            ranking.add(key, 1 + number)
            known[key] = 1 + number
        elif step == "r" and key in known:
            ranking.use(key)
        elif step == "v":
            ranking.remove(key)
            known.pop(key, None)
        elif step == "e":
            free = set(list(known)[::2])
            victim = ranking.victim(free.__contains__)
            assert victim in free if free else victim is None
        assert len(ranking) == len(known)
        assert all(key in ranking for key in known)
        assert ranking._new.nbytes + ranking._main.nbytes == sum(known.values())
        assert ranking._gone_bytes == sum(ranking._gone.values()) <= NBYTES
