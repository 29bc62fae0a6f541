"""Caches and links of the simulation, each against a plain model of itself."""

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fleet.tiers import BlockCache, Gauge, Lane, NearCache, SharedStore

PROMPTS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True), max_size=20)


@given(PROMPTS, st.integers(0, 8))
def test_a_block_cache_keeps_the_most_recent_blocks(prompts: list[list[int]], room: int) -> None:
    cache, recent = BlockCache(room * 512), list[int]()
    for keys in prompts:
        cache.add(keys, [512] * len(keys))
        recent = [key for key in recent if key not in keys] + keys[::-1]
        recent = recent[max(0, len(recent) - room) :]
    for key in range(10):
        assert cache.match([key]) == (512 if key in recent else 0)


def test_of_one_prompt_the_end_goes_first() -> None:
    cache = BlockCache(2 * 512)
    cache.add([1, 2, 3], [512, 512, 100])
    assert cache.match([1, 2, 3]) == 1024
    cache.add([4], [512])
    assert cache.match([1, 2, 3]) == 512
    cache = BlockCache(3 * 512)
    cache.add([1, 2, 3], [512, 512, 100])
    assert cache.match([1, 2, 3]) == 1124
    assert cache.match([1, 9, 3]) == 512


def test_the_near_cache_forgets_after_its_time_and_remembers_absence_for_its_own() -> None:
    near = NearCache(10, ttl_s=5.0, miss_ttl_s=1.0)
    near.keep(1, 2, True, now=0.0)
    near.keep(2, 2, False, now=0.0)
    assert [near.answer(key, 0.9) for key in (1, 2, 3)] == [True, False, None]
    assert [near.answer(key, 4.9) for key in (1, 2)] == [True, None]
    assert near.answer(1, 5.0) is None
    near.keep(1, 2, True, now=6.0)
    near.forget(1)
    assert near.answer(1, 6.0) is None


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), max_size=30), st.integers(0, 12))
def test_the_near_cache_never_keeps_more_than_its_bound(
    kept: list[tuple[int, int]], bound: int
) -> None:
    near, sizes = NearCache(bound, ttl_s=100.0, miss_ttl_s=100.0), dict[int, int]()
    for now, (key, chunks) in enumerate(kept):
        near.keep(key, chunks, True, now=float(now))
        sizes[key] = chunks
        held = [key for key in sizes if near.answer(key, float(now)) is not None]
        assert sum(sizes[key] for key in held) <= bound


def test_the_store_forgets_after_its_time_unless_somebody_asks() -> None:
    store = SharedStore(float("inf"), ttl_s=10.0)
    store.add(1, 3, since_s=2.0)
    store.add(2, 3, since_s=2.0)
    assert store.has(1, 1.0) == 2.0, "it is being saved"
    store.touch(1, 11.0)
    assert store.has(2, 12.0) is None
    assert store.has(1, 20.9) == 2.0
    store.add(3, 1, since_s=20.0)
    assert store.chunks == 4
    assert store.chunks_peak == 6


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), max_size=30), st.integers(0, 12))
def test_the_store_keeps_to_its_quota(added: list[tuple[int, int]], quota: int) -> None:
    store = SharedStore(quota, ttl_s=1000.0)
    sizes = dict[int, int]()
    for now, (key, chunks) in enumerate(added):
        store.add(key, chunks, float(now))
        sizes[key] = chunks
        held = sum(n for k, n in sizes.items() if store.has(k, float(now)) is not None)
        assert held == store.chunks <= quota


def test_a_lane_does_one_thing_after_the_other() -> None:
    lane = Lane()
    assert lane.take(1.0, 2.0) == 3.0
    assert lane.start_s(2.0) == 3.0
    assert lane.take(2.0, 1.0) == 4.0
    assert lane.take(9.0, 1.0) == 10.0
    assert lane.busy_s == 4.0


def test_a_gauge_is_an_average_that_forgets() -> None:
    gauge = Gauge(memory_s=10.0)
    for tick in range(1000):
        gauge.add(tick / 10, 0.05)
    assert 0.45 < gauge.average < 0.55, "half a second of work every second"
    gauge.add(200.0, 0.0)
    assert gauge.average < 0.001
    assert gauge.peak > 0.45
