"""Saves on the scheduler's side: what is planned, what is held for it, and what may go wrong."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from objkv.config import Config
from objkv.connector.geometry import Geometry
from objkv.connector.scheduler import Roles, SchedulerSide
from objkv.index.memory import MemoryIndex
from objkv.index.near import NearIndex
from objkv.keys.identity import GroupIdentity, Identity
from objkv.stores.memory import MemoryStore
from objkv.telemetry import MemoryRecorder

GROUP = GroupIdentity("full", None, ("l0",), heads=1, content=8, block_size=32)
IDENTITY = Identity("m", "w", None, "bfloat16", (GROUP,), "canonical", 32, 0, "default")


@pytest.fixture
def side() -> Iterator[SchedulerSide]:
    """Of a replica on a GPU, that is, whose copies are not over when a step is."""
    recorder = MemoryRecorder()
    side = SchedulerSide(
        Config(chunk_tokens=32),
        Roles(loads=True, saves=True, copies_are_synchronous=False, steps_in_flight=2),
        Geometry((GROUP,), 32, 32, tp_size=1),
        IDENTITY,
        bulk=MemoryStore(),
        index=NearIndex(MemoryIndex(), records_max=8, ttl_s=1.0, fields=frozenset({"0.L0-1_H0-1"})),
        recorder=recorder,
    )
    yield side
    side.close()


def request(**more: Any) -> Any:
    """What is read of vLLM's request."""
    plain = {"request_id": "r", "all_token_ids": [7] * 64, "lora_request": None}
    plain |= {"cache_salt": None, "mm_features": [], "prompt_embeds": None, "resumable": False}
    plain |= {"num_computed_tokens": 0, "num_prompt_tokens": 64}
    return SimpleNamespace(**(plain | more))


def step(blocks: list[int], *, sync_loads: bool = False) -> Any:
    """A step that computes the whole prompt of ``r`` in ``blocks``."""
    state = SimpleNamespace(get_block_ids=lambda _: (blocks,))
    return cast(
        "Any",
        SimpleNamespace(
            has_sync_kv_loads=sync_loads,
            kv_connector_block_state=state,
            num_scheduled_tokens={"r": 64},
            total_num_scheduled_tokens=64,
        ),
    )


def test_blocks_are_held_for_saves_from_them_and_for_no_others(side: SchedulerSide) -> None:
    """A preempted request's blocks are gone; a load into new ones is told by itself."""
    one = request()
    side.track(one)
    side.plan_load(one, (), 0)
    assert len(side.plan_step(step([3, 4])).saves) == 1
    side.plan_load(one, (), 0)
    assert side.finish(one, ([3, 4],)) is False
    side.track(one)
    side.plan_load(one, (), 0)
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
    with pytest.raises(AttributeError):
        side.track(strange)
    assert side.plan_step(step([3, 4])).saves == ()
