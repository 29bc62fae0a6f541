"""objkv's tier below vLLM's own offloading: replicas share what vLLM put into its CPU memory."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine import model
from tests.engine.cache import Values, scenario
from tests.engine.fleet import SharedStore
from tests.engine.harness import run_replica, run_replicas
from tests.engine.job import Call, Generate, Job, ResetPrefixCache, Settle
from tests.engine.model import ModelName
from tests.engine.prompts import prompt_of
from tests.engine.test_multi_stores import several
from tests.engine.tiered import ENVIRONMENT, offloading, tiered

CHUNK = 128
"""Four blocks."""
PROMPTS = (prompt_of(300), prompt_of(600, seed=1))
ASK = (Generate(prompts=PROMPTS), Settle())
POISON = Call(function="tests.engine.tiered:poison")
DRAFT_K = 2
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


def engine_of(kind: str) -> dict[str, Any]:
    if kind != "draft":
        return {}
    draft = {"method": "draft_model", "model": str(model.make("llama_draft"))}
    return {"speculative_config": draft | {"num_speculative_tokens": DRAFT_K}}


@scenario
def shared(folder: Path, kind: str) -> Values:
    """One replica saves, a fresh one loads, and repeats this after its CPU memory was changed."""
    store = SharedStore(folder / "store")
    name: ModelName = "gpt_oss" if kind == "gpt_oss" else "llama"
    update: dict[str, Any] = {"model": name, "engine": engine_of(kind)}
    options: dict[str, Any] = {"chunk_tokens": CHUNK} if kind == "chunks" else {}
    if kind == "draft":
        options["settings"] = {"speculative": "draft-1"}
    again = (ResetPrefixCache(), POISON, *ASK)
    alone, saver = run_replicas(
        [
            Job(steps=ASK).model_copy(update=update),
            tiered(store, *ASK, **options).model_copy(update=update),
        ],
        folder,
    )
    saved = len(store.payloads())
    loader = tiered(store, *ASK, *again, **options).model_copy(update=update)
    values: Values = {"alone": alone, "saver": saver, "loader": run_replica(loader, folder)}
    return values | {"payloads": [saved, len(store.payloads())]}


CACHED = {"chunks": [256, 512], "gpt_oss": [288, 576], "draft": [288, 576]}


@pytest.mark.parametrize("kind", CACHED)
def test_a_fresh_replica_loads_what_another_saved_and_answers_the_same(kind: str) -> None:
    runs = shared(kind)
    assert runs["saver"].cached == [0, 0]
    assert runs["saver"].tokens == runs["alone"].tokens
    assert runs["loader"].cached[:2] == CACHED[kind]
    assert runs["loader"].tokens[:2] == runs["alone"].tokens
    assert runs["payloads"][0] == runs["payloads"][1] > 0


@pytest.mark.parametrize("kind", CACHED)
def test_other_bytes_in_vllms_memory_give_other_tokens(kind: str) -> None:
    runs = shared(kind)
    assert runs["loader"].cached[2:] == CACHED[kind]
    assert runs["loader"].tokens[2:] != runs["alone"].tokens


@scenario
def across_ranks(folder: Path) -> Values:
    """Replicas of one rank, of two, and of one again; each also has a prompt of its own."""
    store = SharedStore(folder / "store")
    one, two = ((Generate(prompts=(prompt,)), Settle()) for prompt in PROMPTS)
    ranks = tiered(store, *one, *two, canonical=True).model_copy(update={"engine": TWO_RANKS})
    first = run_replica(tiered(store, *one, canonical=True), folder)
    values: Values = {"first": first, "two": run_replica(ranks, folder)}
    both = several(offloading(store, canonical=True), one_connector(folder))
    one_again = tiered(store, *one, *two, canonical=True)
    jobs = [one_again, Job(steps=ASK, connector=both, env=ENVIRONMENT)]
    values["last"], values["multi"] = run_replicas(jobs, folder)
    return values | {"namespaces": len(store.namespaces())}


def one_connector(folder: Path) -> dict[str, Any]:
    connector = SharedStore(folder / "other").job().connector
    assert connector is not None
    return connector


@pytest.mark.wide
def test_with_a_canonical_layout_replicas_of_one_and_of_two_ranks_share() -> None:
    runs, alone = across_ranks(), shared("chunks")["alone"]
    assert runs["namespaces"] == 1
    assert runs["first"].tokens == alone.tokens[:1]
    assert runs["two"].cached == [288, 0]
    assert runs["last"].cached == [288, 576]
    assert runs["two"].tokens == runs["last"].tokens == alone.tokens


@pytest.mark.wide
def test_one_of_several_connectors_loads_what_a_tier_saved() -> None:
    run = across_ranks()["multi"]
    assert run.cached == [288, 576]
    assert run.tokens == shared("chunks")["alone"].tokens
    assert run.metrics["vllm:objkv_saves"] > 0
