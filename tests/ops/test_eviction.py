"""The choice of chunks to evict: last chunks first, nothing pinned, enough but not much more, in
any order."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objkv.ops.sweep import eviction
from objkv.ops.sweep.eviction import Candidate, by_use, choose, usual_pause_s

NOW_S = 1_000_000
SIZE = 256


def name(number: int) -> bytes:
    return number.to_bytes(20, "big")


@st.composite
def forests(draw: st.DrawFn) -> list[Candidate]:
    """Chains that fork, some without their beginnings, some pinned."""
    count = draw(st.integers(0, 24))
    starts: list[int] = []
    out = []
    for number in range(count):
        parent = draw(st.integers(-2, number - 1))  # -1: the first of a prompt; -2: it is gone
        start = {-1: 0, -2: 5 * SIZE}.get(parent, starts[parent] + SIZE if parent >= 0 else 0)
        starts.append(start)
        out.append(
            Candidate(
                prefix_hash=name(number),
                parent_hash=name(parent) if parent >= 0 else b"\xff" * 20,
                token_start=start,
                token_end=start + SIZE,
                nbytes=draw(st.integers(0, 50)),
                hits=draw(st.integers(0, 5)),
                touched_s=draw(st.integers(0, 2 * NOW_S)),
                created_s=draw(st.integers(0, 2 * NOW_S)),
                pinned=draw(st.integers(0, 9)) == 0,
            )
        )
    return out


def ancestors(one: Candidate, known: dict[bytes, Candidate]) -> set[bytes]:
    found = set()
    while (parent := known.get(one.parent_hash)) is not None:
        found.add(parent.prefix_hash)
        one = parent
    return found


def pinned_with_ancestors(candidates: Sequence[Candidate]) -> set[bytes]:
    known = {one.prefix_hash: one for one in candidates}
    kept = set()
    for one in candidates:
        if one.pinned:
            kept |= {one.prefix_hash} | ancestors(one, known)
    return kept


@given(forests(), st.integers(-5, 1_000), st.integers(-5, 1_000))
def test_enough_goes_ends_first_and_nothing_pinned_nor_what_it_continues(
    candidates: list[Candidate], free_bytes: int, other_bytes: int
) -> None:
    chosen = choose(candidates, free_bytes=free_bytes, now_s=NOW_S)
    freed, kept = sum(one.nbytes for one in chosen), pinned_with_ancestors(candidates)
    left = {one.prefix_hash: one for one in candidates}
    for one in chosen:  # at whatever point a sweep breaks off
        assert not any(other.parent_hash == one.prefix_hash for other in left.values())
        del left[one.prefix_hash]
    assert not kept - left.keys()
    assert freed >= free_bytes or left.keys() == kept
    # The last one was needed.
    assert not chosen or freed - chosen[-1].nbytes < free_bytes
    # Who needs more gives up the same, and then more.
    less, more = sorted((chosen, choose(candidates, free_bytes=other_bytes, now_s=NOW_S)), key=len)
    assert more[: len(less)] == less


@given(forests(), st.integers(0, 1_000), st.randoms(use_true_random=False))
def test_the_order_of_the_candidates_and_repetitions_do_not_matter(
    candidates: list[Candidate], free_bytes: int, rng: random.Random
) -> None:
    mixed = [*candidates, *rng.choices(candidates, k=3)] if candidates else []
    rng.shuffle(mixed)
    expected = choose(candidates, free_bytes=free_bytes, now_s=NOW_S)
    assert choose(mixed, free_bytes=free_bytes, now_s=NOW_S) == expected


def chain(
    length: int, *, first: int = 0, used_s: int = NOW_S, hits: int = 0, nbytes: int = 10
) -> list[Candidate]:
    return [
        Candidate(
            name(first + depth),
            name(first + depth - 1) if depth else b"\xff" * 20,
            depth * SIZE,
            (depth + 1) * SIZE,
            nbytes,
            hits,
            used_s if hits else 0,
            used_s,
            pinned=False,
        )
        for depth in range(length)
    ]


def given_up(candidates: list[Candidate], free_bytes: int) -> list[int]:
    chosen = choose(candidates, free_bytes=free_bytes, now_s=NOW_S)
    return [int.from_bytes(one.prefix_hash, "big") for one in chosen]


@pytest.mark.parametrize(
    ("candidates", "free_bytes", "goes"),
    [
        (chain(2, used_s=NOW_S - 10) + chain(2, first=10, used_s=NOW_S - 5_000), 20, [11, 10]),
        (chain(1, used_s=NOW_S - 9, hits=9) + chain(1, first=10, used_s=NOW_S - 9), 5, [10]),
        (chain(1, nbytes=10) + chain(1, first=10, nbytes=1_000), 5, [10]),
        (chain(3, used_s=0) + chain(4, first=10, hits=50)[2:], 30, [13, 12, 2]),
    ],
    ids=["used longer ago", "hit less often", "larger", "lost its beginning"],
)
def test_what_goes_first(candidates: list[Candidate], free_bytes: int, goes: list[int]) -> None:
    assert given_up(candidates, free_bytes) == goes


def test_the_last_hit_counts_as_use_and_so_does_the_save() -> None:
    (old,) = chain(1, used_s=NOW_S - 5_000)
    (other,) = chain(1, first=10, used_s=NOW_S - 100)
    touched = replace(old, touched_s=NOW_S - 10, created_s=NOW_S - 5_000)
    saved = replace(other, touched_s=0, created_s=NOW_S - 100)
    assert given_up([touched, saved], 5) == [10]
    touched = replace(touched, touched_s=NOW_S - 1_000)
    assert given_up([touched, saved], 5) == [0]


def test_fame_of_long_ago_does_not_keep_what_nobody_asks_for() -> None:
    usual = [
        Candidate(name(n), name(99), SIZE, 2 * SIZE, 1, 1, NOW_S, NOW_S - 60, pinned=True)
        for n in range(100, 120)
    ]
    famous = chain(1, used_s=NOW_S - 90_000, hits=1_000)
    famous[0] = Candidate(
        name(0), b"\xff" * 20, 0, SIZE, 10, 1_000, NOW_S - 90_000, NOW_S - 99_000, pinned=False
    )
    assert usual_pause_s(usual + famous) == 60
    assert given_up([*usual, *famous, *chain(1, first=10, used_s=NOW_S - 8_000)], 5) == [0]


def test_records_that_name_each_other_as_parents_end() -> None:
    looped = [
        Candidate(name(0), name(1), 0, SIZE, 1, 0, 0, 0, pinned=False),
        Candidate(name(1), name(0), SIZE, 0, 1, 0, 0, 0, pinned=False),
    ]
    assert len(choose(looped, free_bytes=100, now_s=NOW_S)) == 2


def test_many_chunks_take_no_more_comparisons_than_sorting_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted, not timed: each chunk that may be evicted is ranked once."""
    asked = 0

    def counting(candidates: Sequence[Candidate], now_s: float) -> Callable[[Candidate], float]:
        worth = by_use(candidates, now_s)

        def counted(one: Candidate) -> float:
            nonlocal asked
            asked += 1
            return worth(one)

        return counted

    monkeypatch.setattr(eviction, "by_use", counting)
    candidates = [one for n in range(300) for one in chain(10, first=100 * n)]
    chosen = choose(candidates, free_bytes=30_000, now_s=NOW_S)
    assert len(chosen) == len(candidates) == asked
