"""Saves on the scheduler's side: what is planned, what is held for it, and what may go wrong."""

from collections.abc import Iterator, Sequence
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest

from objkv.config import Config
from objkv.connector.kv.scheduler import Roles, SchedulerSide
from objkv.connector.model.groups import Geometry
from objkv.index.base import ChunkEntry, ShardRecord, Shards
from objkv.index.memory import MemoryIndex
from objkv.index.near import NearIndex
from objkv.keys.identity import GroupIdentity, Identity
from objkv.stores.memory import MemoryStore
from objkv.telemetry import MemoryRecorder
from tests.support.paged_cache import wait_until

GROUP = GroupIdentity("full", None, ("l0",), heads=1, content=8, block_size=32)
FIELDS = ["0.L0-1_H0-1"]
PATIENCE_S = 120
IDENTITY = Identity("m", "w", None, "bfloat16", (GROUP,), "canonical", 32, 0, "default")


class HangingIndex(MemoryIndex):
    """Answers no reader before it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Event()

    def find(
        self, namespace: str, prefix_hashes: Sequence[bytes], fields: Sequence[str]
    ) -> list[Shards | None]:
        assert self.gate.wait(PATIENCE_S)
        return super().find(namespace, prefix_hashes, fields)


def open_side(index: MemoryIndex, *, loads: bool = True) -> SchedulerSide:
    """Of a replica on a GPU, that is, whose copies are not over when a step is."""
    near = NearIndex(index, records_max=8, ttl_s=1.0, miss_ttl_s=PATIENCE_S, fields=FIELDS)
    return SchedulerSide(
        Config(chunk_tokens=32, lookup_deadline_ms=PATIENCE_S * 1000),
        Roles(loads=loads, saves=True, copies_are_synchronous=False, steps_in_flight=2),
        Geometry((GROUP,), 32, 32, tp_size=1),
        IDENTITY,
        bulk=MemoryStore(),
        index=near,
        recorder=MemoryRecorder(),
    )


@pytest.fixture
def side() -> Iterator[SchedulerSide]:
    side = open_side(MemoryIndex())
    yield side
    side.close()


def request(**more: Any) -> Any:
    """What is read of vLLM's request."""
    plain = {"request_id": "r", "all_token_ids": [7] * 64, "lora_request": None}
    plain |= {"cache_salt": None, "mm_features": [], "prompt_embeds": None, "resumable": False}
    plain |= {"num_computed_tokens": 0, "num_prompt_tokens": 64, "num_tokens": 64}
    plain |= {"skip_reading_prefix_cache": False}
    return SimpleNamespace(**(plain | more))


def admit(side: SchedulerSide, one: Any) -> None:
    """As vLLM does: it asks what is stored until it is told."""
    side.track(one)
    wait_until(lambda: side.match(one, 0)[0] is not None)
    side.plan_load(one, (), 0)


def step(blocks: list[int], *, sync_loads: bool = False) -> Any:
    """A step that computes the whole prompt of ``r`` in ``blocks``."""
    state = SimpleNamespace(get_block_ids=lambda _: (blocks,))
    return cast(
        "Any",
        SimpleNamespace(
            has_sync_kv_loads=sync_loads,
            kv_connector_block_state=state,
            num_scheduled_tokens={"r": 64},
            scheduled_spec_decode_tokens={},
            total_num_scheduled_tokens=64,
        ),
    )


def test_blocks_are_held_for_saves_from_them_and_for_no_others(side: SchedulerSide) -> None:
    """A preempted request's blocks are gone; a load into new ones is told by itself."""
    one = request()
    admit(side, one)
    assert len(side.plan_step(step([3, 4])).saves) == 1
    side.plan_load(one, (), 0)
    assert side.finish(one, ([3, 4],)) is False
    admit(side, one)
    side.plan_step(step([5, 6]))
    assert side.finish(one, ([5, 6],)) is True


def test_blocks_of_a_request_that_ends_while_a_load_within_the_step_may_fail_are_remembered(
    side: SchedulerSide,
) -> None:
    """Until the next step: by then it is known what failed, and the blocks may be another's."""
    one, unknown = request(), request(request_id="u")
    side.track(one)
    side.plan_step(step([3, 4], sync_loads=True))
    side.finish(one, ([3, 4],))
    side.finish(unknown, ([5],))
    assert side.tables_ended == [[3, 4], [5]]
    side.plan_step(step([3, 4]))
    side.finish(unknown, ([6],))
    assert side.tables_ended == []


def test_a_request_that_cannot_be_saved_does_not_stop_the_step(side: SchedulerSide) -> None:
    strange = request(mm_features=[SimpleNamespace(identifier=None)])
    side.track(strange)
    with pytest.raises(AttributeError):
        wait_until(lambda: side.match(strange, 0)[0] is not None)
    assert side.match(strange, 0) == (0, False)
    assert side.plan_step(step([3, 4])).saves == ()


def test_what_was_missing_is_asked_for_again_once_its_save_is_planned() -> None:
    """Another request with the prompt must find it, although its absence was just remembered."""
    index = MemoryIndex()
    side = open_side(index)
    admit(side, one := request())
    (plan,) = side.plan_step(step([3, 4])).saves
    for save in plan.moves:
        move = save.move
        entry = ChunkEntry(plan.namespace, move.prefix_hash, move.parent_hash, 0, 32)
        record = ShardRecord(9, 9, "none", False, "0" * 32, 1)
        index.publish(entry, dict.fromkeys(FIELDS, record), ttl_s=3600)
    side.finish(one, ([3, 4],))
    other = request(request_id="other")
    side.track(other)
    wait_until(lambda: side.match(other, 0)[0] is not None)
    assert side.match(other, 0)[0] == 64
    side.close()


def test_a_replica_that_only_saves_waits_for_hashes_and_for_no_index() -> None:
    """A request may have ended after one step, and what could not be named then is lost."""
    index = HangingIndex()
    side = open_side(index, loads=False)
    admit(side, request())
    assert [save.move.chunk for save in side.plan_step(step([3, 4])).saves[0].moves] == [0, 1]
    index.gate.set()
    side.close()
