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
    FORGOTTEN,
    FREE_BLOCKS,
    NUMBERS_TOLD,
    PATIENT,
    RESET,
    SAVED,
    SETTLED,
    SharedStore,
    end_loads,
    one_by_one,
    touch,
)
from tests.engine.harness import run_replica
from tests.engine.job import Job, Prompt, Result, Step, call, generate, prompt_of, tokens_of
from tests.engine.speculation import make_pair
from tests.support.served import ServedAgent

pytestmark = pytest.mark.slow
MODES = ("async", "layerwise")

CHUNKS = 5
STORED, OTHER = (prompt_of(CHUNKS * CHUNK + 9, seed=seed) for seed in (0, 3))
LONGER = Prompt(tokens=STORED.tokens[: CHUNKS * CHUNK] + tokens_of(200, seed=9))
SMALL = {"num_gpu_blocks_override": 64, "max_model_len": 1984}
EARLY = STORED.model_copy(update={"abort_after_steps": 1})
BESIDE = prompt_of(2 * CHUNK + 9, seed=1)
FILLING = prompt_of(1900, seed=2)
"""Needs almost all blocks, those of the aborted requests included."""


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


def test_aborted_loads_neither_hold_blocks_nor_write_into_those_of_others(tmp_path: Path) -> None:
    store = SharedStore(tmp_path / "store")
    first, last = tmp_path / "first", tmp_path / "last"

    def steps(*beside: Prompt) -> tuple[Step, ...]:
        return (
            *(generate(*beside, BESIDE), SETTLED, FREE_BLOCKS),
            *(generate(FILLING), call(touch, path=first), call(end_loads)),
            *(generate(FILLING), *FORGOTTEN),
            *(generate(STORED), SETTLED, RESET, FREE_BLOCKS),
        )

    alone = run_replica(Job(steps=steps(), engine=SMALL), tmp_path)
    run_replica(store.job(*one_by_one([STORED, OTHER])), tmp_path)
    first.unlink()
    again = (call(touch, path=last), generate(during(OTHER, last)))
    with agent_with_gates(store, first, last) as url:
        job = store.job(*steps(EARLY, during(STORED, first)), *again, engine=SMALL, agent=url)
        run = run_replica(job, tmp_path)
    early, stuck, beside = run.outputs[0]
    assert (early.finish_reason, stuck.finish_reason, stuck.tokens) == ("abort", "abort", ())
    assert beside.tokens == alone.outputs[0][0].tokens
    assert beside.steps <= stuck.steps, "served while the load is stuck"
    assert run.metrics["vllm:objkv_hit_tokens"] >= 2 * CHUNKS * CHUNK, "it was under way"
    free = [answer for answer in run.answers if type(answer) is int]
    assert free == [63, 63]  # vLLM keeps one block as the null block
    assert False not in run.answers
    assert run.tokens[3:6] == alone.tokens[1:4]
    assert run.cached[4] > 1800
    assert run.cached[5] == CHUNKS * CHUNK
    assert run.stop_s < PATIENT["drain_deadline_ms"] / 1000, "it stops although a load is stuck"


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
    twice = (generate(LONGER), generate(LONGER))
    abort = call(abort_within, tokens=LONGER.tokens)
    alone = run_replica(Job(steps=twice), tmp_path)
    run = run_replica(store.job(abort, *twice, load_mode="layerwise"), tmp_path)
    assert run.answers == (True,)
    assert run.tokens == alone.tokens
    assert run.cached == alone.cached


NEW_TOKENS, TAIL = 108, 8
CROWD = tuple(prompt_of(2 * CHUNK + 44, seed=i, max_tokens=NEW_TOKENS) for i in range(6))
"""A prompt's third chunk is completed by generated tokens."""
TOGETHER = (generate(*CROWD), SAVED, NUMBERS_TOLD)
TINY = {"num_gpu_blocks_override": 32, "max_model_len": 640}
"""Three prompts fit, and not what they generate."""


