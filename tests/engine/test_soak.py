"""A random life over a store that fails: no wrong token in a real engine, and nothing left held."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine.cache import Values, scenario
from tests.engine.fleet import SAVED, SharedStore, one_by_one
from tests.engine.harness import run_replicas
from tests.engine.job import Call, Job, Prompt, Result, Settle
from tests.engine.model import ModelName
from tests.engine.prompts import tokens_of

PROMPTS = 30
REQUESTS = 400
CHUNK = 64
LONGEST = 96
"""Tokens of the longest answers: several blocks, so that room runs out for many while they run."""
CROWDED: dict[str, Any] = {
    "num_gpu_blocks_override": 60,
    "max_model_len": 832,
    "max_num_batched_tokens": 256,
}
LIVES: dict[str, dict[str, Any]] = {
    # Loads that are given up while they are under way, and a queue that overflows.
    "async": {"load_deadline_ms": 300, "lookup_deadline_ms": 100, "save_queue_max": 4},
    "auto": {"step_load_deadline_ms": 300},
}
pytestmark = pytest.mark.wide
CASES = [("llama", "async"), ("llama", "auto"), ("gpt_oss", "async")]


def prompts(seed: int) -> list[Prompt]:
    """On four stems, some of whole chunks, some not."""
    source = random.Random(seed)
    drawn = []
    for _ in range(PROMPTS):
        stem = tokens_of(640, seed=50 + source.randrange(4))
        cut = source.choice([100, 3 * CHUNK, 4 * CHUNK, 5 * CHUNK + 13, 7 * CHUNK, 600])
        tail = tokens_of(source.choice([0, 1, 31, CHUNK, 100]), seed=source.randrange(3))
        drawn.append(Prompt(tokens=stem[:cut] + tail, max_tokens=LONGEST))
    return drawn


@scenario
def soak(folder: Path, model: ModelName, mode: str, seed: int) -> Values:
    asked = prompts(seed)
    (alone,) = run_replicas([Job(steps=one_by_one(asked), model=model)], folder)
    spoil = Call(function="tests.engine.soak:spoil_reads", arguments={"seed": seed})
    arguments = {
        "prompts": [prompt.tokens for prompt in asked],
        "expected": alone.tokens,
        "requests": REQUESTS,
        "seed": seed,
    }
    life = Call(function="tests.engine.soak:live", arguments=arguments)
    ended = Call(function="tests.engine.fleet:end_loads")
    leftovers = Call(function="tests.engine.soak:leftovers")
    store = SharedStore(folder / "store")
    job = store.job(
        *(spoil, life, SAVED, Settle(), ended, leftovers),
        engine=CROWDED,
        chunk_tokens=CHUNK,
        load_mode=mode,
        save_decode=True,
        breaker_failures=1_000_000,
        **LIVES[mode],
    )
    (run,) = run_replicas([job.model_copy(update={"model": model})], folder)
    return {"run": run}


@pytest.mark.parametrize(("model", "mode"), CASES)
def test_every_answer_is_that_of_an_engine_alone(model: ModelName, mode: str) -> None:
    life = soak(model, mode, 1)["run"].answers[1]
    assert life["wrong"] == []
    assert life["finished"] >= REQUESTS


@pytest.mark.parametrize(("model", "mode"), CASES)
def test_much_was_shared_and_much_went_wrong(model: ModelName, mode: str) -> None:
    run: Result = soak(model, mode, 1)["run"]
    life = run.answers[1]
    assert min(life[name] for name in ("aborted", "aborted_within_step", "resets")) > 0
    for name in ("hit_tokens", "load_failures", "load_corrupt", "load_ghosts", "saves"):
        assert run.metrics[f"vllm:objkv_{name}"] > 0, name
    assert run.metrics["vllm:num_preemptions"] > 0


@pytest.mark.parametrize(("model", "mode"), CASES)
def test_nothing_is_left_held(model: ModelName, mode: str) -> None:
    run: Result = soak(model, mode, 1)["run"]
    assert set(run.answers[-1].values()) == {0}, run.answers[-1]
    assert not [w for w in run.warnings if w.logger.startswith("objkv") and w.level != "WARNING"]
