"""Several connectors in one replica, under vLLM's ``MultiConnector``."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.engine.fleet import SharedStore, offloading
from tests.engine.harness import run_replica
from tests.engine.job import Generate, Job, Settle
from tests.engine.prompts import prompt_of
from tests.engine.scenario import Values, scenario
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow
PROMPTS = (prompt_of(600), prompt_of(257, seed=1))
LOADED = [512, 256]
STEPS = (Generate(prompts=PROMPTS), Settle())
RECOMPUTE = {"kv_load_failure_policy": "recompute"}


def one(store: SharedStore, **settings: Any) -> dict[str, Any]:
    connector = store.job(chunk_tokens=256, **settings).connector
    assert connector is not None
    return connector


def several(*connectors: dict[str, Any], **outer: Any) -> Job:
    extra = {"connectors": list(connectors)}
    connector = {"kv_connector": "MultiConnector", "kv_role": "kv_both", **outer}
    return Job(steps=STEPS, connector=connector | {"kv_connector_extra_config": extra})


def contents(store: SharedStore, count: int = 0) -> dict[str, str]:
    """The path of every payload of a store, and a digest of the KV in it. Waits until there are
    ``count``: agents save on after their replicas have ended."""
    wait_until(lambda: not count or len(store.payloads()) >= count)
    found = {}
    for path in store.payloads():
        digest = hashlib.sha256()
        for name, layer in sorted(load_file(path).items()):
            digest.update(name.encode() + layer.tobytes())
        found[str(path.relative_to(store.bulk))] = digest.hexdigest()
    return found


def spoiled_copy(store: SharedStore, folder: Path) -> SharedStore:
    """The same store, with a wrong byte at the end of the last layer of every payload."""
    copy = store.copy(folder)
    for payload in copy.payloads():
        raw = bytearray(payload.read_bytes())
        raw[-5] ^= 1
        payload.write_bytes(raw)
    return copy


@scenario
def two_stores(folder: Path) -> Values:
    stores = [SharedStore(folder / name) for name in ("one", "two", "three")]
    tiered, empty = SharedStore(folder / "tiered"), SharedStore(folder / "four")
    run_replica(Job(steps=STEPS, connector=offloading(tiered)), folder)
    values: Values = {"alone": run_replica(Job(steps=STEPS), folder)}
    both = several(one(stores[0]), one(stores[1]))
    values["first"] = run_replica(both, folder)
    values["second"] = run_replica(both, folder)
    values["third"] = run_replica(several(one(stores[2]), one(stores[1])), folder)
    values["tier"] = run_replica(several(offloading(tiered), one(empty)), folder)
    return values | {"contents": [contents(store, 3) for store in (*stores, empty)]}


def test_all_stores_receive_the_same_and_the_first_that_has_a_prompt_serves_it() -> None:
    values = two_stores()
    for name in ("first", "second", "third"):
        assert values[name].tokens == values["alone"].tokens
        assert values[name].cached == ([0, 0] if name == "first" else LOADED)
    first, *others = values["contents"]
    assert len(first) == 3
    assert others == [first] * 3
    assert values["second"].metrics["vllm:objkv_hit_tokens"] == sum(LOADED)
    assert values["second"].metrics.get("vllm:objkv_saves", 0) == 0


def test_one_of_several_connectors_loads_what_a_tier_saved() -> None:
    assert two_stores()["tier"].cached == [576, 256]
    assert two_stores()["tier"].tokens == two_stores()["alone"].tokens


@scenario
def one_of_two_is_bad(folder: Path) -> Values:
    store, empty = SharedStore(folder / "good"), SharedStore(folder / "empty")
    values: Values = {"first": run_replica(Job(steps=STEPS, connector=one(store)), folder)}
    values["good"] = contents(store, 3)
    bad = [spoiled_copy(store, folder / f"bad-{number}") for number in range(3)]
    layers = one(bad[2], load_mode="layerwise")
    jobs = {
        "default policy": several(one(bad[0]), one(store)),
        "other store": several(one(bad[1]), one(store), **RECOMPUTE),
        "layerwise": several(layers, one(empty), **RECOMPUTE),
    }
    values |= {name: run_replica(job, folder) for name, job in jobs.items()}
    return values | {"beside it": contents(empty, len(values["good"]))}


def test_with_the_outer_policy_left_alone_a_bad_payload_fails_its_request_and_we_warn() -> None:
    run = one_of_two_is_bad()["default policy"]
    assert [o.finish_reason for o in run.outputs[0]] == ["error", "error"]
    assert [w for w in run.warnings if "kv_load_failure_policy" in w.message]


@pytest.mark.parametrize("name", ["other store", "layerwise"])
def test_with_the_outer_policy_recompute_no_token_is_lost(name: str) -> None:
    values = one_of_two_is_bad()
    assert values[name].tokens == values["first"].tokens
    assert values[name].metrics["vllm:objkv_load_corrupt"] >= 1
    assert not [w for w in values[name].warnings if "kv_load_failure_policy" in w.message]


def test_what_a_failed_load_left_in_blocks_is_not_saved_to_the_other_store() -> None:
    assert one_of_two_is_bad()["beside it"] == one_of_two_is_bad()["good"]
