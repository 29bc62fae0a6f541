"""A replica loads what was measured to be sooner loaded than computed, and nothing else."""

from pathlib import Path

from objkv.cache.admission import OBSERVATIONS_MIN, STEP_TOKENS_MIN
from tests.engine.cache import Values, scenario
from tests.engine.fleet import CHUNK, NUMBERS_TOLD, SharedStore, one_by_one
from tests.engine.harness import run_replica
from tests.engine.job import Call, Step
from tests.engine.prompts import prompt_of

CHUNKS = 4
STORED = [prompt_of(CHUNKS * CHUNK + 9, seed=seed) for seed in range(OBSERVATIONS_MIN + 2)]
FRESH = [prompt_of(CHUNKS * CHUNK + 9, seed=100 + seed) for seed in range(OBSERVATIONS_MIN)]
SLOW_S = 6.0
"""Longer than even a busy machine takes to compute a prompt, but for the first, of which there are
enough others."""
LOADED, TESTED = CHUNKS * CHUNK, OBSERVATIONS_MIN


def _orders(store: SharedStore) -> list[Step]:
    """Prompts before an operator's order, under it, and after its end."""
    at = ("--bulk-url", f"file://{store.bulk}", "--index-url", f"sqlite://{store.index_file}")

    def order(*words: str) -> Call:
        arguments = {"words": [*words, *at]}
        return Call(function="tests.engine.fleet:order_admission", arguments=arguments)

    before, under, after = (one_by_one([prompt]) for prompt in STORED[:3])
    return [*before, order("never", "--for", "1h"), *under, order("clear"), *after]


@scenario
def admission(folder: Path) -> Values:
    store = SharedStore(folder / "store")
    saved = run_replica(store.job(*one_by_one(STORED)), folder / "saved")
    slow = Call(function="tests.engine.fleet:slow_gets", arguments={"seconds": SLOW_S})
    steps = (*one_by_one(FRESH), slow, *one_by_one(STORED), NUMBERS_TOLD)
    return {
        "saved": saved,
        "auto": run_replica(store.job(*steps, admission="auto"), folder / "auto"),
        "ordered": run_replica(store.job(*_orders(store), admission="always"), folder / "ordered"),
        "never": run_replica(store.job(*one_by_one(STORED), admission="never"), folder / "never"),
    }


def test_a_store_slower_than_computing_is_measured_and_then_left_alone() -> None:
    assert CHUNKS * CHUNK >= STEP_TOKENS_MIN
    run, saved = admission()["auto"], admission()["saved"]
    cached = run.cached[len(FRESH) : len(FRESH) + len(STORED)]
    assert cached == [LOADED] * TESTED + [0] * (len(STORED) - TESTED)
    assert run.tokens[len(FRESH) : len(FRESH) + len(STORED)] == saved.tokens


def test_what_was_refused_is_counted() -> None:
    metrics = admission()["auto"].metrics
    refused = len(STORED) - TESTED
    assert metrics["vllm:objkv_admission_refused"] == refused
    assert metrics["vllm:objkv_admission_refused_tokens"] == refused * LOADED


def test_never_loads_nothing_and_answers_the_same() -> None:
    run, saved = admission()["never"], admission()["saved"]
    assert run.cached == [0] * len(STORED)
    assert run.tokens == saved.tokens


def test_an_operators_order_goes_before_the_settings_of_a_running_replica() -> None:
    run, saved = admission()["ordered"], admission()["saved"]
    assert run.cached == [LOADED, 0, LOADED]
    assert run.tokens == saved.tokens[:3]
