"""Encoder outputs that one replica made are another's: never encoded again, never wrong.

Greedy tokens change with the image (``test_the_tokens_show_which_image_was_seen``), so equal tokens
show equal outputs.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.engine import fleet
from tests.engine.harness import run_replica
from tests.engine.job import Call, Generate, Prompt, Result
from tests.engine.scenario import Values, scenario
from tests.engine.vision_model import encoder, extra, job, see

pytestmark = pytest.mark.slow
ONE, OTHER, THIRD, BOTH = (1,), (2,), (3,), (1, 2)
SEEN = see(ONE, OTHER, BOTH, ONE)
TOLD = Generate(prompts=(Prompt(tokens=(9,), max_tokens=1),))
"""What was counted in the background reaches vLLM's metrics with the next step."""


def answer(run: Result, at: int = 0) -> dict[str, Any]:
    """What came of its ``at``-th ``see``."""
    found: list[dict[str, Any]] = [one for one in run.answers if one is not None]
    return found[at]


def count(run: Result, name: str) -> float:
    return run.metrics.get(f"vllm:objkv_encoder_{name}", 0.0)


def payloads(store: Path) -> list[Path]:
    return sorted(store.glob("chunks/*/*/*/*.safetensors"))


@scenario
def shared(folder: Path) -> Values:
    """Alone; the first that sees; one that finds it all; one for whom it is all zeros."""
    transfer = encoder(folder / "store")
    zeros = Call(function="tests.engine.vision_model:zero_loads")
    return {
        "alone": run_replica(job(SEEN), folder),
        "first": run_replica(job(SEEN, TOLD, transfer=transfer), folder),
        "documents": len(list(folder.glob("store/chunks/*/identity.json"))),
        "second": run_replica(job(SEEN, TOLD, transfer=transfer), folder),
        "zeros": run_replica(job(zeros, SEEN, transfer=transfer), folder),
    }


def test_the_tokens_show_which_image_was_seen() -> None:
    one, other, both, again = answer(shared()["alone"])["tokens"]
    assert one == again
    assert len({tuple(one), tuple(other), tuple(both)}) == 3
    assert answer(shared()["zeros"])["tokens"][0] != one


def test_the_second_replica_encodes_nothing_and_generates_the_same() -> None:
    alone, first, second = (shared()[name] for name in ("alone", "first", "second"))
    assert answer(alone)["encoded"] == answer(first)["encoded"] == 2
    assert answer(second)["encoded"] == 0
    assert answer(first)["tokens"] == answer(second)["tokens"] == answer(alone)["tokens"]
    assert set(answer(second)["finished"]) == {"length"}
    assert (count(first, "saves_accepted"), count(first, "hits")) == (2, 0)
    assert [count(second, name) for name in ("saves_accepted", "hits", "loads")] == [0, 2, 2]
    assert shared()["documents"] == 1


@scenario
def in_processes(folder: Path) -> Values:
    """Scheduler and two workers in processes of their own: one image is loaded, one is saved."""
    transfer = encoder(folder / "store")
    run_replica(job(see(ONE), transfer=transfer), folder)
    two = {"tensor_parallel_size": 2}
    seen = job(SEEN, TOLD, transfer=transfer, processes=True, engine=two)
    values: Values = {"two": run_replica(seen, folder)}
    return values | {"payloads": len(payloads(folder / "store"))}


def test_outputs_cross_from_the_scheduler_to_every_rank() -> None:
    runs = in_processes()
    assert answer(runs["two"])["tokens"] == answer(shared()["alone"])["tokens"]
    assert count(runs["two"], "hits") == 1
    assert runs["payloads"] == 2  # saved once, by one of the ranks


@scenario
def beside_kv(folder: Path) -> Values:
    """Both connectors on one store. Chunks of 32 tokens: one ends before the image, or after it."""
    store = folder / "store"
    kv = {
        "kv_connector": fleet.CONNECTOR,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra(store, chunk_tokens=32, **fleet.PATIENT),
    }
    before, within = see(ONE, OTHER, head=40), see(ONE, OTHER, head=12, tail=60)
    values: Values = {}
    asked = see(ONE, OTHER, THIRD, head=12, tail=60)
    values["alone"] = run_replica(job(before, within, asked), folder)
    for name in ("first", "second"):
        both = job(before, within, TOLD, transfer=encoder(store), kv=kv)
        values[name] = run_replica(both, folder)
    covered = job(asked, TOLD, transfer=encoder(store), kv=kv)
    values["covered"] = run_replica(covered, folder)
    return values


def test_beside_the_kv_connector_both_hit() -> None:
    runs = beside_kv()
    for at in (0, 1):
        alone, second = answer(runs["alone"], at), answer(runs["second"], at)
        assert second["tokens"] == answer(runs["first"], at)["tokens"] == alone["tokens"]
        assert second["encoded"] == 0
    assert answer(runs["second"], 0)["cached"] == [32, 32]
    assert count(runs["second"], "hits") == 2


def test_an_image_that_the_kv_covers_is_neither_encoded_nor_loaded_and_another_is_not_it() -> None:
    covered = beside_kv()["covered"]
    assert answer(covered)["cached"] == [64, 64, 0]
    assert answer(covered)["encoded"] == 1
    assert count(covered, "loads") == 0
    assert answer(covered)["tokens"] == answer(beside_kv()["alone"], 2)["tokens"]
