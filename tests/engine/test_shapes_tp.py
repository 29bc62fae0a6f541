"""Replicas of one and of two tensor-parallel ranks: each saves what its ranks hold, and loads what
the other saved, head by head the same bytes."""

from itertools import chain
from pathlib import Path
from typing import Any

from tests.engine.cache import Values, scenario
from tests.engine.fleet import CHUNK, SAVED, SharedStore
from tests.engine.harness import run_replica
from tests.engine.job import Call, Generate, Job, ResetPrefixCache, Settle, Step
from tests.engine.pages import HEAD_PAGES, stored_heads
from tests.engine.prompts import prompt_of

PROMPTS = (prompt_of(300), prompt_of(600, seed=1))
LOADED = [256, 512]
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
GENERATE = (Generate(prompts=PROMPTS), Settle())
LOOK = Call(function=HEAD_PAGES, arguments={"prompts": [list(p.tokens) for p in PROMPTS]})
Heads = list[dict[str, list[list[str]]]]
"""Per prompt and layer, for each block, a digest of each head."""


def job(store: SharedStore, *steps: Step, ranks: int, **settings: Any) -> Job:
    engine = TWO_RANKS if ranks == 2 else None
    made = store.job(*steps, engine=engine, **settings)
    environment = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # a function goes to the workers
    if ranks == 2:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    return made.model_copy(update={"env": environment, "timeout_s": 1_500.0})


def stored(store: SharedStore) -> Heads:
    """What the payloads of the prompts hold, their shards side by side."""
    found: Heads = []
    for prompt, end in zip(PROMPTS, LOADED, strict=True):
        layers: dict[str, list[list[str]]] = {}
        for digest in [one.hex() for one in store.hashes(prompt)][: end // CHUNK]:
            shards = sorted(store.bulk.glob(f"*/{digest[:2]}/{digest}/*.safetensors"))
            parts = [stored_heads(shard) for shard in shards]
            for name in parts[0]:
                rows = zip(*(part[name] for part in parts), strict=True)
                layers.setdefault(name, []).extend(list(chain(*row)) for row in rows)
        found.append(layers)
    return found


def shards(store: SharedStore) -> list[str]:
    return sorted({path.stem for path in store.payloads()})


@scenario
def saved_by_two_ranks(folder: Path) -> Values:
    store = SharedStore(folder / "store")
    again = (SAVED, ResetPrefixCache(), *GENERATE)
    first = run_replica(job(store, *GENERATE, *again, ranks=2), folder)
    saved, found = stored(store), shards(store)
    alone = run_replica(job(store, *GENERATE, LOOK, SAVED, ranks=1), folder)
    return {
        "first": first,
        "alone": alone,
        "saved": saved,
        "shards": [found, shards(store)],
        "namespaces": len(store.namespaces()),
    }


@scenario
def saved_by_one_rank(folder: Path) -> Values:
    store = SharedStore(folder / "store")
    alone = run_replica(job(store, *GENERATE, ranks=1), folder)
    saved, found = stored(store), shards(store)
    steps = (*GENERATE, LOOK, SAVED)
    two = run_replica(job(store, *steps, ranks=2, load_mode="layerwise"), folder)
    return {
        "alone": alone,
        "two": two,
        "saved": saved,
        "shards": [found, shards(store)],
    }


def test_each_rank_saves_its_heads() -> None:
    runs = saved_by_two_ranks()
    assert runs["first"].cached[:2] == [0, 0]
    assert runs["shards"][0] == ["0.L0-3_H0-2", "0.L0-3_H2-4"]


def test_each_rank_loads_its_heads() -> None:
    first = saved_by_two_ranks()["first"]
    assert first.cached[2:] == LOADED
    assert first.tokens[2:] == first.tokens[:2]


def test_one_rank_loads_what_two_saved_and_has_nothing_to_save() -> None:
    runs = saved_by_two_ranks()
    assert runs["namespaces"] == 1
    assert runs["alone"].cached == LOADED
    assert runs["alone"].tokens == runs["first"].tokens[:2]
    assert runs["shards"][1] == runs["shards"][0]
    assert same_heads(runs["alone"].answers[1], runs["saved"], count=4)


def test_two_ranks_load_what_one_saved_within_the_step() -> None:
    runs = saved_by_one_rank()
    assert runs["shards"] == [["0.L0-3_H0-4"]] * 2
    assert runs["two"].cached == LOADED
    assert runs["two"].tokens == runs["alone"].tokens
    assert same_heads(runs["two"].answers[1], runs["saved"], count=4)


def same_heads(pages: Heads, saved: Heads, *, count: int) -> bool:
    """Whether every head of every stored block is in the pages, byte for byte, all of them
    different from each other."""
    for mine, theirs, end in zip(pages, saved, LOADED, strict=True):
        assert set(mine) == set(theirs)
        for name, blocks in theirs.items():
            assert len(blocks) == end // 32
            assert all(len(set(heads)) == count for heads in blocks)
            if mine[name][: len(blocks)] != blocks:
                return False
    return True
