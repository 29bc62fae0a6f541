"""After the model waited in vain, loads are between steps until one of them succeeds."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.outputs import KVConnectorOutput

from objkv.config import Config
from objkv.connector.kv.metadata import StepReport
from objkv.connector.kv.scheduler import Confidence, Roles, SchedulerSide
from objkv.connector.model.groups import Geometry
from objkv.index.base import ChunkEntry, ShardRecord
from objkv.index.memory import MemoryIndex
from objkv.index.near import NearIndex
from objkv.keys.identity import GroupIdentity, Identity
from objkv.keys.prefix import prefix_hashes, root_hash
from objkv.stores.memory import MemoryStore
from objkv.telemetry import MemoryRecorder
from objkv.testing.clock import ManualClock
from objkv.transfer.plan import LoadPlan
from tests.support.paged_cache import wait_until

GROUP = GroupIdentity("full", None, ("l0",), heads=1, content=8, block_size=32)
IDENTITY = Identity("m", "w", None, "bfloat16", (GROUP,), "canonical", 32, 0, "default")
FIELD = "0.L0-1_H0-1"
TOKENS = [7] * 70
BOUND_S = 5.0
WITHIN = LoadPlan("w", "0" * 32, (), sync=True)
BETWEEN = LoadPlan("b", "0" * 32, (), sync=False)


def lost(clock: ManualClock) -> Confidence:
    """Of a replica whose forward pass waited in vain."""
    confidence = Confidence(BOUND_S, clock=clock)
    confidence.planned([WITHIN, BETWEEN])
    confidence.reported(StepReport(failed={"w", "b"}))
    confidence.received("b")
    assert not confidence.holds
    return confidence


@pytest.mark.parametrize(("seconds", "regained"), [(BOUND_S / 2, True), (BOUND_S, False)])
def test_a_load_between_steps_regains_it_if_a_step_would_have_waited_for_it(
    seconds: float, regained: bool
) -> None:
    confidence = lost(clock := ManualClock())
    confidence.planned([BETWEEN])
    clock.advance(seconds)
    confidence.received("b")
    assert confidence.holds is regained


def test_a_load_between_steps_that_fails_does_not_regain_it() -> None:
    confidence = lost(ManualClock())
    confidence.planned([BETWEEN])
    confidence.reported(StepReport(failed={"b"}))
    confidence.received("b")
    assert not confidence.holds


def test_a_payload_that_was_refused_does_not() -> None:
    confidence = Confidence(BOUND_S)
    confidence.planned([WITHIN])
    confidence.reported(StepReport(failed={"w"}, rejected={("0" * 32, b"h" * 20)}))
    assert confidence.holds


def test_a_load_between_steps_that_failed_does_not() -> None:
    """It may have been aborted, and nobody but its own request waited."""
    confidence = Confidence(BOUND_S)
    confidence.planned([WITHIN, BETWEEN])
    confidence.reported(StepReport(failed={"b"}))
    confidence.planned([])
    confidence.reported(StepReport(failed={"w"}))
    assert confidence.holds


def step(*, sync_loads: bool) -> Any:
    return SimpleNamespace(
        has_sync_kv_loads=sync_loads,
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda _: None),
        num_scheduled_tokens={},
        total_num_scheduled_tokens=1,
    )


def told(report: StepReport | None = None, *, received: str | None = None) -> KVConnectorOutput:
    return KVConnectorOutput(
        finished_recving={received} if received else None, kv_connector_worker_meta=report
    )


def ask(side: SchedulerSide, name: str) -> bool:
    """Whether the prompt, asked for by a request of that name, is loaded between steps."""
    plain = {"request_id": name, "all_token_ids": TOKENS, "lora_request": None, "cache_salt": None}
    plain |= {"mm_features": [], "prompt_embeds": None, "resumable": False, "num_tokens": 70}
    plain |= {"skip_reading_prefix_cache": False, "num_computed_tokens": 0}
    request: Any = SimpleNamespace(**plain, num_prompt_tokens=70)
    side.track(request)
    wait_until(lambda: side.match(request, 0)[0] is not None)
    tokens, between = side.match(request, 0)
    assert tokens == 64
    side.plan_load(request, [[1, 2]], 64)
    side.plan_step(step(sync_loads=not between))
    return between


def test_the_scheduler_plans_accordingly() -> None:
    index, recorder = MemoryIndex(), MemoryRecorder()
    namespace = IDENTITY.namespace()
    hashes = prefix_hashes(namespace, TOKENS, 32)
    parents = [root_hash(namespace), hashes[0]]
    for i, (name, parent) in enumerate(zip(hashes, parents, strict=True)):
        entry = ChunkEntry(namespace, name, parent, i * 32, (i + 1) * 32)
        index.publish(entry, {FIELD: ShardRecord(9, 9, "none", False, "0" * 32, 1)}, ttl_s=3600)
    side = SchedulerSide(
        Config(
            chunk_tokens=32,
            load_mode="layerwise",
            lookup_deadline_ms=120_000,
            step_load_deadline_ms=120_000,
        ),
        Roles(loads=True, saves=True, copies_are_synchronous=True, steps_in_flight=1),
        Geometry((GROUP,), 32, 32, tp_size=1),
        IDENTITY,
        bulk=MemoryStore(),
        index=NearIndex(index, records_max=8, ttl_s=1.0, fields=frozenset({FIELD})),
        recorder=recorder,
    )
    assert not ask(side, "waited in vain")
    side.update(told(StepReport(failed={"waited in vain"})))
    assert ask(side, "between")
    side.update(told(received="between"))
    assert not ask(side, "within again")
    side.close()
