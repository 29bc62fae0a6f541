"""Which payloads an agent puts, from what its replicas hand over and measure."""

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from objkv.agent.answering import NodeCalls
from objkv.agent.messages import CommitStatus
from objkv.cache.worth import SETTLED_S, PutPolicy
from objkv.codec.payload import Claim
from objkv.index.base import Savings
from objkv.keys.chunk import ChunkKey
from objkv.keys.topology import Shard
from tests.agent.test_held_back import Holder
from tests.agent.world import PATIENCE_S, paths, payloads, put_policy
from tests.contracts.clock import ManualClock
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.samples import NAMESPACE

NBYTES = 15 << 20
"""A quarter of a chunk: of 4 ranks, each has a payload of this size."""
GPU_US = 70_000
"""Computing time of 256 tokens, on all GPUs."""
TWO = "f" * 32


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


def policy(clock: ManualClock, setting: Any = "auto", **rule: Any) -> PutPolicy:
    return PutPolicy(put_policy(setting, **rule).rule, clock=clock)


def claim(number: int, rank: int, namespace: str = NAMESPACE) -> Claim:
    key = ChunkKey(namespace, bytes([number] * 20), 0, Shard(0, 80, 2 * rank, 2 * rank + 2))
    return Claim(key, bytes(20), 256 * number, 256 * (number + 1))


def hand_over(one: PutPolicy, ranks: int, number: int = 1, namespace: str = NAMESPACE) -> set[bool]:
    """Whether the payloads of a chunk are held back."""
    return {
        one.holds_back(claim(number, rank, namespace), 4 * NBYTES // ranks) for rank in range(ranks)
    }


def measured(gpu_us: int = GPU_US, tokens: int = 256, namespace: str = NAMESPACE) -> Savings:
    return Savings(namespace, "2026-11", 1, tokens, tokens, gpu_us, 1000)


@pytest.mark.parametrize(("ranks", "holds_back"), [(4, True), (1, False)])
def test_each_put_that_a_chunk_takes_counts(
    clock: ManualClock, ranks: int, holds_back: bool
) -> None:
    one = policy(clock)
    one.credited(measured())
    assert hand_over(one, ranks) == hand_over(one, ranks, 2) == {True}, "others may follow"
    clock.advance(SETTLED_S)
    assert hand_over(one, ranks) == {holds_back}
    (decision,) = one.decisions().values()
    assert decision.break_even == pytest.approx(0.50 if ranks == 4 else 0.24, abs=0.01)


def test_namespaces_are_decided_apart_and_each_change_is_logged(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    one = policy(clock)
    for namespace in (NAMESPACE, TWO):
        hand_over(one, 1, namespace=namespace)
    clock.advance(SETTLED_S)
    assert hand_over(one, 1) == hand_over(one, 1, namespace=TWO) == {True}, "no time is known"
    assert [found.puts for found in one.decisions().values()] == ["reused"] * 2
    for _ in range(9):
        one.credited(measured(2 * GPU_US))
    assert hand_over(one, 1) == {False}
    assert hand_over(one, 1, namespace=TWO) == {True}
    for _ in range(9):
        one.credited(measured(4 * GPU_US // 5))
        hand_over(one, 1)
    assert one.decisions()[NAMESPACE].puts == "all", "between the limits"
    for _ in range(9):
        one.credited(measured(GPU_US // 2))
    assert hand_over(one, 1) == {True}
    assert len(caplog.messages) == 4
    assert "all: to pay, 0.12 of the chunks must be read again" in caplog.messages[2]
    assert "reused: to pay, 0.48" in caplog.messages[3]
    assert "S3 Standard" in caplog.messages[3]


def test_what_a_client_claims_to_have_measured_is_bounded(clock: ManualClock) -> None:
    one = policy(clock)
    for number in range(1000):
        one.credited(measured(namespace=f"{number:032x}"))
        hand_over(one, 1, namespace=f"{number:032x}")
    for bad in (measured(-1), measured(0), measured(tokens=-1), measured(tokens=0)):
        one.credited(bad)
    clock.advance(SETTLED_S)
    for number in range(940, 1000):
        hand_over(one, 1, namespace=f"{number:032x}")
    assert 0 < len(one.decisions()) <= 64


def test_a_call_of_a_replica_reaches_the_policy_and_the_index(clock: ManualClock) -> None:
    one, index = policy(clock), MemoryIndex()
    calls = NodeCalls(index, MemoryStore(), None, one, ttl_s=60)
    calls.run(json.dumps({"verb": "credit", "savings": asdict(measured(9 * GPU_US))}))
    hand_over(one, 4)
    clock.advance(SETTLED_S)
    assert hand_over(one, 4) == {False}
    assert index.savings() == [measured(9 * GPU_US)]


@pytest.fixture
def node(clock: ManualClock) -> Iterator[Holder]:
    made = Holder(policy=policy(clock))
    yield made
    made.close()


def test_a_node_puts_all_once_it_pays_and_holds_back_again_once_it_does_not(
    node: Holder, clock: ManualClock
) -> None:
    made = payloads()
    assert node.commit(made[:1]) == [CommitStatus.HELD_BACK]
    assert node.held == set(paths(made[:1]))
    clock.advance(SETTLED_S)
    node.saves.policy.credited(measured(10**9))
    node.commit(made[1:2])
    assert node.stored == set(paths(made[1:2]))
    node.again(made[:1])
    assert node.stored == set(paths(made[:2])), "what was held back is put when it is made again"
    for _ in range(9):
        node.saves.policy.credited(measured(1))
    node.commit(made[2:])
    assert node.held == set(paths(made[2:]))
    assert node.saves.drain(PATIENCE_S)
