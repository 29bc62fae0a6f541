"""Two of our connectors under vLLM's ``MultiConnector``: two stores, each served on its own."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.engine.cache import Values, scenario
from tests.engine.fleet import SharedStore
from tests.engine.harness import run_replica
from tests.engine.job import Generate, Job, Settle
from tests.engine.prompts import prompt_of

PROMPTS = (prompt_of(600), prompt_of(257, seed=1))
LOADED = [512, 256]
STEPS = (Generate(prompts=PROMPTS), Settle())
RECOMPUTE = {"kv_load_failure_policy": "recompute"}


def one(store: SharedStore, **settings: Any) -> dict[str, Any]:
    """The connector to one store."""
    connector = store.job(chunk_tokens=256, **settings).connector
    assert connector is not None
    return connector


def several(*connectors: dict[str, Any], **outer: Any) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(connectors)},
        **outer,
    }


def contents(store: SharedStore) -> dict[str, str]:
    """The path of every payload of a store, and a digest of the KV in it."""
    found = {}
    for path in store.payloads() if store.bulk.exists() else ():
        digest = hashlib.sha256()
        for name, layer in sorted(load_file(path).items()):
            digest.update(name.encode() + layer.tobytes())
        found[str(path.relative_to(store.bulk))] = digest.hexdigest()[:16]
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
    runs: Values = {"alone": run_replica(Job(steps=STEPS[:1]), folder)}
    both = several(one(stores[0]), one(stores[1]))
    runs["first"] = run_replica(Job(steps=STEPS, connector=both), folder)
    runs["contents"] = [contents(store) for store in stores[:2]]
    runs["second"] = run_replica(Job(steps=STEPS, connector=both), folder)
    new = several(one(stores[2]), one(stores[1]))
    runs["third"] = run_replica(Job(steps=STEPS, connector=new), folder)
    runs["contents"].append(contents(stores[2]))
    return runs


def test_both_stores_receive_the_same_chunks() -> None:
    runs = two_stores()
    assert runs["first"].tokens == runs["alone"].tokens
    assert runs["first"].cached == [0, 0]
    first, second, _ = runs["contents"]
    assert len(first) == 3
    assert first == second


def test_the_first_store_that_has_a_prompt_serves_it() -> None:
    second = two_stores()["second"]
    assert second.tokens == two_stores()["alone"].tokens
    assert second.cached == LOADED
    assert second.metrics["vllm:objkv_hit_tokens"] == sum(LOADED)
    assert second.metrics.get("vllm:objkv_saves", 0) == 0


def test_an_empty_store_is_filled_from_what_the_other_served() -> None:
    runs = two_stores()
    assert runs["third"].tokens == runs["alone"].tokens
    assert runs["third"].cached == LOADED
    assert runs["contents"][2] == runs["contents"][0]


@scenario
def one_of_two_is_bad(folder: Path) -> Values:
    store, empty = SharedStore(folder / "good"), SharedStore(folder / "empty")
    runs: Values = {}
    runs["first"] = run_replica(Job(steps=STEPS, connector=one(store)), folder)
    runs["good"] = contents(store)

    bad = spoiled_copy(store, folder / "bad-1")
    fails = several(one(bad), one(store))
    runs["default policy"] = run_replica(Job(steps=STEPS, connector=fails), folder)

    bad = spoiled_copy(store, folder / "bad-2")
    recomputes = several(one(bad), one(store), **RECOMPUTE)
    runs["other store"] = run_replica(Job(steps=STEPS, connector=recomputes), folder)

    bad = spoiled_copy(store, folder / "bad-3")
    layers = several(one(bad, load_mode="layerwise"), one(empty), **RECOMPUTE)
    runs["layerwise"] = run_replica(Job(steps=STEPS, connector=layers), folder)
    runs["beside it"] = contents(empty)
    return runs


@pytest.mark.wide
def test_with_the_outer_policy_left_alone_a_bad_payload_fails_its_request_and_we_warn() -> None:
    run = one_of_two_is_bad()["default policy"]
    assert [o.finish_reason for o in run.outputs[0]] == ["error", "error"]
    assert [w for w in run.warnings if "kv_load_failure_policy" in w.message]


@pytest.mark.wide
def test_with_the_outer_policy_recompute_the_other_store_serves() -> None:
    runs = one_of_two_is_bad()
    assert runs["other store"].tokens == runs["first"].tokens
    assert runs["other store"].metrics["vllm:objkv_load_corrupt"] >= 1
    assert not [w for w in runs["other store"].warnings if "kv_load_failure_policy" in w.message]


@pytest.mark.wide
def test_what_a_failed_load_left_in_blocks_is_not_saved_to_the_other_store() -> None:
    runs = one_of_two_is_bad()
    assert runs["layerwise"].tokens == runs["first"].tokens
    assert runs["layerwise"].metrics["vllm:objkv_load_corrupt"] >= 1
    assert runs["beside it"] == runs["good"]
