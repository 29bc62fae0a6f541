"""KV events of real engines: what routers hear of the stores, beside those of the device."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.fleet import BLOCK, CHUNK, NUMBERS_TOLD, SharedStore, one_by_one, reset
from tests.engine.harness import run_replica
from tests.engine.job import Job, Prompt, Result, Step, call, prompt_of

pytestmark = pytest.mark.slow
CHUNKS = 3
PLAIN = prompt_of(CHUNKS * CHUNK + 9)
UNKNOWN = prompt_of(CHUNKS * CHUNK + 9, seed=1)
EVENTS: dict[str, Any] = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}
_BATCHES: list[Any] = []


def listen(llm: Any) -> None:
    """From now on keep what the engine core in this process publishes."""
    publisher = llm.llm_engine.engine_core.engine_core.scheduler.kv_event_publisher
    publisher.publish = _BATCHES.append


def heard(_llm: Any) -> list[dict[str, Any]]:
    batches = list(_BATCHES)
    _BATCHES.clear()
    return [plain(event) for batch in batches for event in batch.events]


def plain(event: Any) -> dict[str, Any]:
    names = ("medium", "group_idx", "block_hashes", "parent_block_hash", "token_ids")
    values = {name: getattr(event, name, None) for name in names}
    return values | {"kind": type(event).__name__}


def told(*prompts: Prompt) -> tuple[Step, ...]:
    """Run prompts one by one, each with a step after what was saved, and tell what was heard."""
    steps = [step for one in prompts for step in (*one_by_one([one]), NUMBERS_TOLD, call(heard))]
    return (call(listen), *steps)


def of(run: Result, answer: int, medium: str = "STORAGE") -> list[dict[str, Any]]:
    """What a replica told of a medium up to its ``answer``-th ``heard``, without the rest."""
    lists = [one for one in run.answers if isinstance(one, list)]
    return [event for event in lists[answer] if event["medium"] == medium]


def blocks(told: list[dict[str, Any]], kind: str = "BlockStored") -> list[Any]:
    return [one for event in told if event["kind"] == kind for one in event["block_hashes"]]


def test_routers_hear_of_saves_hits_and_resets_of_the_stores_as_of_the_device(
    tmp_path: Path,
) -> None:
    store = SharedStore(tmp_path / "store")
    resets = (call(reset, connector=True), NUMBERS_TOLD, call(heard))
    writer = run_replica(store.job(*told(PLAIN), *resets, engine=EVENTS), tmp_path)
    reads = store.job(*told(PLAIN, PLAIN, UNKNOWN), kv_role="kv_consumer", engine=EVENTS)
    reader = run_replica(reads, tmp_path)
    alone = run_replica(Job(steps=told(PLAIN), engine=EVENTS), tmp_path)

    device, stored = of(writer, 0, "GPU"), of(writer, 0)
    assert device == of(alone, 0, "GPU")
    assert len(stored) == CHUNKS
    assert {(event["kind"], event["group_idx"]) for event in stored} == {("BlockStored", 0)}
    saved = sorted(blocks(stored))
    assert saved == sorted(blocks(device)[: CHUNKS * CHUNK // BLOCK])
    by_parent = {event["parent_block_hash"]: event for event in stored}
    chain, parent = [], None
    for _ in range(CHUNKS):
        chain += by_parent[parent]["token_ids"]
        parent = by_parent[parent]["block_hashes"][-1]
    assert tuple(chain) == PLAIN.tokens[: CHUNKS * CHUNK]
    assert sorted(blocks(of(writer, 1), "BlockRemoved")) == saved, "a reset takes them back"

    assert reader.cached[0] == CHUNKS * CHUNK
    assert sorted(blocks(of(reader, 0))) == saved
    assert of(reader, 1) == of(reader, 2) == [], "a hit is reported once, and a miss is not"
