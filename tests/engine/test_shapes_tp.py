"""Two tensor-parallel ranks: each saves its own heads, and loads them in another replica."""

from pathlib import Path
from typing import Any

from tests.engine.cache import Values, scenario
from tests.engine.fleet import SAVED, SharedStore
from tests.engine.harness import run_replica
from tests.engine.job import Generate, Job, ResetPrefixCache, Settle, Step
from tests.engine.prompts import prompt_of

PROMPTS = (prompt_of(300), prompt_of(600, seed=1))
LOADED = [256, 512]
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@scenario
def two_ranks_and_one(folder: Path) -> Values:
    store = SharedStore(folder / "store")

    def job(*steps: Step, engine: dict[str, Any] | None = None, **settings: Any) -> Job:
        job = store.job(*steps, engine=engine, chunk_tokens=256, **settings)
        environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if engine else {}
        return job.model_copy(update={"env": environment, "timeout_s": 1_500.0})

    generate = (Generate(prompts=PROMPTS), Settle())
    first = run_replica(job(*generate, engine=TWO_RANKS), folder)
    shards = [sorted({path.stem for path in store.payloads()})]
    layers = job(*generate, engine=TWO_RANKS, load_mode="layerwise")
    second = run_replica(layers, folder)
    alone = run_replica(job(*generate, SAVED, ResetPrefixCache(), *generate), folder)
    shards.append(sorted({path.stem for path in store.payloads()}))
    return {
        "first": first,
        "second": second,
        "alone": alone,
        "shards": shards,
        "payloads": len(store.payloads()),
        "namespaces": len(store.namespaces()),
    }


def test_each_rank_saves_its_heads() -> None:
    runs = two_ranks_and_one()
    assert runs["first"].cached == [0, 0]
    assert runs["shards"][0] == ["0.L0-3_H0-2", "0.L0-3_H2-4"]


def test_each_rank_of_another_replica_loads_its_heads() -> None:
    runs = two_ranks_and_one()
    assert runs["second"].cached == LOADED
    assert runs["second"].tokens == runs["first"].tokens


def test_one_rank_alone_does_not_load_halves_and_saves_beside_them() -> None:
    runs = two_ranks_and_one()
    assert runs["alone"].cached == [0, 0, *LOADED]
    assert runs["alone"].tokens == runs["first"].tokens * 2
    assert runs["shards"][1] == ["0.L0-3_H0-2", "0.L0-3_H0-4", "0.L0-3_H2-4"]
    assert runs["payloads"] == 3 * 3
    assert runs["namespaces"] == 1
