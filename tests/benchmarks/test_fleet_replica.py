"""What one simulated replica does first, and what it loads, as objkv in vLLM does."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.fleet.costs import Costs
from benchmarks.fleet.fleet import Fleet
from benchmarks.fleet.loading import load
from benchmarks.fleet.simulate import STEP_TOKENS, Replay
from benchmarks.fleet.trace import BLOCK_TOKENS, Arrival
from benchmarks.fleet.world import Job, World
from objkv.cache.admission import OBSERVATIONS_MIN, AdmissionPolicy, ChunkSize, LoadTime
from objkv.telemetry import NullRecorder
from tests.benchmarks.worlds import timeless, with_settings

BLOCKS = 24
TOKENS = BLOCKS * BLOCK_TOKENS
TOKEN_S = 1e-4
ONE = with_settings(Fleet(replicas=1, simulated_max=1, model="m", bulk="lan"), near_records_max=0)


def costs(load_token_s: float) -> Costs:
    """GPUs that keep nothing and compute a token in ``TOKEN_S``, a store whose bytes take
    ``load_token_s`` a token; nothing else takes time."""
    known = timeless("llama-3.1-70b")
    model = replace(
        known.models["llama-3.1-70b"],
        active_params=1.0,
        attention_width=0,
        peak_flops=2 / TOKEN_S,
        gpus=1,
        utilisation=1.0,
        replicas_per_host=1,
    )
    speed = model.token_bytes / model.shards / load_token_s
    return replace(known, models={"m": model}, client=replace(known.client, load_bytes_s=speed))


def stored(world: World, waiting: int) -> Job:
    """A prompt that is stored, taken from the head of a queue of ``waiting`` others."""
    job = world.place(Arrival(0.0, TOKENS + 1, tuple(range(BLOCKS + 1)), 1, 0))
    for unit in job.units:
        world.store.add(unit.key, unit.chunks, 0.0)
    job.replica.waiting.extend([job] * waiting)
    return job


def loads(rule: str, load_token_s: float, waiting: int) -> bool:
    world = World(with_settings(ONE, admission=rule), costs(load_token_s))
    job = stored(world, waiting)
    load(world, job, 1.0, len(job.units))
    return job.reused == TOKENS


def admits(load_token_s: float, waiting: int) -> bool:
    """What objkv's own rule says, once it has measured what is simulated."""
    admission = AdmissionPolicy("auto", NullRecorder(), clock=lambda: 0.0)
    token_bytes = 1000
    for _ in range(OBSERVATIONS_MIN):
        nbytes = TOKENS * token_bytes
        admission.loaded("bulk", LoadTime(nbytes, TOKENS * load_token_s, 0.0))
        admission.computed(TOKENS, TOKENS * TOKEN_S)
    chunks = [ChunkSize(256 * token_bytes, 256, "bulk")] * (TOKENS // 256)
    admission.admit(chunks)  # the first is due whatever it costs
    return admission.admit(chunks, waiting=waiting) == len(chunks)


@given(st.floats(0.2, 9), st.integers(0, 8))
def test_auto_decides_as_objkv_does(factor: float, waiting: int) -> None:
    assume(abs(factor - (1 + waiting)) > 1e-3)
    assert loads("auto", factor * TOKEN_S, waiting) == admits(factor * TOKEN_S, waiting)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("auto", [False, False, True]), ("alone", [False] * 3), ("always", [True] * 3)],
)
def test_only_auto_asks_who_waits_behind(rule: str, expected: list[bool]) -> None:
    assert [loads(rule, 2.5 * TOKEN_S, waiting) for waiting in range(3)] == expected


def prompt(at_s: float, first: int, tokens: int = TOKENS) -> Arrival:
    """One whose blocks are counted from ``first``; all are one tenant's."""
    return Arrival(at_s, tokens, tuple(range(first, first + -(-tokens // BLOCK_TOKENS))), first, 0)


def replayed(arrivals: list[Arrival], *, load_token_s: float, shared: bool = True) -> World:
    fleet = replace(with_settings(ONE, admission="always"), shared=shared)
    world = World(fleet, costs(load_token_s))
    Replay(world).run(arrivals)
    return world


def test_a_step_goes_on_with_what_was_begun_and_ends_for_all_its_requests_at_once() -> None:
    assert STEP_TOKENS < TOKENS < 2 * STEP_TOKENS
    three = [prompt(0.0, 0), prompt(0.0, 100, 1000), prompt(0.0, 200)]
    counts = replayed(three, load_token_s=1.0, shared=False).counts
    second_s, all_s = 2 * STEP_TOKENS * TOKEN_S, (2 * TOKENS + 1000) * TOKEN_S
    assert counts.ttft_s == pytest.approx([second_s, second_s, all_s])


def test_a_load_begins_when_its_request_is_taken_and_the_step_takes_the_next() -> None:
    busy_s = STEP_TOKENS * TOKEN_S
    stored, begins = prompt(0.0, 0), 10.0
    coming = [
        stored,
        prompt(begins, 100, STEP_TOKENS),
        replace(stored, at_s=begins + busy_s / 4),
        prompt(begins + busy_s / 2, 200, STEP_TOKENS),
    ]
    world = replayed(coming, load_token_s=TOKEN_S / 4)
    assert world.counts.bulk == TOKENS - 1
    assert busy_s > (TOKENS - 1) * TOKEN_S / 4, "loaded while the next is computed"
    assert world.counts.ttft_s[1:] == pytest.approx(
        [busy_s, 1.5 * busy_s, 1.75 * busy_s + TOKEN_S]
    ), "the one that came last is computed first; then of the loaded one its last token"
