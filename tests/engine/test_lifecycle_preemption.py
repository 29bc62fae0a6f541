"""More requests than the paged cache holds: preempted and resumed, they still get their tokens."""

from pathlib import Path

import pytest

from tests.engine.cache import Values, scenario
from tests.engine.fleet import BLOCK, CHUNK, NUMBERS_TOLD, SAVED, SharedStore, one_by_one
from tests.engine.harness import run_replicas
from tests.engine.job import Generate, Job, Prompt, Result
from tests.engine.prompts import prompt_of

MODES = ("async", "layerwise")
NEW_TOKENS = 108
TAIL = 8
LENGTH = 2 * CHUNK + 44
"""The prompt's third chunk is completed by generated tokens."""
PROMPTS = tuple(prompt_of(LENGTH, seed=i, max_tokens=NEW_TOKENS) for i in range(6))
CROWD = (Generate(prompts=PROMPTS), SAVED, NUMBERS_TOLD)
TINY = {"num_gpu_blocks_override": 32, "max_model_len": 640}
"""Three prompts fit, and not what they generate."""


@scenario
def crowded(folder: Path) -> Values:
    store, plain = SharedStore(folder / "store"), SharedStore(folder / "plain")
    alone, first = run_replicas(
        [
            Job(steps=one_by_one(PROMPTS)),
            store.job(*CROWD, engine=TINY, save_decode=True),
        ],
        folder,
    )
    generated = alone.tokens
    longer = [
        Prompt(tokens=prompt.tokens + tokens[:-TAIL], max_tokens=TAIL)
        for prompt, tokens in zip(PROMPTS, generated, strict=True)
    ]
    files = len(store.payloads())
    copies = {mode: store.copy(folder / mode) for mode in MODES}
    jobs = [copies[mode].job(*CROWD, engine=TINY, load_mode=mode) for mode in MODES]
    runs = run_replicas(jobs, folder)
    last = run_replicas(
        [plain.job(*CROWD, engine=TINY), store.job(*one_by_one(longer))],
        folder,
    )
    return {
        "alone": alone,
        "first": first,
        "files": files,
        "without decode": last[0],
        "files without decode": len(plain.payloads()),
        "continued": last[1],
    } | dict(zip(MODES, runs, strict=True))


@pytest.mark.parametrize("name", ["first", "without decode", *MODES])
def test_preempted_requests_get_the_tokens_that_they_get_alone(name: str) -> None:
    run: Result = crowded()[name]
    assert run.metrics["vllm:num_preemptions"] > 0
    assert run.tokens[: len(PROMPTS)] == crowded()["alone"].tokens
    assert {output.finish_reason for output in run.outputs[0]} == {"length"}


@pytest.mark.parametrize("mode", MODES)
def test_preempted_or_not_each_request_loads_its_prompt(mode: str) -> None:
    run: Result = crowded()[mode]
    assert run.cached[: len(PROMPTS)] == [2 * CHUNK] * len(PROMPTS)
    assert not run.metrics.get("vllm:objkv_load_failures")


def test_each_chunk_is_saved_once_however_often_it_was_computed() -> None:
    assert crowded()["files without decode"] == 2 * len(PROMPTS)
    assert crowded()["without decode"].metrics["vllm:objkv_saves"] == 2 * len(PROMPTS)


def test_generated_chunks_are_saved_if_asked_and_continue_a_conversation() -> None:
    assert crowded()["files"] == 3 * len(PROMPTS)
    continued: Result = crowded()["continued"]
    assert continued.cached == [3 * CHUNK] * len(PROMPTS)
    assert continued.tokens == [tokens[-TAIL:] for tokens in crowded()["alone"].tokens]


CHUNKED = {"max_num_batched_tokens": 96, "max_num_seqs": 4, "enable_chunked_prefill": True}
"""A prompt is computed in pieces that are no multiple of a chunk."""
PIECES = (prompt_of(5 * CHUNK + 40, seed=20), prompt_of(3 * CHUNK, seed=21), prompt_of(77, seed=22))
HALF = Prompt(tokens=PIECES[0].tokens[: 2 * CHUNK] + prompt_of(400, seed=23).tokens)


@scenario
def prefilled_in_pieces(folder: Path) -> Values:
    store = SharedStore(folder / "store")
    steps = (*one_by_one(PIECES), *one_by_one([HALF, HALF]), Generate(prompts=PIECES), SAVED)
    first_steps = (Generate(prompts=PIECES), SAVED, NUMBERS_TOLD)
    alone, first = run_replicas([Job(steps=steps), store.job(*first_steps, engine=CHUNKED)], folder)
    files = len(store.payloads())
    copies = {mode: store.copy(folder / mode) for mode in MODES}
    jobs = [copies[mode].job(*steps, engine=CHUNKED, load_mode=mode) for mode in MODES]
    runs = run_replicas(jobs, folder)
    values = {"alone": alone, "first": first, "files": files} | dict(zip(MODES, runs, strict=True))
    return values | {f"files {mode}": len(copies[mode].payloads()) for mode in MODES}


def test_a_prompt_computed_in_pieces_is_saved_in_whole_chunks() -> None:
    values = prefilled_in_pieces()
    assert values["files"] == 5 + 3
    assert values["first"].metrics["vllm:objkv_saves"] == 5 + 3
    assert values["first"].tokens[:3] == values["alone"].tokens[-3:]


@pytest.mark.parametrize("mode", MODES)
def test_a_replica_that_prefills_in_pieces_loads_and_computes_the_rest(mode: str) -> None:
    values = prefilled_in_pieces()
    run: Result = values[mode]
    assert run.tokens == values["alone"].tokens
    whole = 3 * CHUNK if mode == "async" else 3 * CHUNK - BLOCK
    half = (2 * CHUNK + 400) // CHUNK * CHUNK
    assert run.cached[:5] == [5 * CHUNK, whole, 0, 2 * CHUNK, half]
    assert values[f"files {mode}"] == values["files"] + half // CHUNK - 2
