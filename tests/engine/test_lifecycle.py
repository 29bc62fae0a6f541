"""Requests that are preempted, aborted, late or many at once get their tokens, and leave nothing
behind."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from objkv.stores.local import LocalStore
from tests.engine.fleet import (
    BLOCK,
    CHUNK,
    FREE_BLOCKS,
    NUMBERS_TOLD,
    PATIENT,
    SAVED,
    SharedStore,
    one_by_one,
)
from tests.engine.harness import run_replica
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
from tests.engine.prompts import prompt_of, tokens_of
from tests.engine.scenario import Values, scenario
from tests.engine.speculation import make_pair
from tests.support.served import ServedAgent

pytestmark = pytest.mark.slow
MODES = ("async", "layerwise")
FORGET = (SAVED, Settle(), ResetPrefixCache())

CHUNKS = 5
STORED = prompt_of(CHUNKS * CHUNK + 9)
LONGER = Prompt(tokens=STORED.tokens[: CHUNKS * CHUNK] + tokens_of(200, seed=9))
SMALL = {"num_gpu_blocks_override": 64, "max_model_len": 1984}
EARLY = STORED.model_copy(update={"abort_after_steps": 1})
BESIDE = prompt_of(2 * CHUNK + 9, seed=1)
FILLING = prompt_of(1900, seed=2)
"""Needs almost all blocks, those of the aborted requests included."""


OTHER = prompt_of(CHUNKS * CHUNK + 9, seed=3)


def during(prompt: Prompt, gate: Path) -> Prompt:
    """A stored prompt, aborted when its load waits at the gate and nothing else is left to do."""
    return prompt.model_copy(update={"abort_when": asked(gate)})


def asked(gate: Path) -> Path:
    return gate.with_name(f"{gate.name}.asked")


@contextmanager
def agent_with_gates(store: SharedStore, first: Path, last: Path) -> Iterator[str]:
    """An agent that reads no payload until the file ``first`` exists, nor while ``last`` does: who
    waits makes the file ``asked``. Yields its URL."""
    get = LocalStore.get_into

    def wait_and_get(*args: Any, **options: Any) -> Any:
        while (gate := first if not first.exists() else last) is first or last.exists():
            asked(gate).touch()
            time.sleep(0.005)
        return get(*args, **options)

    connector = store.job().connector
    assert connector is not None
    with patch.object(LocalStore, "get_into", wait_and_get):
        agent = ServedAgent(connector["kv_connector_extra_config"])
        try:
            yield agent.url
        finally:
            last.unlink(missing_ok=True)
            agent.close()


@scenario
def aborted_while_loading(folder: Path) -> Values:
    store = SharedStore(folder / "store")
    first, last = folder / "first", folder / "last"

    def steps(*beside: Prompt) -> tuple[Step, ...]:
        return (
            *(Generate(prompts=(*beside, BESIDE)), Settle(), FREE_BLOCKS),
            *(Generate(prompts=(FILLING,)), Touch(path=first)),
            Call(function="tests.engine.fleet:end_loads"),
            *(Generate(prompts=(FILLING,)), *FORGET),
            *(Generate(prompts=(STORED,)), Settle(), ResetPrefixCache(), FREE_BLOCKS),
        )

    alone = run_replica(Job(steps=steps(), engine=SMALL), folder)
    run_replica(store.job(*one_by_one([STORED, OTHER])), folder)
    first.unlink()
    again = (Touch(path=last), Generate(prompts=(during(OTHER, last),)))
    with agent_with_gates(store, first, last) as url:
        job = store.job(*steps(EARLY, during(STORED, first)), *again, engine=SMALL, agent=url)
        return {"alone": alone, "run": run_replica(job, folder)}


def test_aborted_loads_neither_hold_blocks_nor_write_into_those_of_others() -> None:
    run, alone = (aborted_while_loading()[name] for name in ("run", "alone"))
    early, stuck, beside = run.outputs[0]
    assert (early.finish_reason, stuck.finish_reason, stuck.tokens) == ("abort", "abort", ())
    assert beside.tokens == alone.outputs[0][0].tokens
    assert beside.steps <= stuck.steps, "served while the load is stuck"
    assert run.metrics["vllm:objkv_hit_tokens"] >= 2 * CHUNKS * CHUNK, "it was under way"
    free = [answer for answer in run.answers if type(answer) is int]
    assert free == [63, 63]  # vLLM keeps one block as the null block
    assert all(answer is not False for answer in run.answers)
    assert run.tokens[3:6] == alone.tokens[1:4]
    assert run.cached[4] > 1800
    assert run.cached[5] == CHUNKS * CHUNK


def test_a_replica_stops_although_a_load_is_stuck() -> None:
    assert aborted_while_loading()["run"].seconds["stop"] < PATIENT["drain_deadline_ms"] / 1000


def abort_within(llm: Any, tokens: list[int]) -> bool:
    """Ask for ``tokens``, and abort them while the step that loads their prefix runs, as a client
    that goes away would; whether there was such a step."""
    from vllm import SamplingParams

    core = llm.llm_engine.engine_core.engine_core
    execute, aborted = core.model_executor.execute_model, []

    def execute_model(output: Any, *args: Any, **kwargs: Any) -> Any:
        if output.has_sync_kv_loads:
            aborted.extend(output.num_scheduled_tokens)
            core.aborts_queue.put_nowait(list(aborted))
        return execute(output, *args, **kwargs)

    core.model_executor.execute_model = execute_model
    params = SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False)
    llm.llm_engine.add_request("aborted", {"prompt_token_ids": tokens}, params)
    while core.scheduler.has_requests():
        llm.llm_engine.step()
    llm.llm_engine.abort_request(["aborted"])
    core.model_executor.execute_model = execute
    return bool(aborted)


def test_a_prompt_after_one_aborted_within_its_step_is_computed_as_ever(tmp_path: Path) -> None:
    store = SharedStore(tmp_path / "store")
    run_replica(store.job(*one_by_one([STORED])), tmp_path)
    for path in store.payloads():
        path.unlink()
    here = "tests.engine.test_lifecycle:abort_within"
    twice = (Generate(prompts=(LONGER,)), Generate(prompts=(LONGER,)))
    abort = Call(function=here, arguments={"tokens": LONGER.tokens})
    alone = run_replica(Job(steps=twice), tmp_path)
    run = run_replica(store.job(abort, *twice, load_mode="layerwise"), tmp_path)
    assert run.answers == (True,)
    assert run.tokens == alone.tokens
    assert run.cached == alone.cached


NEW_TOKENS, TAIL = 108, 8
CROWD = tuple(prompt_of(2 * CHUNK + 44, seed=i, max_tokens=NEW_TOKENS) for i in range(6))
"""A prompt's third chunk is completed by generated tokens."""
TOGETHER = (Generate(prompts=CROWD), SAVED, NUMBERS_TOLD)
TINY = {"num_gpu_blocks_override": 32, "max_model_len": 640}
"""Three prompts fit, and not what they generate."""


