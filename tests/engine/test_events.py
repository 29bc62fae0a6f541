"""KV events of real engines: what routers hear of the stores, beside those of the device."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.fleet import CHUNK, NUMBERS_TOLD, SharedStore, one_by_one
from tests.engine.harness import run_replica
from tests.engine.job import Call, Job, Prompt, ResetPrefixCache, Step
from tests.engine.prompts import prompt_of
from tests.engine.scenario import Values, scenario

pytestmark = pytest.mark.slow
CHUNKS = 3
PLAIN = prompt_of(CHUNKS * CHUNK + 9)
UNKNOWN = prompt_of(CHUNKS * CHUNK + 9, seed=1)
EVENTS: dict[str, Any] = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}
LISTEN = Call(function="tests.engine.test_events:listen")
HEARD = Call(function="tests.engine.test_events:heard")
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
    values = {"kind": type(event).__name__}
    for name in ("medium", "group_idx", "block_hashes", "parent_block_hash", "token_ids"):
        values[name] = getattr(event, name, None)
    return values


def told(*prompts: Prompt) -> tuple[Step, ...]:
    """Run prompts one by one, each with a step after what was saved, and tell what was heard."""
    steps: list[Step] = [LISTEN]
    for prompt in prompts:
        steps += (*one_by_one([prompt]), NUMBERS_TOLD, HEARD)
    return tuple(steps)


@scenario
def events(folder: Path) -> Values:
    store = SharedStore(folder / "store")
    reset = (ResetPrefixCache(connector=True), NUMBERS_TOLD, HEARD)
    reads = store.job(*told(PLAIN, PLAIN, UNKNOWN), role="kv_consumer", engine=EVENTS)
    return {
        "writer": run_replica(store.job(*told(PLAIN), *reset, engine=EVENTS), folder),
        "reader": run_replica(reads, folder),
        "alone": run_replica(Job(steps=told(PLAIN), engine=EVENTS), folder),
    }


def of(replica: str, answer: int, medium: str = "STORAGE") -> list[dict[str, Any]]:
    """What a replica told of a medium up to its ``answer``-th ``HEARD``, without the rest."""
    lists = [one for one in events()[replica].answers if isinstance(one, list)]
    return [event for event in lists[answer] if event["medium"] == medium]


def blocks(told: list[dict[str, Any]], kind: str = "BlockStored") -> list[Any]:
    return [one for event in told if event["kind"] == kind for one in event["block_hashes"]]


def test_what_was_saved_is_told_with_the_hashes_of_the_device() -> None:
    device = of("writer", 0, "GPU")
    stored = of("writer", 0)
    assert len(stored) == CHUNKS
    assert {event["kind"] for event in stored} == {"BlockStored"}
    assert {event["group_idx"] for event in stored} == {0}
    count = CHUNKS * CHUNK // 32
    assert sorted(blocks(stored)) == sorted(blocks(device)[:count])
    tokens = {event["parent_block_hash"]: event["token_ids"] for event in stored}
    chain, parent = [], None
    for _ in range(CHUNKS):
        chain += tokens[parent]
        (parent,) = [e["block_hashes"][-1] for e in stored if e["parent_block_hash"] == parent]
    assert tuple(chain) == PLAIN.tokens[: CHUNKS * CHUNK]


def test_a_reset_takes_back_what_this_replica_told_of_the_stores() -> None:
    assert sorted(blocks(of("writer", 1), "BlockRemoved")) == sorted(blocks(of("writer", 0)))


def test_a_hit_is_told_once_and_a_miss_is_not() -> None:
    assert events()["reader"].cached[0] == CHUNKS * CHUNK
    assert sorted(blocks(of("reader", 0))) == sorted(blocks(of("writer", 0)))
    assert of("reader", 1) == []
    assert of("reader", 2) == []


def test_the_device_is_told_of_as_without_objkv() -> None:
    assert of("writer", 0, "GPU") == of("alone", 0, "GPU")
