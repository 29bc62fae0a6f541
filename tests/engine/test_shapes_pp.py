"""Two stages of a pipeline: each saves its own layers, and loads them in another replica."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.cache import Values, scenario
from tests.engine.endings import waits_for_objkv
from tests.engine.fleet import SAVED, SharedStore
from tests.engine.harness import run_replica
from tests.engine.job import Call, Generate, Job, ResetPrefixCache, Settle, Step
from tests.engine.model import ModelName
from tests.engine.prompts import prompt_of

PROMPTS = (prompt_of(300), prompt_of(600, seed=1))
LOADED = [256, 512]
SHARDS = {
    "llama": ["0.L0-2_H0-4", "0.L2-3_H0-4"],
    "gpt_oss": ["0.L0-1_H0-4", "0.L1-2_H0-4", "1.L0-1_H0-4", "1.L1-2_H0-4"],
}
pytestmark = pytest.mark.wide
EACH_MODEL = pytest.mark.parametrize("model", ["llama", "gpt_oss"])
TWO_STAGES: dict[str, Any] = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
BUFFERS = Call(function="tests.engine.pipeline:make_buffers")


@scenario
def two_stages_and_one(folder: Path, model: ModelName) -> Values:
    store = SharedStore(folder / "store")

    def job(*steps: Step, engine: dict[str, Any] | None = None) -> Job:
        job = store.job(*steps, engine=engine, chunk_tokens=256)
        # vLLM kills a stage that does not end; nothing is left to be saved when it is told to.
        stages = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "90"}
        environment = stages if engine else {}
        update = {"env": environment, "timeout_s": 1_500.0, "model": model}
        return job.model_copy(update=update)

    generate = (Generate(prompts=PROMPTS), Settle())
    again = (SAVED, ResetPrefixCache(), *generate)
    first = run_replica(job(BUFFERS, *generate, *again, engine=TWO_STAGES), folder)
    shards = sorted({path.stem for path in store.payloads()})
    alone = run_replica(job(*generate), folder)
    return {
        "first": first,
        "alone": alone,
        "shards": shards,
        "namespaces": len(store.namespaces()),
    }


@EACH_MODEL
def test_each_stage_saves_its_layers(model: ModelName) -> None:
    runs = two_stages_and_one(model)
    assert runs["first"].answers[0] == [False, True]
    assert runs["first"].cached[:2] == [0, 0]
    assert runs["shards"] == SHARDS[model]


@EACH_MODEL
def test_each_stage_loads_its_layers(model: ModelName) -> None:
    first = two_stages_and_one(model)["first"]
    assert first.cached[2:] == LOADED
    assert first.tokens[2:] == first.tokens[:2]


@EACH_MODEL
def test_a_replica_of_one_stage_loads_what_both_saved(model: ModelName) -> None:
    runs = two_stages_and_one(model)
    assert runs["alone"].cached == LOADED
    assert runs["alone"].tokens == runs["first"].tokens[:2]
    assert runs["namespaces"] == 1


@EACH_MODEL
def test_where_a_stage_waits_at_its_end_is_not_in_objkv(model: ModelName) -> None:
    assert not waits_for_objkv(two_stages_and_one(model)["first"].log)
