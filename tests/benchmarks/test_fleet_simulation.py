"""What must hold of every simulated fleet, whatever its settings."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.fleet.fleet import Fleet, Settings
from benchmarks.fleet.loading import lookup
from benchmarks.fleet.saving import save
from benchmarks.fleet.simulate import Run, population
from benchmarks.fleet.trace import BLOCK_TOKENS, Arrival, Request, arrivals, span_s
from benchmarks.fleet.world import World
from objkv.config import Config
from tests.benchmarks.worlds import COSTS, SAMPLE, SMALL, run, timeless, with_settings

FLEETS = st.builds(
    Fleet,
    replicas=st.sampled_from([1, 3, 8, 300]),
    model=st.sampled_from(sorted(COSTS.models)),
    bulk=st.sampled_from(sorted(COSTS.bulk)),
    routing=st.sampled_from(["random", "affine"]),
    load=st.sampled_from([0.01, 0.03]),
    overlap=st.sampled_from([0.0, 0.5]),
    redis_primaries=st.integers(1, 3),
    shared=st.booleans(),
    simulated_max=st.sampled_from([1, 2]),
    seed=st.integers(0, 5),
    settings=st.builds(
        Settings,
        chunk_tokens=st.sampled_from([64, 256, 512, 2048]),
        ttl_s=st.sampled_from([5, 600, 1e6]),
        near_records_max=st.sampled_from([0, 100, 65_536]),
        near_ttl_ms=st.sampled_from([0, 30_000, 10**7]),
        near_miss_ttl_ms=st.sampled_from([0, 500, 10**6]),
        hot_save_bytes_max=st.sampled_from([0, 1 << 40]),
        admission=st.sampled_from(["auto", "always", "never", "alone"]),
        save_threads=st.sampled_from([1, 16]),
        s3_ranges_max=st.sampled_from([0, 64]),
        quota_bytes=st.sampled_from([0, 1e11, float("inf")]),
        hot_bytes=st.sampled_from([1e9, 1e13]),
    ),
)


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(FLEETS)
def test_every_prompt_token_is_from_exactly_one_place(fleet: Fleet) -> None:
    done = run(fleet)
    counts = done.world.counts
    expected = arrivals(SAMPLE, population(SAMPLE, fleet, COSTS))
    assert counts.requests == len(counts.ttft_s) == len(expected)
    assert counts.prompt == sum(arrival.tokens for arrival in expected)
    assert counts.gpu + counts.hot + counts.bulk + counts.computed == counts.prompt
    assert min(counts.gpu, counts.hot, counts.bulk) >= 0
    assert counts.computed >= counts.requests, "the last token is always computed"
    assert min(counts.ttft_s) > 0
    quota = fleet.settings.quota_bytes / done.world.scale
    assert done.world.store.chunks * done.world.chunk_bytes <= quota
    if not fleet.shared:
        assert counts.hot + counts.bulk + counts.saved + counts.lookup_commands == 0


def test_the_same_seed_gives_the_same_fleet_and_another_another() -> None:
    first, again = run(SMALL), run(SMALL)
    assert first.world.counts == again.world.counts
    assert run(replace(SMALL, seed=2)).world.counts != first.world.counts


@pytest.mark.parametrize("chunk", [128, 512, 2048])
def test_a_store_without_limits_has_all_that_was_ever_asked_for(chunk: int) -> None:
    model = "llama-3.1-70b"
    fleet = Fleet(replicas=2, simulated_max=2, model=model, bulk="lan", load=1e-18)
    fleet = with_settings(fleet, chunk_tokens=chunk, admission="always", near_records_max=0)
    costs = timeless(model)
    done = run(with_settings(fleet, save_queue_max=10**9), costs)
    assert done.world.counts.dropped == done.world.counts.leased == 0

    known, expected = set[tuple[int, int]](), 0
    for arrival in arrivals(SAMPLE, population(SAMPLE, fleet, costs)):
        ends = range(chunk, arrival.tokens + 1, chunk)
        names = [(arrival.blocks[(end - 1) // BLOCK_TOKENS], end) for end in ends]
        stored = next((i for i, name in enumerate(names) if name not in known), len(names))
        expected += min(stored * chunk, arrival.tokens - 1)
        known.update(names)
    assert done.world.counts.bulk == expected
    assert done.world.counts.saved == len(known)


def alone(admission: str, bulk: str) -> Run:
    """A load so low that no request ever meets another."""
    fleet = Fleet(replicas=2, simulated_max=2, bulk=bulk, load=1e-4)
    return run(with_settings(fleet, admission=admission, ttl_s=1e12, s3_ranges_max=24))


@pytest.mark.parametrize("bulk", ["s3-standard", "lan"])
def test_admission_is_never_slower_than_always_loading_or_never(bulk: str) -> None:
    auto, always, never = (
        alone(rule, bulk).world.counts.ttft_s for rule in ("auto", "always", "never")
    )
    for a, b, c in zip(auto, always, never, strict=True):
        assert a <= min(b, c) + 1e-6
    assert sum(auto) < sum(never)


def test_a_longer_life_and_a_larger_bucket_give_more_hits() -> None:
    def bulk(**changed: float) -> int:
        return run(
            with_settings(SMALL, admission="always", save_threads=16, **changed)
        ).world.counts.bulk

    by_ttl = [bulk(ttl_s=ttl_s) for ttl_s in (10, 120, 900, 7200)]
    assert by_ttl == sorted(by_ttl)
    assert by_ttl[0] < by_ttl[-1] / 5
    by_quota = [bulk(quota_bytes=size) for size in (0, 1e11, 1e12, float("inf"))]
    assert by_quota == sorted(by_quota)
    assert by_quota[0] == 0 < by_quota[-1] == by_ttl[-1]


def test_a_near_cache_that_keeps_more_asks_redis_less() -> None:
    def lookups(**changed: int) -> int:
        fleet = with_settings(SMALL, near_miss_ttl_ms=0, **changed)
        return run(fleet).world.counts.lookup_commands

    by_ttl = [lookups(near_ttl_ms=ttl) for ttl in (0, 30_000, 600_000)]
    by_size = [lookups(near_records_max=n, near_ttl_ms=600_000) for n in (0, 500, 65_536)]
    for counts in (by_ttl, by_size):
        assert counts == sorted(counts, reverse=True)
        assert counts[0] > counts[-1]


def test_absence_is_believed_for_its_time_and_not_longer_however_often_it_is_asked_for() -> None:
    world = World(with_settings(replace(SMALL, replicas=1), near_miss_ttl_ms=1000), COSTS)
    job = world.place(Arrival(0.0, 1024, (1, 2), 1, 0))
    assert lookup(world, job, 0.0)[0] == 0
    assert world.counts.lookup_commands == 4
    world.store.add(1, 2, 0.1)
    for now in (0.4, 0.8):
        assert lookup(world, job, now)[0] == 0
    assert world.counts.lookup_commands == 4, "the first chunk is missing: nothing is asked for"
    assert lookup(world, job, 1.2)[0] == 1
    assert world.counts.lookup_commands == 8


def test_what_another_replica_is_saving_is_left_to_it() -> None:
    world = World(replace(SMALL, replicas=2), COSTS)
    arrival = Arrival(0.0, 1024, (1, 2), 1, 0)
    for end_s in (1.0, 1.0):
        save(world, world.place(arrival), 0.0, end_s)
    assert world.counts.saved == world.counts.leased == 4
    save(world, world.place(arrival), 100.0, 101.0)
    assert world.counts.saved == world.counts.leased == 4, "stored by now: nothing to do"


def test_saves_that_cannot_keep_up_are_dropped() -> None:
    few, many = (run(with_settings(SMALL, save_threads=n)).world.counts for n in (1, 64))
    assert few.dropped > few.saved
    assert many.dropped == 0
    assert few.bytes_saved < many.bytes_saved


def test_more_connections_make_more_loads_pay() -> None:
    loaded = [
        run(with_settings(SMALL, save_threads=16, s3_ranges_max=n)).world.counts.bulk
        for n in (0, 16, 56)
    ]
    assert loaded == sorted(loaded)
    assert loaded[0] < loaded[-1]


def test_small_payloads_are_loaded_from_redis() -> None:
    fleet = with_settings(SMALL, hot_save_bytes_max=1 << 40, hot_bytes=1e15, admission="always")
    counts = run(fleet).world.counts
    assert counts.hot > 0
    assert counts.bulk == 0
    assert counts.gets == 0


def test_what_is_loaded_often_becomes_hot() -> None:
    blocks = tuple(range(20))
    requests = [Request(float(10 * i), 20 * BLOCK_TOKENS, blocks) for i in range(60)]
    costs = replace(
        COSTS, models={"m": replace(COSTS.models["llama-3.1-70b"], gpu_cache_bytes=0.0)}
    )
    fleet = Fleet(replicas=2, simulated_max=2, model="m", bulk="lan")
    fleet = with_settings(fleet, hot_payload_bytes_max=1 << 40, hot_promote_bytes_max=1 << 50)
    fleet = with_settings(fleet, admission="always", hot_bytes=1e15)
    often = run(fleet, costs, requests).world.counts
    assert often.hot > 0
    assert often.bulk > 0, "seldom loaded ones, and the first times"
    never = run(with_settings(fleet, hot_promote_bytes_max=0), costs, requests).world.counts
    assert never.hot == 0 < never.bulk


def test_prefix_affine_routing_finds_more_in_the_gpus() -> None:
    random, affine = (
        run(Fleet(replicas=8, simulated_max=8, load=0.2, routing=routing)).world.counts
        for routing in ("random", "affine")
    )
    assert affine.gpu > 1.3 * random.gpu


def test_some_hosts_stand_for_the_whole_fleet() -> None:
    fleet = with_settings(Fleet(replicas=16, load=0.2), save_threads=16, s3_ranges_max=56)
    part, whole = (run(replace(fleet, simulated_max=n)) for n in (4, 16))
    assert (part.world.scale, whole.world.scale) == (4.0, 1.0)
    for tier in ("gpu", "bulk", "computed"):
        shares = [getattr(r.world.counts, tier) / r.world.counts.prompt for r in (part, whole)]
        assert shares[0] == pytest.approx(shares[1], abs=0.03), tier
    for name in ("lookup_commands", "save_commands", "puts"):
        rates = [getattr(r.world.counts, name) * r.world.scale / r.span_s for r in (part, whole)]
        assert rates[0] == pytest.approx(rates[1], rel=0.05), name


def test_a_request_that_goes_anywhere_of_a_large_fleet_finds_little_in_its_gpus() -> None:
    few, many = (
        run(Fleet(replicas=n, simulated_max=2, load=0.3, shared=False)).world.counts.gpu
        for n in (2, 4096)
    )
    assert many < 0.7 * few


def test_a_redis_that_is_asked_too_much_is_left_alone_by_breakers() -> None:
    huge = Fleet(replicas=4096, simulated_max=2, load=0.3)
    one, enough = (run(replace(huge, redis_primaries=n)).world.counts for n in (1, 100))
    assert enough.late_lookups == enough.unasked_lookups == 0
    assert one.late_lookups > 0
    assert one.unasked_lookups > one.late_lookups / 2, "five late answers, then some peace"
    assert one.saved < enough.saved


@pytest.mark.parametrize("replicas", [1, 2, 6, 8])
def test_the_load_is_exact_and_time_hardly_stretched(replicas: int) -> None:
    fleet = Fleet(replicas=replicas, simulated_max=replicas)
    laid, model = population(SAMPLE, fleet, COSTS), COSTS.models[fleet.model]
    assert laid.stretch == pytest.approx(1, abs=0.15)
    work_s = sum(model.prefill_s(0, arrival.tokens) for arrival in arrivals(SAMPLE, laid))
    assert work_s / (replicas * laid.stretch * span_s(SAMPLE)) == pytest.approx(fleet.load)


def test_settings_that_make_no_sense_are_refused() -> None:
    for chunk in (0, 100, 768):
        with pytest.raises(ValueError, match="chunk_tokens"):
            Fleet(settings=Settings(chunk_tokens=chunk))
    with pytest.raises(ValueError, match="positive"):
        Fleet(replicas=0)
    with pytest.raises(ValueError, match="share"):
        Fleet(overlap=1.5)


def test_defaults_are_those_of_objkv() -> None:
    ours, theirs = Settings(), Config()
    elsewhere = {"quota_bytes", "hot_bytes"}
    for name in set(Settings.__dataclass_fields__) - elsewhere:
        assert getattr(ours, name) == getattr(theirs, name), name
