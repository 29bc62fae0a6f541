"""One replica saves, another process loads: prompts of all lengths, in every load mode."""

from pathlib import Path

import pytest

from tests.engine.cache import Values, scenario
from tests.engine.fleet import (
    BLOCK,
    CHUNK,
    METRICS,
    NUMBERS_TOLD,
    SAVED,
    SharedStore,
    one_by_one,
)
from tests.engine.harness import run_replica, run_replicas
from tests.engine.job import Generate, Job, Prompt, ResetPrefixCache, Result, Step
from tests.engine.prompts import prompt_of, tokens_of

MODES = ("async", "layerwise", "auto")
LENGTHS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 4 * CHUNK, 5 * CHUNK + 40)
SAVED_PROMPTS = [prompt_of(length, seed=seed) for seed, length in enumerate(LENGTHS)]
LONG = SAVED_PROMPTS[-1]
FORKS = {
    "inside a chunk": 2 * CHUNK + 44,
    "between chunks": 3 * CHUNK,
    "inside the first": CHUNK - 1,
}
"""Where another prompt leaves the long one."""


def fork_of(prompt: Prompt, at: int) -> Prompt:
    """A prompt as long that shares the first ``at`` tokens and no other."""
    return Prompt(tokens=prompt.tokens[:at] + tokens_of(len(prompt.tokens), seed=99)[at:])


FORKED = [fork_of(LONG, at) for at in FORKS.values()]
HEAD = Prompt(tokens=LONG.tokens[: CHUNK + 2 * BLOCK])
"""Ends inside the long prompt's second chunk."""
LATE = LONG.model_copy(update={"after_steps": 2})
TWINS = prompt_of(3 * CHUNK + 5, seed=50)

SAVES = 1 + 1 + 4 + 5
"""Whole chunks of the prompts that the first replica saved one by one."""

STEPS: tuple[Step, ...] = (
    *one_by_one([*SAVED_PROMPTS, *FORKED, *FORKED]),
    METRICS,
    Generate(prompts=(HEAD,)),
    METRICS,
    Generate(prompts=(LONG,)),
    METRICS,
    ResetPrefixCache(),
    Generate(prompts=(LONG, LONG, LATE)),
)


@scenario
def saved_and_loaded(folder: Path) -> Values:
    store = SharedStore(folder / "store")
    saver = store.job(
        *one_by_one(SAVED_PROMPTS),
        Generate(prompts=(TWINS, TWINS)),
        SAVED,
        NUMBERS_TOLD,
        transfer={"kv_connector_module_path": "objkv.connector"},
    )
    alone, first = run_replicas([Job(steps=STEPS), saver], folder)
    values: Values = {"alone": alone, "first": first, "files": len(store.payloads())}
    values["bytes"] = store.payload(LONG, 1).stat().st_size
    for mode in MODES:
        copy = store.copy(folder / mode)
        values[mode] = run_replica(copy.job(*STEPS, load_mode=mode), folder)
        values[f"files {mode}"] = len(copy.payloads())
    return values


def cached(mode: str) -> dict[str, list[int | None]]:
    """What was cached, by part of the job."""
    found = saved_and_loaded()[mode].cached
    saved, forks = len(SAVED_PROMPTS), len(FORKED)
    return {
        "saved": found[:saved],
        "forks": found[saved : saved + forks],
        "forks again": found[saved + forks : saved + 2 * forks],
        "head, then all": found[saved + 2 * forks :][:2],
        "at once": found[-3:],
    }


def counted(run: Result, name: str) -> list[float]:
    """A counter of objkv before and after the two prompts that share a head, and at the end."""
    key = f"vllm:objkv_{name}"
    return [*(a[key] for a in run.answers if isinstance(a, dict)), run.metrics[key]]


@pytest.mark.parametrize("mode", MODES)
def test_whatever_is_loaded_the_tokens_are_those_of_a_replica_alone(mode: str) -> None:
    assert saved_and_loaded()[mode].tokens == saved_and_loaded()["alone"].tokens


def test_saving_changes_no_token_and_loads_nothing() -> None:
    run, alone = saved_and_loaded()["first"], saved_and_loaded()["alone"]
    assert run.tokens[: len(SAVED_PROMPTS)] == alone.tokens[: len(SAVED_PROMPTS)]
    assert run.tokens[-3] == run.tokens[-2]
    assert run.cached[: len(SAVED_PROMPTS)] == [0] * len(SAVED_PROMPTS)
    assert not run.metrics.get("vllm:objkv_loads")


def test_every_whole_chunk_is_saved_and_no_other() -> None:
    assert saved_and_loaded()["files"] == SAVES + len(TWINS.tokens) // CHUNK


def test_two_equal_prompts_at_once_are_written_once() -> None:
    values = saved_and_loaded()
    assert values["first"].metrics["vllm:objkv_saves"] == values["files"]


@pytest.mark.parametrize("mode", ["async", "auto"])
def test_between_steps_every_whole_chunk_is_loaded_up_to_the_whole_prompt(mode: str) -> None:
    assert cached(mode)["saved"] == [0, 0, CHUNK, CHUNK, 4 * CHUNK, 5 * CHUNK]


def test_within_a_step_at_least_one_token_is_left_to_compute() -> None:
    whole = [0, 0, CHUNK - BLOCK, CHUNK, 4 * CHUNK - BLOCK, 5 * CHUNK]
    assert cached("layerwise")["saved"] == whole


@pytest.mark.parametrize("mode", MODES)
def test_a_fork_loads_the_chunks_before_it(mode: str) -> None:
    assert cached(mode)["forks"] == [2 * CHUNK, 3 * CHUNK, 0]


@pytest.mark.parametrize("mode", MODES)
def test_what_a_loading_replica_computed_it_saves_and_loads_again(mode: str) -> None:
    assert cached(mode)["forks again"] == [5 * CHUNK] * len(FORKED)
    new = sum(5 - at // CHUNK for at in FORKS.values())
    assert saved_and_loaded()[f"files {mode}"] == saved_and_loaded()["files"] + new


@pytest.mark.parametrize("mode", MODES)
def test_what_is_in_the_own_cache_is_not_loaded_again(mode: str) -> None:
    run, nbytes = saved_and_loaded()[mode], saved_and_loaded()["bytes"]
    assert cached(mode)["head, then all"] == [CHUNK, 5 * CHUNK]
    before, head, both, _ = counted(run, "hit_tokens")
    assert (head - before, both - head) == (CHUNK, 5 * CHUNK - len(HEAD.tokens))
    before, head, both, _ = counted(run, "load_bytes")
    assert (head - before, both - head) == (nbytes, 4 * nbytes)


@pytest.mark.parametrize("mode", MODES)
def test_prompts_at_once_with_one_prefix_all_find_it(mode: str) -> None:
    found = [tokens or 0 for tokens in cached(mode)["at once"]]
    computed = len(LONG.tokens) // BLOCK * BLOCK
    # Whoever is looked up first loads, which need not be who came first. The others load as well,
    # or find in the replica's own cache what the first has by then.
    assert min(found) == 5 * CHUNK
    assert set(found) <= {5 * CHUNK, computed}


@pytest.mark.parametrize("mode", MODES)
def test_no_load_fails(mode: str) -> None:
    metrics = saved_and_loaded()[mode].metrics
    assert metrics["vllm:objkv_loads"] > 0
    assert not [name for name, n in metrics.items() if n and "fail" in name and "objkv" in name]
