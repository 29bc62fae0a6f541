"""What a request's sender asks for is read as vLLM's own connector reads it."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as vllms
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload import base

from objkv.agent.messages import PrefetchOrder
from objkv.connector.kv.request_limits import NO_LIMITS, HintReader, LimitReader, RequestLimits
from objkv.connector.kv.scheduler import SchedulerSide
from objkv.errors import StoreUnavailable
from objkv.keys.prefix import PromptExtras, prefix_hashes
from objkv.telemetry import MemoryRecorder
from tests.contracts.memory_index import MemoryIndex
from tests.support.sides import (
    GEOMETRY,
    RECORD,
    SIZE,
    Jobs,
    ask,
    publish_prompt,
    request,
    scheduler_side,
    step,
)
from tests.support.waiting import wait_until


def read(params: Any, recorder: MemoryRecorder | None = None, **more: Any) -> RequestLimits:
    request = cast("Any", SimpleNamespace(kv_transfer_params=params, **more))
    return LimitReader("REMOTE", recorder or MemoryRecorder()).read(request)


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}, "text", 7])
def test_a_request_without_limits_has_none(params: Any) -> None:
    assert read(params) is NO_LIMITS


@pytest.mark.parametrize("value", [True, -1, 1.5, "5", [5], {}])
@pytest.mark.parametrize("name", ["max_load_tokens", "max_offload_tokens", "objkv_put"])
def test_an_invalid_value_is_ignored_and_counted(name: str, value: Any) -> None:
    value = 1 if (name, value) == ("objkv_put", True) else value
    recorder = MemoryRecorder()
    assert read({name: value}, recorder) == NO_LIMITS
    assert recorder.drain() == {"limits_ignored": 1}


words = st.sampled_from(("STORAGE", "storage", "CPU", "GPU", "LOCAL", "REMOTE", "remote", 5, None))
tiers = st.fixed_dictionaries({}, optional={"medium": words, "locality": words})


@given(st.one_of(words, st.lists(st.one_of(tiers, words), max_size=3)))
def test_tiers_are_those_that_vllm_would_load_from(listed: Any) -> None:
    expected = True
    if listed is not None:
        allowed = vllms._parse_tier_filter(listed)
        expected = allowed.allows(base.Medium.STORAGE, base.Locality.REMOTE)
    assert read({"kv_load_tiers": listed}).loads is expected


NAMESPACE = "ab" * 16
OWN = [bytes([n]) * 20 for n in range(3)]


class Agent:
    """Notes what it is to prefetch."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[bytes], PrefetchOrder]] = []
        self.jobs, self.recorder = Jobs(), MemoryRecorder()
        self.hints = HintReader(self.prefetch, self.jobs.submit, SIZE, self.recorder)

    def prefetch(self, namespace: str, hashes: Sequence[bytes], order: PrefetchOrder) -> int:
        self.asked.append((namespace, list(hashes), order))
        return len(hashes)

    def act(self, *actions: Any) -> None:
        hints = KvHintsEnvelope(protocol_version="1.0", message_id="m", actions=list(actions))
        self.hints.act(cast("Any", SimpleNamespace(kv_hints=hints)), NAMESPACE, OWN)


def action(payload: Any, kind: str = "objkv.prefetch", version: str = "1") -> KvHintAction:
    return KvHintAction(action_id="a", action_type=kind, action_version=version, payload=payload)


def test_a_hint_names_tokens_hashes_or_the_requests_own_prompt() -> None:
    agent, tokens = Agent(), list(range(2 * SIZE))
    agent.act(
        action({"tokens": tokens, "cache_salt": "x", "priority": -2, "deadline_ms": 500}),
        action({"hashes": [OWN[1].hex()], "bytes_max": 9}),
    )
    assert not agent.asked, "not on the scheduler's thread"
    agent.jobs.run()
    agent.act(action({}))
    agent.jobs.run()
    salted = prefix_hashes(NAMESPACE, tokens, SIZE, PromptExtras(salt="x"))
    assert agent.asked == [
        (NAMESPACE, salted, PrefetchOrder(0.5, -2)),
        (NAMESPACE, [OWN[1]], PrefetchOrder(30.0, 0, 9)),
        (NAMESPACE, OWN, PrefetchOrder(30.0)),
    ]
    assert agent.recorder.drain() == {"hints_prefetched": 3}


@pytest.mark.parametrize(
    "hint",
    [
        action({"block_hashes": [1, 2]}, "kv.fetch", "1.0"),
        action({}, version="2"),
        action({"tokens": [-1]}),
        action({"tokens": [1], "hashes": []}),
        action({"block_hashes": [1]}),
        action({"priority": "high"}),
        action([]),
        action({"tokens": [1]}),
        "strange",
    ],
    ids=str,
)
def test_a_hint_that_names_nothing_of_objkvs_is_counted(hint: Any) -> None:
    agent = Agent()
    agent.act(hint)
    agent.jobs.run()
    assert not agent.asked
    assert agent.recorder.drain() == {"hints_unused": 1}