@scenario
def crowded(folder: Path) -> Values:
    store, plain = SharedStore(folder / "store"), SharedStore(folder / "plain")
    alone = run_replica(Job(steps=one_by_one(CROWD)), folder)
    first = run_replica(store.job(*TOGETHER, engine=TINY, save_decode=True), folder)
    values: Values = {"alone": alone, "first": first, "files": len(store.payloads())}
    longer = [
        Prompt(tokens=prompt.tokens + tokens[:-TAIL], max_tokens=TAIL)
        for prompt, tokens in zip(CROWD, alone.tokens, strict=True)
    ]
    values["prompts only"] = run_replica(plain.job(*TOGETHER, engine=TINY), folder)
    values["files of prompts"] = len(plain.payloads())
    return values | {"continued": run_replica(store.job(*one_by_one(longer)), folder)}


@pytest.mark.parametrize("name", ["first", "prompts only"])
def test_preempted_requests_get_the_tokens_that_they_get_alone(name: str) -> None:
    run: Result = crowded()[name]
    assert run.metrics["vllm:num_preemptions"] > 0
    assert run.tokens[: len(CROWD)] == crowded()["alone"].tokens
    assert {output.finish_reason for output in run.outputs[0]} == {"length"}
    assert not run.metrics.get("vllm:objkv_load_failures")


def test_each_chunk_is_saved_once_and_generated_ones_if_asked() -> None:
    values = crowded()
    saves = values["prompts only"].agent["saves"]
    assert saves == values["files of prompts"] == 2 * len(CROWD)
    assert values["files"] == 3 * len(CROWD)
    assert values["continued"].cached == [3 * CHUNK] * len(CROWD)
    assert values["continued"].tokens == [tokens[-TAIL:] for tokens in values["alone"].tokens]


@scenario
def drafted(folder: Path) -> Values:
    """With a draft, preempted and in asynchronous steps; then with it, and without it, from what
    was saved."""
    store, eagle = SharedStore(folder / "store"), make_pair("eagle")
    steps = tuple(step for one in CROWD for step in (Generate(prompts=(one,)), *FORGET))
    crowded = eagle | TINY | {"async_scheduling": True}
    plain = {"model": eagle["model"]}
    values: Values = {"alone": run_replica(Job(steps=steps, engine=plain), folder)}
    values["crowded"] = run_replica(store.job(TOGETHER[0], SAVED, engine=crowded), folder)
    values["with"] = run_replica(store.job(*steps, engine=eagle), folder)
    return values | {"without": run_replica(store.job(*steps, engine=plain), folder)}