def test_preempted_requests_get_their_tokens_and_each_chunk_is_saved_once(tmp_path: Path) -> None:
    """Generated ones are, if asked."""
    alone = run_replica(Job(steps=one_by_one(CROWD)), tmp_path)
    stores = [SharedStore(tmp_path / name) for name in ("prompts", "all")]
    for chunks, store in enumerate(stores, start=2):
        job = store.job(*TOGETHER, engine=TINY, save_decode=chunks > 2)
        run = run_replica(job, tmp_path)
        assert run.metrics["vllm:num_preemptions"] > 0
        assert run.tokens[: len(CROWD)] == alone.tokens
        assert {output.finish_reason for output in run.outputs[0]} == {"length"}
        assert not run.metrics.get("vllm:objkv_load_failures")
        assert len(store.payloads()) == chunks * len(CROWD)
        assert chunks > 2 or run.agent["saves"] == chunks * len(CROWD)
    longer = [
        Prompt(tokens=prompt.tokens + tokens[:-TAIL], max_tokens=TAIL)
        for prompt, tokens in zip(CROWD, alone.tokens, strict=True)
    ]
    continued = run_replica(stores[1].job(*one_by_one(longer)), tmp_path)
    assert continued.cached == [3 * CHUNK] * len(CROWD)
    assert continued.tokens == [tokens[-TAIL:] for tokens in alone.tokens]


def test_preempted_and_asynchronous_steps_save_only_verified_bytes_of_a_draft(
    tmp_path: Path,
) -> None:
    """With a draft, preempted and in asynchronous steps; then with it, and without it, from what
    was saved."""
    store, eagle = SharedStore(tmp_path / "store"), make_pair("eagle")
    steps, plain = one_by_one(CROWD), {"model": eagle["model"]}
    alone = run_replica(Job(steps=steps, engine=plain), tmp_path)
    hasty = eagle | TINY | {"async_scheduling": True}
    crowded = run_replica(store.job(*TOGETHER[:2], engine=hasty), tmp_path)
    assert crowded.metrics["vllm:num_preemptions"] > 0
    assert crowded.tokens == alone.tokens
    for engine, loaded in ((eagle, 2 * CHUNK - BLOCK), (plain, 2 * CHUNK)):
        run = run_replica(store.job(*steps, engine=engine), tmp_path)
        assert run.tokens == alone.tokens
        assert run.cached == [loaded] * len(CROWD)


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


def check_mixture(run: Result, alone: Result, prompts: list[Prompt]) -> None:
    for prompt, found, expected in zip(prompts, run.tokens, alone.tokens, strict=True):
        aborted = prompt.abort_after_steps is not None
        assert found == (expected[: len(found)] if aborted else expected)
    reasons = {output.finish_reason for outputs in run.outputs for output in outputs}
    assert reasons == {"length", "abort"}
    assert run.metrics["vllm:num_preemptions"] > 0
    free = {answer for answer in run.answers if type(answer) is int}
    assert free == {CROWDED["num_gpu_blocks_override"] - 1}
    assert False not in run.answers


def test_in_a_mixture_every_prompt_gets_its_tokens_and_every_block_is_free_in_the_end(
    tmp_path: Path,
) -> None:
    """Everything at once: shared prefixes, late arrivals, aborts, preemptions, prefill in pieces,
    and a store with a third of it damaged."""
    source = random.Random(SEED)
    waves = [(*LARGE, *(drawn(source) for _ in range(DRAWN))) for _ in range(WAVES)]
    prompts = [prompt for wave in waves for prompt in wave]
    quiet = [prompt.model_copy(update={"abort_after_steps": None}) for prompt in prompts]
    steps: list[Step] = [FREE_BLOCKS]
    for wave in waves:
        steps += (generate(*wave), *FORGOTTEN, FREE_BLOCKS)
    store = SharedStore(tmp_path / "store")
    options: dict[str, Any] = {"engine": CROWDED, "save_decode": True}
    alone = run_replica(Job(steps=one_by_one(quiet)), tmp_path)
    check_mixture(run_replica(store.job(*steps, **options), tmp_path), alone, prompts)
    damage(store, quiet, SEED)
    for mode in MODES:
        copy = store.copy(tmp_path / mode)
        run = run_replica(copy.job(*steps, load_mode=mode, **options), tmp_path)
        check_mixture(run, alone, prompts)
        for name in ("load_corrupt", "load_ghosts", "load_bytes"):
            assert run.metrics[f"vllm:objkv_{name}"] > 0
        ours = [line for line in run.warnings if line.logger.startswith("objkv")]
        assert {line.level for line in ours} <= {"WARNING"}
