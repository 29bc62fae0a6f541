"""The simulated agents: what a node holds, what is put into the bucket and when, and the money."""

import json
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fleet import run as command
from benchmarks.fleet.agents import LIVES_H, Row, halves, with_nodes
from benchmarks.fleet.fleet import Agents, Fleet, Policy
from benchmarks.fleet.loading import load, lookup, waits_until
from benchmarks.fleet.saving import save
from benchmarks.fleet.tiers import Held, NodeCache
from benchmarks.fleet.trace import BLOCK_TOKENS, Arrival, span_s
from benchmarks.fleet.world import World
from tests.benchmarks.worlds import COSTS, SAMPLE, SMALL, run, timeless, with_settings

BLOCKS = 4
TOKENS = BLOCKS * BLOCK_TOKENS + 1
ROOMY = Agents(memory_bytes=1e15)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=40),
    st.integers(1, 5),
    st.integers(0, 5),
)
def test_a_node_holds_no_more_than_its_memory_and_its_disk(
    steps: list[tuple[int, bool]], memory: int, disk: int
) -> None:
    cache = NodeCache(Agents(memory, disk))
    for key, is_read in steps:
        before = [one for one in range(10) if cache.find(one)]
        if is_read:
            cache.read(key, ready_s=0.0)
        else:
            cache.add(key, Held(1, 0.0, was_read=False))
            assert cache.find(key) is not None
        assert cache.memory.nbytes <= memory
        assert cache.disk.nbytes <= disk
        after = [one for one in range(10) if cache.find(one)]
        assert len(after) >= min(len(before), memory), "memory does not shrink"


def test_what_memory_gives_up_is_on_the_disk_and_comes_back_when_it_is_read() -> None:
    cache = NodeCache(Agents(1, 2))
    for key in (1, 2):
        cache.add(key, Held(1, 0.0, was_read=False))
    assert cache.memory.get(1) is None
    assert cache.disk.get(1) is not None
    cache.read(1, ready_s=3.0)
    back = cache.memory.get(1)
    assert back is not None
    assert back.ready_s == 3.0
    assert cache.disk_written == 2


def test_a_disk_may_keep_only_what_was_read() -> None:
    cache = NodeCache(Agents(1, 2, disk_keeps="read"))
    for key in (1, 2):
        cache.add(key, Held(1, 0.0, was_read=False))
        if key == 2:
            cache.read(key, ready_s=0.0)
    cache.add(3, Held(1, 0.0, was_read=False))
    assert [cache.disk.get(key) is not None for key in (1, 2)] == [False, True]


def world(agents: Agents) -> World:
    """Two nodes of two replicas each; nothing takes time, and GPUs keep nothing."""
    fleet = Fleet(replicas=4, simulated_max=4, bulk="lan", agents=agents)
    fleet = with_settings(fleet, admission="always", near_records_max=0)
    return World(fleet, timeless("llama-3.1-70b"))


def ask(at: World, replica: int, now: float) -> int:
    """The same prompt once more, on this replica; returns the tokens that it loads, a little later
    than it looks them up."""
    job = at.place(Arrival(now, TOKENS, tuple(range(BLOCKS + 1)), 1, 0))
    job.replica = at.replicas[replica]
    job.stored, _ = lookup(at, job, now)
    load(at, job, now + 0.5, job.stored)
    save(at, job, now + 0.5, now + 0.5)
    return job.reused


@pytest.mark.parametrize(
    ("policy", "wait_max_s", "waits_s"),
    [("reused", 5.0, 0.1), ("reused", 0.01, 0.01), ("reused", 0.0, 0.0), ("unrequested", 5.0, 0.0)],
)
def test_a_request_waits_for_what_another_node_puts(
    policy: Policy, wait_max_s: float, waits_s: float
) -> None:
    at = world(replace(ROOMY, save_to_bucket=policy, wait_max_s=wait_max_s))
    ask(at, 0, 1.0)
    at.model = COSTS.models[at.fleet.model]
    job = at.place(Arrival(2.0, TOKENS, tuple(range(BLOCKS + 1)), 1, 0))
    job.replica = at.replicas[2]
    job.stored, _ = lookup(at, job, 2.0)
    assert waits_until(at, job, 2.0) == pytest.approx(2.0 + waits_s)
    assert waits_until(at, job, 2.0 + waits_s) == pytest.approx(2.0 + waits_s)
    load(at, job, 2.0 + waits_s, job.stored)
    assert job.reused == (TOKENS - 1 if waits_s == 0.1 else 0)
    assert at.counts.waits == (policy == "reused")
    assert bool(at.counts.given_up) == (policy == "reused" and waits_s < 0.1)


@pytest.mark.parametrize(
    ("policy", "replica", "loaded", "chunks_put"),
    [
        ("all", 1, TOKENS - 1, [8, 8]),  # the same node
        ("all", 2, TOKENS - 1, [8, 8]),  # the other node
        ("reused", 1, TOKENS - 1, [0, 8]),  # from the arena: seen a second time
        ("unrequested", 2, 0, [0, 8]),  # committed a second time
        ("reused", 2, TOKENS - 1, [0, 8]),  # put by the first node
    ],
)
def test_a_policy_puts_a_prompt_when_it_should(
    policy: Policy, replica: int, loaded: int, chunks_put: list[int]
) -> None:
    at, put = world(replace(ROOMY, save_to_bucket=policy)), []
    assert ask(at, 0, 1.0) == 0
    put.append(at.counts.saved)
    assert ask(at, replica, 2.0) == loaded
    put.append(at.counts.saved)
    assert put == chunks_put
    assert ask(at, 3, 3.0) == TOKENS - 1
    assert at.counts.saved == 8, "once"


