"""The records that the agent keeps between a lookup and the load that follows it."""

from dataclasses import replace
from typing import Any

import pytest

from objkv.agent.core import FoundRecords
from objkv.agent.memory.arena import CellState
from objkv.agent.messages import MissReason
from objkv.cache.lookup import LOOKUP_TTL_S
from objkv.index.base import ShardRecord
from objkv.keys.chunk import ChunkKey
from tests.agent.world import Node, down, ended, opened
from tests.contracts.clock import ManualClock
from tests.support.samples import NAMESPACE
from tests.support.steps import complete

RECORD = ShardRecord(1, 2, True, False, "", 3)


def key(number: int, field: str = "0") -> ChunkKey:
    return ChunkKey.of(NAMESPACE, bytes([number]) * 20, field)


def test_the_last_chunks_are_kept_each_as_it_was_last_found() -> None:
    found = FoundRecords(chunks_max=2)
    first, second, third = (key(number).prefix_hash for number in range(3))
    found.add(
        NAMESPACE, [(first, {"0": RECORD}), (second, None), (third, {"0": RECORD, "1": RECORD})]
    )
    assert len(found) == 2
    later = replace(RECORD, nbytes=5)
    found.add(NAMESPACE, [(first, {"0": later}), (second, {"0": RECORD})])
    assert [found.of(key(number)) for number in range(3)] == [later, RECORD, None]
    found.forget(first)
    found.forget(third)
    assert found.of(key(0)) is None
    assert found.of(key(1, "1")) is None, "another payload of the chunk"


def test_answers_for_several_replicas_are_kept_each_for_a_while() -> None:
    clock = ManualClock()
    found, chunk, later = FoundRecords(clock=clock), key(1).prefix_hash, replace(RECORD, nbytes=5)
    found.add(NAMESPACE, [(chunk, {"0": RECORD})])
    clock.advance(LOOKUP_TTL_S / 2)
    found.add(NAMESPACE, [(chunk, {"1": RECORD})])  # another group of the chunk
    found.add("b" * 32, [(chunk, {"0": later})])  # a tier's chunk has the same hash for all models
    assert (found.of(key(1)), found.of(key(1, "1"))) == (RECORD, RECORD)
    assert found.of(ChunkKey.of("b" * 32, chunk, "0")) == later
    clock.advance(LOOKUP_TTL_S / 2)
    assert (found.of(key(1)), found.of(key(1, "1"))) == (None, RECORD)
    for number in range(20):
        found.add(f"{number:032x}", [(chunk, {"0": RECORD})])
    assert found.of(key(1, "1")) is None
    assert found.of(ChunkKey.of(f"{19:032x}", chunk, "0")) == RECORD


@pytest.fixture
def node() -> Any:
    node = Node().listen()
    yield node
    node.close()


def test_a_load_after_a_lookup_needs_no_index(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, client = node.save(), node.connect()
    complete(client.find(NAMESPACE, [one.claim.key.prefix_hash for one in wanted], ("0",)))
    monkeypatch.setattr(node.index, "find", down)
    leases = opened(client, wanted)
    assert {ended(client, lease).state for lease in leases} == {CellState.READY}
    client.release([lease.number for lease in leases])


def test_a_load_without_one_looks_the_record_up_or_is_a_miss(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, second, _), client = node.save(), node.connect()
    (lease,) = opened(client, [first])
    assert ended(client, lease).state is CellState.READY
    monkeypatch.setattr(node.index, "find", down)
    (missed,) = opened(client, [second])
    assert ended(client, missed).reason == MissReason.STORE
    client.release([lease.number, missed.number])


def test_a_record_that_has_changed_is_not_used_again(node: Node) -> None:
    one, client = node.save()[0], node.connect()
    hashes = [one.claim.key.prefix_hash]
    complete(client.find(NAMESPACE, hashes, ("0",)))
    assert node.core.found.of(one.claim.key) == one.record
    client.reject(one.claim)
    assert complete(client.find(NAMESPACE, hashes, ("0",))) == [None]
    assert node.core.found.of(one.claim.key) is None


def test_what_changed_while_it_was_looked_up_is_not_kept(node: Node) -> None:
    one, client = node.save()[0], node.connect()
    find = node.index.find

    def changing(*asked: Any) -> Any:
        found = find(*asked)
        node.core.record_changed(one.claim.key.prefix_hash)
        return found

    node.index.find = changing  # type: ignore[method-assign]
    assert complete(client.find(NAMESPACE, [one.claim.key.prefix_hash], ("0",))) != [None]
    assert node.core.found.of(one.claim.key) is None
