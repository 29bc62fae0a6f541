"""vLLM alone: what the connector's tests take for granted about engines and models."""

from pathlib import Path

import pytest

from tests.engine import model
from tests.engine.cache import Values, scenario
from tests.engine.harness import run_replica, run_replicas
from tests.engine.job import Generate, Job, Prompt, ResetPrefixCache, Settle
from tests.engine.prompts import prompt_of

LENGTHS = (1, 31, 32, 33, 64, 257, 1000)
MODELS: tuple[model.ModelName, ...] = ("llama", "gpt_oss")
"""Of the others tokens are no evidence by themselves: those of latents depend on what else is in a
step, those of linear attention on its length."""


@scenario
def two_replicas_alone(folder: Path, name: model.ModelName) -> Values:
    prompts = tuple(prompt_of(length) for length in LENGTHS)
    job = Job(model=name, steps=(Generate(prompts=prompts),))
    return dict(zip(("one", "other"), run_replicas([job, job], folder), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_two_processes_generate_the_same_tokens(name: model.ModelName) -> None:
    runs = two_replicas_alone(name)
    assert runs["one"].tokens == runs["other"].tokens
    assert all(len(tokens) == Prompt(tokens=()).max_tokens for tokens in runs["one"].tokens)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_vary_with_the_prompt_so_that_they_are_evidence(name: model.ModelName) -> None:
    tokens = two_replicas_alone(name)["one"].tokens
    assert len(set(tokens)) == len(LENGTHS)
    assert all(len(set(one)) > 1 for one in tokens)


@scenario
def one_replica_step_by_step(folder: Path) -> Values:
    long = prompt_of(320)
    late = prompt_of(96, seed=1).model_copy(update={"after_steps": 3})
    doomed = prompt_of(64, seed=2, max_tokens=100).model_copy(update={"abort_after_steps": 5})
    steps = (
        Generate(prompts=(long, late, doomed)),
        Generate(prompts=(long,)),
        ResetPrefixCache(),
        Generate(prompts=(long,)),
        Settle(),
    )
    return {"run": run_replica(Job(steps=steps), folder)}


def test_the_own_prefix_cache_answers_until_it_is_reset() -> None:
    run = one_replica_step_by_step()["run"]
    assert run.answers == (True, True)
    first, again, afresh = (outputs[0] for outputs in run.outputs)
    assert (first.cached_tokens, again.cached_tokens, afresh.cached_tokens) == (0, 288, 0)
    assert first.tokens == again.tokens == afresh.tokens


def test_prompts_arrive_late_and_are_aborted_as_the_job_says() -> None:
    run = one_replica_step_by_step()["run"]
    _, late, doomed = run.outputs[0]
    assert late.finish_reason == "length"
    assert doomed.finish_reason == "abort"
    assert len(doomed.tokens) == 5