def test_preempted_and_asynchronous_steps_save_only_verified_bytes_of_a_draft() -> None:
    values = drafted()
    assert values["crowded"].metrics["vllm:num_preemptions"] > 0
    for name in ("crowded", "with", "without"):
        assert values[name].tokens == values["alone"].tokens
    assert values["with"].cached == [2 * CHUNK - BLOCK] * len(CROWD)
    assert values["without"].cached == [2 * CHUNK] * len(CROWD)


SEED, WAVES, DRAWN = 11, 3, 40
CROWDED: dict[str, Any] = {
    "num_gpu_blocks_override": 30,
    "max_model_len": 640,
    "max_num_batched_tokens": 160,
    "max_num_seqs": 6,
}
LARGE = tuple(prompt_of(9 * BLOCK, seed=200 + i, max_tokens=60) for i in range(3))
"""They fit, and not what they generate: whatever else a wave brings, one of them is preempted."""


def drawn(source: random.Random) -> Prompt:
    stem = tokens_of(4 * CHUNK, seed=100 + source.randrange(3))
    fork = source.choice([0, CHUNK - 1, CHUNK, 2 * CHUNK, 2 * CHUNK + 50, 4 * CHUNK])
    tail = tokens_of(source.randrange(1, 60), seed=source.randrange(4))
    return Prompt(
        tokens=stem[:fork] + tail,
        max_tokens=source.choice([1, 8, 60]),
        after_steps=source.randrange(60),
        abort_after_steps=source.choice([None, None, None, source.randrange(1, 30)]),
    )


def damage(store: SharedStore, prompts: list[Prompt], seed: int) -> None:
    source = random.Random(seed)
    stored = {path.parent.name: path for path in store.payloads()}
    wanted = dict.fromkeys(digest.hex() for prompt in prompts for digest in store.hashes(prompt))
    for kind, path in enumerate(stored[name] for name in list(wanted)[::3] if name in stored):
        if kind % 3 == 0:
            path.unlink()
        elif kind % 3 == 1:
            path.write_bytes(path.read_bytes()[: source.randrange(5000)])
        else:
            spoiled = bytearray(path.read_bytes())
            spoiled[source.randrange(len(spoiled))] ^= 1 << source.randrange(8)
            path.write_bytes(spoiled)


@scenario
def mixture(folder: Path) -> Values:
    """Everything at once: shared prefixes, late arrivals, aborts, preemptions, prefill in pieces,
    and a store of which a third is damaged."""
    source = random.Random(SEED)
    waves = [(*LARGE, *(drawn(source) for _ in range(DRAWN))) for _ in range(WAVES)]
    quiet = [p.model_copy(update={"abort_after_steps": None}) for w in waves for p in w]
    steps: list[Step] = [FREE_BLOCKS]
    for wave in waves:
        steps += (Generate(prompts=wave), *FORGET, FREE_BLOCKS)
    store = SharedStore(folder / "store")
    options: dict[str, Any] = {"engine": CROWDED, "save_decode": True}
    values: Values = {"aborted": [p.abort_after_steps is not None for w in waves for p in w]}
    values["alone"] = run_replica(Job(steps=one_by_one(quiet)), folder)
    values["first"] = run_replica(store.job(*steps, **options), folder)
    damage(store, quiet, SEED)
    for mode in MODES:
        copy = store.copy(folder / mode)
        values[mode] = run_replica(copy.job(*steps, load_mode=mode, **options), folder)
    return values


@pytest.mark.parametrize("name", ["first", *MODES])
def test_in_a_mixture_every_prompt_gets_its_tokens_and_every_block_is_free_in_the_end(
    name: str,
) -> None:
    run: Result = mixture()[name]
    alone: Result = mixture()["alone"]
    for aborted, found, expected in zip(
        mixture()["aborted"], run.tokens, alone.tokens, strict=True
    ):
        assert found == (expected[: len(found)] if aborted else expected)
    reasons = {output.finish_reason for outputs in run.outputs for output in outputs}
    assert reasons == {"length", "abort"}
    assert run.metrics["vllm:num_preemptions"] > 0
    free = {answer for answer in run.answers if type(answer) is int}
    assert free == {CROWDED["num_gpu_blocks_override"] - 1}
    assert False not in run.answers


@pytest.mark.parametrize("mode", MODES)
def test_damage_is_met_and_survived(mode: str) -> None:
    run: Result = mixture()[mode]
    for name in ("load_corrupt", "load_ghosts", "load_bytes"):
        assert run.metrics[f"vllm:objkv_{name}"] > 0
    assert not [w for w in run.warnings if w.logger.startswith("objkv") and w.level != "WARNING"]