def test_a_sighting_is_forgotten_after_the_records_time() -> None:
    at = world(replace(ROOMY, save_to_bucket="reused"))
    at.settings = replace(at.settings, ttl_s=10.0)
    ask(at, 0, 1.0)
    ask(at, 2, 20.0)
    assert at.counts.saved == 0
    at.hosts[1].cache.empty()
    ask(at, 2, 25.0)
    assert at.counts.saved == 8


def test_what_a_node_gives_up_unread_is_not_put() -> None:
    at = world(replace(ROOMY, save_to_bucket="reused"))
    ask(at, 0, 1.0)
    at.hosts[0].cache.empty()
    assert at.counts.saved == 0
    assert ask(at, 0, 2.0) == 0
    assert at.counts.saved == 8, "but when it is committed again"


def test_a_node_fetches_a_chunk_once() -> None:
    at = world(ROOMY)
    for replica in (0, 2, 3):
        ask(at, replica, 1.0 + replica)
    once = 8 * at.chunk_bytes
    assert at.counts.bytes_bulk == at.counts.bytes_saved == once
    assert at.counts.bulk == at.counts.arena == TOKENS - 1


@pytest.mark.parametrize(
    ("policy", "disk_bytes"), [("all", 0), ("unrequested", 1e12), ("reused", 1e12)]
)
def test_with_agents_too_every_token_is_from_one_place(policy: Policy, disk_bytes: float) -> None:
    agents = Agents(2e11, disk_bytes, "all" if disk_bytes else "read", policy)
    counts = run(replace(SMALL, agents=agents)).world.counts
    found = (counts.gpu, counts.bulk, counts.arena, counts.disk)
    assert sum(found) + counts.computed == counts.prompt
    assert min(found) >= 0
    assert (counts.disk > 0) == (disk_bytes > 0)
    assert counts.arena > 0
    without = run(SMALL).world.counts
    limit = 1.05 if policy == "all" else 0.5
    assert counts.bytes_saved < limit * without.bytes_saved


def test_halves_begin_at_zero_and_are_the_whole() -> None:
    first, second = halves(SAMPLE).values()
    assert first[0].at_s == second[0].at_s == 0
    assert [one.blocks for one in (*first, *second)] == [one.blocks for one in SAMPLE]
    assert 0 < span_s(first) < span_s(SAMPLE)


def row() -> Row:
    return Row(
        part="", routing="random", name="", gpu=0.1, node=0.1, bucket=0.1, loaded_of_today=1.0,
        put_of_today=0.5, put_bytes=1e12, dropped=0.0, puts=1e6, gets=1e6, requests_usd=2.0,
        storage_usd_h=0.5, disk_usd=1.0, gpu_usd_saved=13.0, ttft_p50_s=1.0, ttft_mean_s=2.0,
    )  # fmt: skip


def test_payloads_pay_as_long_as_more_is_saved_than_spent() -> None:
    one = row()
    assert one.pays_up_to_h == 20.0
    assert one.net_usd(20.0) == 0
    assert one.net_usd(4.0) == 8.0
    assert replace(one, gpu_usd_saved=1.0).pays_up_to_h == 0
    assert one.as_json()["net_usd, 4.5 h"] == one.net_usd(LIVES_H["4.5 h"])


@pytest.mark.parametrize("wrong", [(0.0, 0.0), (1.0, -1.0)])
def test_an_agent_has_memory(wrong: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="memory"):
        Agents(*wrong)


def test_a_node_has_a_replica() -> None:
    assert with_nodes(COSTS, SMALL.model, 3).models[SMALL.model].replicas_per_host == 3
    with pytest.raises(ValueError, match="at least one"):
        with_nodes(COSTS, SMALL.model, 0)


@pytest.mark.parametrize("is_json", [True, False])
def test_the_command_compares_policies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_json: bool
) -> None:
    options = ["--agents", "--replicas", "2", "--replicas-per-node", "1", "--load", "0.005"]
    monkeypatch.setattr(sys, "argv", ["run", *options, *(["--json"] if is_json else [])])
    command.main()
    printed = capsys.readouterr().out
    if not is_json:
        assert "second half, affine routing" in printed
        return
    found = json.loads(printed)["cases"]
    assert {(one["part"], one["routing"]) for one in found} == {
        (part, routing)
        for part in ("first half", "second half")
        for routing in ("random", "affine")
    }
    today, everything, _, reused = found[:4]
    assert today["loaded_of_today"] == today["put_of_today"] == 1.0
    assert everything["put_of_today"] == pytest.approx(1.0, abs=0.1)
    assert reused["put_of_today"] < 0.5
    assert reused["name"] == "reused (default)"