def test_hints_are_bounded() -> None:
    agent = Agent()
    agent.act(*[action({"hashes": [OWN[0].hex()]})] * 100)
    assert len(agent.jobs) == 2
    agent.jobs.run()
    assert agent.recorder.drain() == {"hints_prefetched": 2, "hints_unused": 98}
    agent.act(action({}))
    assert len(agent.jobs) == 1, "their places are free again"


def test_an_agent_that_fails_costs_only_the_hint() -> None:
    agent = Agent()

    def down(*_: object) -> int:
        raise StoreUnavailable("no agent")

    agent.hints = HintReader(down, agent.jobs.submit, SIZE, agent.recorder)
    for _ in range(5):
        agent.act(action({}))
        with pytest.raises(StoreUnavailable):
            agent.jobs.run()
    assert agent.recorder.drain() == {"hints_unused": 5}


def test_a_request_brings_its_hint_to_the_agent() -> None:
    asked: list[tuple[str, list[bytes]]] = []
    one = scheduler_side(
        MemoryIndex(),
        prefetch=lambda namespace, hashes, order: asked.append((namespace, list(hashes))) or 1,
    )
    prompt = request(2 * SIZE + 1)
    prompt.kv_hints = KvHintsEnvelope(protocol_version="1.0", message_id="m", actions=[action({})])
    one.track(prompt)
    wait_until(lambda: bool(asked))
    assert asked == [(one.namespace, prefix_hashes(one.namespace, [7] * 2 * SIZE, SIZE))]


def side(stored: int) -> SchedulerSide:
    """A replica whose stores have this many chunks of the prompt of every request."""
    publish_prompt(index := MemoryIndex(), [7] * stored * SIZE)
    return scheduler_side(index, admission="always")


@pytest.mark.parametrize(
    ("asked", "computed", "loaded"),
    [
        ({}, 0, 3 * SIZE),
        ({"max_load_tokens": 2 * SIZE}, 0, 2 * SIZE),
        ({"max_load_tokens": 2 * SIZE - 1}, 0, SIZE),
        ({"max_load_tokens": SIZE}, SIZE, SIZE),
        ({"max_load_tokens": 0}, 0, 0),
        ({"kv_load_tiers": [{"medium": "CPU"}]}, 0, 0),
        ({"kv_load_tiers": [{"medium": "STORAGE", "locality": "LOCAL"}]}, 0, 3 * SIZE),
    ],
    ids=str,
)
def test_no_more_is_loaded_than_is_allowed(
    asked: dict[str, Any], computed: int, loaded: int
) -> None:
    prompt = request(3 * SIZE + 2, kv_transfer_params=asked)
    assert ask(side(3), prompt, computed)[0] == loaded


@pytest.mark.parametrize(
    ("asked", "saved"),
    [({}, 3), ({"max_offload_tokens": 2 * SIZE + 1}, 2), ({"max_offload_tokens": 0}, 0)],
    ids=str,
)
def test_no_more_is_saved_than_is_allowed(asked: dict[str, Any], saved: int) -> None:
    ask(one := side(0), prompt := request(3 * SIZE, kv_transfer_params=asked))
    one.plan_load(prompt, (), 0)
    plans = one.plan_step(step({"r": 3 * SIZE}, [3, 4, 5, 6, 7, 8])).saves
    assert sum(len(plan.moves) for plan in plans) == saved


def test_what_only_some_nodes_would_hold_back_is_put_at_once() -> None:
    one = scheduler_side(geometry=replace(GEOMETRY, tp_size=2, nodes=2))
    ask(one, prompt := request(2 * SIZE))
    one.plan_load(prompt, (), 0)
    (plan,) = one.plan_step(step({"r": 2 * SIZE}, list(range(1, 9)))).saves
    assert plan.puts


@pytest.mark.parametrize("puts", [False, True])
def test_what_an_agent_holds_back_is_put_for_a_request_that_says_so(puts: bool) -> None:
    unsaved = replace(RECORD, header_checksum="unsaved:" + RECORD.header_checksum)
    publish_prompt(index := MemoryIndex(), [7] * SIZE, unsaved)
    asked: list[tuple[list[bytes], bool]] = []
    one = scheduler_side(
        index,
        admission="always",
        prefetch=lambda _, hashes, order: asked.append((list(hashes), order.puts)) or 1,
    )
    prompt = request(2 * SIZE + 1, kv_transfer_params={"objkv_put": puts})
    assert ask(one, prompt, SIZE)[0] == 0, "vLLM has that chunk"
    one.plan_load(prompt, (), 0)
    prompt.num_computed_tokens = SIZE
    (plan,) = one.plan_step(step({"r": SIZE + 1}, list(range(1, 9)))).saves
    assert plan.puts is puts
    assert [save.move.chunk for save in plan.moves] == [1]
    hashes = prefix_hashes(one.namespace, [7] * 2 * SIZE, SIZE)
    wait_until(lambda: not one.lookups._thread.unfinished)
    assert asked == ([(hashes, True)] if puts else [])
