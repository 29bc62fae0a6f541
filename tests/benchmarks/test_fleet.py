"""The simulated fleet: its numbers add up, and where they can be counted otherwise, they agree."""

import json
import sys
from dataclasses import replace

import pytest

from benchmarks.fleet import run as command
from benchmarks.fleet.costs import Costs, read_costs
from benchmarks.fleet.fleet import Fleet, Settings, changed
from benchmarks.fleet.simulate import population, simulate
from benchmarks.fleet.trace import BLOCK_TOKENS, arrivals, read_trace
from benchmarks.fleet.world import World
from objkv.config import Config

pytestmark = pytest.mark.slow
COSTS, SAMPLE = read_costs(), read_trace()
SMALL = Fleet(replicas=2, simulated_max=2, load=0.15)


def run(fleet: Fleet, costs: Costs = COSTS) -> World:
    return simulate(SAMPLE, fleet, costs)


def timeless(model: str) -> Costs:
    """A store and a node that answer at once, GPUs that compute at once and keep nothing."""
    at_once = replace(COSTS.models[model], peak_flops=1e30, gpu_cache_bytes=0.0)
    bulk = replace(COSTS.bulk["lan"], first_byte_s=0.0, connection_bytes_s=1e30)
    redis = replace(
        COSTS.redis,
        round_trip_s=0.0,
        lookup_s=0.0,
        touch_s=0.0,
        save_command_s=0.0,
        client_s_per_chunk=0.0,
    )
    node = replace(
        COSTS.node,
        fetch_bytes_s=1e30,
        put_bytes_s=1e30,
        nic_bytes_s=1e30,
        arena_bytes_s=1e30,
    )
    return Costs({model: at_once}, {"lan": bulk}, redis, node)


@pytest.mark.parametrize(
    "fleet",
    [
        SMALL,
        replace(SMALL, shared=False),
        replace(SMALL, routing="affine", bulk="lan"),
        Fleet(replicas=300, simulated_max=2, load=0.03, settings=Settings(ttl_s=5)),
        changed(replace(SMALL, disk_bytes=1e12), save_to_bucket="reused"),
    ],
)
def test_every_prompt_token_is_from_exactly_one_place(fleet: Fleet) -> None:
    counts = run(fleet).counts
    expected = arrivals(SAMPLE, population(SAMPLE, fleet, COSTS))
    assert counts.prompt == sum(arrival.tokens for arrival in expected)
    assert counts.gpu + counts.bulk + counts.node + counts.computed == counts.prompt
    assert min(counts.gpu, counts.bulk, counts.node) >= 0
    assert len(counts.ttft_s) == len(expected)
    if not fleet.shared:
        assert counts.bulk + counts.node + counts.puts + counts.lookup_commands == 0


def test_a_store_without_limits_has_all_that_was_ever_asked_for() -> None:
    model, chunk = "llama-3.1-70b", 256
    fleet = Fleet(replicas=2, simulated_max=2, model=model, bulk="lan", load=1e-18)
    costs = timeless(model)
    counts = run(fleet, costs).counts
    known, expected = set[tuple[int, int]](), 0
    for arrival in arrivals(SAMPLE, population(SAMPLE, fleet, costs)):
        ends = range(chunk, arrival.tokens + 1, chunk)
        names = [(arrival.blocks[(end - 1) // BLOCK_TOKENS], end) for end in ends]
        stored = next((i for i, name in enumerate(names) if name not in known), len(names))
        expected += min(stored * chunk, arrival.tokens - 1)
        known.update(names)
    assert (counts.bulk + counts.node, counts.puts) == (expected, len(known))


def test_defaults_are_those_of_objkv() -> None:
    for name in Settings.__dataclass_fields__.keys() & Config.model_fields.keys():
        assert getattr(Settings(), name) == getattr(Config(), name), name


@pytest.mark.parametrize(
    ("bulk", "model", "puts"),
    [
        ("lan", "llama-3.1-8b", "all"),
        ("s3-standard", "llama-3.1-70b", "all"),
        ("s3-standard", "llama-3.1-8b", "reused"),
        ("s3-express", "llama-3.1-70b", "reused"),
    ],
)
def test_auto_is_decided_as_objkv_does(bulk: str, model: str, puts: str) -> None:
    assert Fleet(bulk=bulk, model=model).puts(COSTS) == puts


def test_the_command_prints_its_cases(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run", "--load", "0.005", "--json", "--simulated", "2"])
    command.main()
    found = {case["name"]: case for case in json.loads(capsys.readouterr().out)["cases"]}
    assert found["random routing, no objkv"]["node"] == 0
    assert found["random routing, default settings"]["node"] > 0
