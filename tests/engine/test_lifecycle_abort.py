"""Requests that are aborted while their prefix is on its way leave nothing behind."""

from pathlib import Path
from typing import Any

from tests.engine.cache import Values, scenario
from tests.engine.fleet import CHUNK, FREE_BLOCKS, PATIENT, SAVED, SharedStore, asked, one_by_one
from tests.engine.harness import run_replica, run_replicas
from tests.engine.job import (
    Call,
    Generate,
    Job,
    Prompt,
    ResetPrefixCache,
    Result,
    Settle,
    Step,
    Touch,
)
from tests.engine.prompts import prompt_of

CHUNKS = 5
STORED = prompt_of(CHUNKS * CHUNK + 9)
SMALL = {"num_gpu_blocks_override": 64, "max_model_len": 1984}
EARLY = STORED.model_copy(update={"abort_after_steps": 1})
BESIDE = prompt_of(2 * CHUNK + 9, seed=1)
FILLING = prompt_of(1900, seed=2)
"""Needs almost all blocks, those of the aborted requests included."""


def during(gate: Path) -> Prompt:
    """The stored prompt, aborted when somebody waits at the gate and nothing else is left to do."""
    return STORED.model_copy(update={"abort_when": asked(gate)})


def hold(gate: Path) -> Call:
    return Call(function="tests.engine.fleet:hold_gets", arguments={"gate": str(gate)})


def steps(folder: Path, *, beside: tuple[Any, ...]) -> tuple[Step, ...]:
    return (
        Generate(prompts=(*beside, BESIDE)),
        Settle(),
        FREE_BLOCKS,
        Generate(prompts=(FILLING,)),
        Touch(path=folder / "gate"),
        Call(function="tests.engine.fleet:end_loads"),
        Generate(prompts=(FILLING,)),
        SAVED,
        Settle(),
        ResetPrefixCache(),
        Generate(prompts=(STORED,)),
        Settle(),
        ResetPrefixCache(),
        FREE_BLOCKS,
    )


@scenario
def aborted_while_loading(folder: Path) -> Values:
    store = SharedStore(folder / "store")
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    alone, _ = run_replicas(
        [
            Job(steps=steps(elsewhere, beside=()), engine=SMALL),
            store.job(*one_by_one([STORED])),
        ],
        folder,
    )
    gate, never = folder / "gate", folder / "never"
    job = store.job(
        hold(gate),
        *steps(folder, beside=(EARLY, during(gate))),
        hold(never),
        Generate(prompts=(during(never),)),
        engine=SMALL,
    )
    return {"alone": alone, "run": run_replica(job, folder)}


def test_other_requests_are_served_while_a_load_is_stuck() -> None:
    run, alone = (aborted_while_loading()[name] for name in ("run", "alone"))
    early, stuck, beside = run.outputs[0]
    assert (early.finish_reason, stuck.finish_reason) == ("abort", "abort")
    assert stuck.tokens == ()
    assert beside.tokens == alone.outputs[0][0].tokens
    assert beside.steps <= stuck.steps


def test_the_load_was_under_way_when_its_request_was_aborted() -> None:
    metrics = aborted_while_loading()["run"].metrics
    assert metrics["vllm:objkv_hit_tokens"] >= 2 * CHUNKS * CHUNK


def test_an_aborted_load_gives_its_blocks_back_at_once() -> None:
    run: Result = aborted_while_loading()["run"]
    free = [answer for answer in run.answers if type(answer) is int]
    assert free == [63, 63]  # vLLM keeps one block as the null block
    assert all(answer is not False for answer in run.answers)


def test_a_late_answer_writes_into_no_block_of_another_request() -> None:
    run, alone = (aborted_while_loading()[name] for name in ("run", "alone"))
    assert run.tokens[3:5] == alone.tokens[1:3]
    filling_again = run.cached[4]
    assert filling_again is not None
    assert filling_again > 1800


def test_the_aborted_prompt_is_loaded_when_asked_for_again() -> None:
    run, alone = (aborted_while_loading()[name] for name in ("run", "alone"))
    assert run.tokens[5] == alone.tokens[3]
    assert run.cached[5] == CHUNKS * CHUNK


def test_a_replica_stops_although_a_load_is_stuck() -> None:
    assert aborted_while_loading()["run"].seconds["stop"] < PATIENT["drain_deadline_ms"] / 1000
