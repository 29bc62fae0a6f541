"""Several connectors in one replica, under vLLM's ``MultiConnector``."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.engine.fleet import SETTLED, SharedStore, offloading
from tests.engine.harness import run_replica
from tests.engine.job import Job, Result, generate, prompt_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow
STEPS = (generate(prompt_of(600), prompt_of(257, seed=1)), SETTLED)
LOADED = [512, 256]
CHUNKS = 3
RECOMPUTE = {"kv_load_failure_policy": "recompute"}


def one(store: SharedStore, **settings: Any) -> dict[str, Any]:
    return store.job(chunk_tokens=256, **settings).connector or {}


def several(folder: Path, *connectors: dict[str, Any], **outer: Any) -> Result:
    """Of a replica with these connectors; of one alone, or of none, it is the replica's own."""
    connector = connectors[0] if connectors else None
    if len(connectors) > 1:
        extra = {"kv_connector_extra_config": {"connectors": list(connectors)}}
        connector = {"kv_connector": "MultiConnector", "kv_role": "kv_both"} | extra | outer
    return run_replica(Job(steps=STEPS, connector=connector), folder)


def contents(store: SharedStore) -> dict[str, str]:
    """The path of every payload of a store, and a digest of the KV in it. Waits until all are
    there: agents save on after their replicas have ended."""
    wait_until(lambda: len(store.payloads()) >= CHUNKS)
    found = {}
    for path in store.payloads():
        digest = hashlib.sha256()
        for name, layer in sorted(load_file(path).items()):
            digest.update(name.encode() + layer.tobytes())
        found[str(path.relative_to(store.bulk))] = digest.hexdigest()
    assert len(found) == CHUNKS
    return found


def spoiled_copy(store: SharedStore, folder: Path) -> SharedStore:
    """The same store, with a wrong byte at the end of the last layer of every payload."""
    copy = store.copy(folder)
    for payload in copy.payloads():
        raw = bytearray(payload.read_bytes())
        raw[-5] ^= 1
        payload.write_bytes(raw)
    return copy


def test_all_stores_receive_the_same_and_the_first_that_has_a_prompt_serves_it(
    folder: Path,
) -> None:
    stores = [SharedStore(folder / str(number)) for number in range(4)]
    alone = several(folder)
    pairs = ((0, 1), (0, 1), (2, 1))
    runs = [several(folder, one(stores[a]), one(stores[b])) for a, b in pairs]
    assert [run.cached for run in runs] == [[0, 0], LOADED, LOADED]
    assert runs[1].metrics["vllm:objkv_hit_tokens"] == sum(LOADED)
    assert runs[1].metrics.get("vllm:objkv_saves", 0) == 0

    tiered = offloading(SharedStore(folder / "tiered"))
    several(folder, tiered)
    runs.append(several(folder, tiered, one(stores[3])))
    assert runs[-1].cached == [576, 256], "one of several loads what a tier saved"
    assert [run.tokens for run in runs] == [alone.tokens] * 4
    first, *others = map(contents, stores)
    assert others == [first] * 3


def test_a_bad_payload_of_one_of_two_is_a_miss_if_the_outer_policy_is_recompute(
    folder: Path,
) -> None:
    store, empty = SharedStore(folder / "good"), SharedStore(folder / "empty")
    first = several(folder, one(store))
    good = contents(store)
    bad = [spoiled_copy(store, folder / f"bad-{number}") for number in range(3)]

    def warned(run: Result) -> bool:
        return any("kv_load_failure_policy" in line.message for line in run.warnings)

    run = several(folder, one(bad[0]), one(store))
    assert [output.finish_reason for output in run.outputs[0]] == ["error", "error"]
    assert warned(run)
    for pair in (
        (one(bad[1]), one(store)),
        (one(bad[2], load_mode="layerwise"), one(empty)),
    ):
        run = several(folder, *pair, **RECOMPUTE)
        assert run.tokens == first.tokens
        assert run.metrics["vllm:objkv_load_corrupt"] >= 1
        assert not warned(run)
    assert contents(empty) == good, "what a failed load left in blocks is not saved beside it"
