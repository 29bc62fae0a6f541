"""Linear attention beside full attention: a second replica goes on from the state that was saved.

Three of four layers keep one state for all tokens, in blocks of 160 or more tokens, as the
processor's kernels want states, that are padded to the size of the attention's. The model runs in
bfloat16, the only dtype of this backend for such layers.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from objkv.keys.prefix import PromptExtras, prefix_hashes
from tests.engine.cache import Values, scenario
from tests.engine.fleet import NUMBERS_TOLD, SAVED, SharedStore
from tests.engine.harness import run_replica
from tests.engine.job import Call, Generate, Job, Prompt, ResetPrefixCache, Step
from tests.engine.pages import LOADED_PAGES
from tests.engine.prompts import prompt_of, tokens_of

LENGTHS = (100, 160, 161, 500, 900)
PROMPTS = tuple(prompt_of(n, seed=n, max_tokens=12) for n in LENGTHS)
SHORTER, LONGER = prompt_of(700, seed=900), prompt_of(1300, seed=900)
"""Beginnings and ends of the last prompt: of the first no state was kept, of the second one was."""
SPOILED = tuple(prompt_of(n, seed=n, max_tokens=12) for n in (410, 420))
"""By whose payload is spoiled: a state's, the attention's."""
STATE_GROUP, FULL_GROUP = 0, 3
ASKED = Call(function="tests.engine.test_hybrid_states:block_tokens")


def block_tokens(llm: Any) -> int:
    """What vLLM made of the wish for 32: a state must fit into a block of the attention. How large
    it is depends on the processor's kernels."""
    tokens: int = llm.llm_engine.vllm_config.cache_config.block_size
    return tokens


def loaded(block: int, *lengths: int) -> list[int]:
    """vLLM ends a step where the last whole block does, with a token left to compute."""
    return [(n - 1) // block * block for n in lengths]


def job(store: SharedStore, *steps: Step, connected: bool = True, tokens: int = 2048) -> Job:
    """A replica on the store."""
    engine = {"dtype": "bfloat16", "max_num_batched_tokens": tokens}
    on_store = store.job(*steps, engine=engine).model_copy(update={"model": "qwen3_next"})
    return on_store if connected else on_store.model_copy(update={"connector": None})


def one_by_one(prompts: Sequence[Prompt]) -> tuple[Generate, ...]:
    """Each alone in its steps: sums of bfloat16 depend on what else is in them."""
    return tuple(Generate(prompts=(prompt,)) for prompt in prompts)


def looks(block: int) -> Call:
    """A look at what can have been loaded of each prompt."""
    pairs = zip(LENGTHS, loaded(block, *LENGTHS), strict=True)
    cut = [list(tokens_of(n, seed=n)[: end + 1]) for n, end in pairs if end]
    return Call(function=LOADED_PAGES, arguments={"prompts": cut})


@scenario
def shared(folder: Path) -> Values:
    store = SharedStore(folder / "store")
    extra = (SHORTER, LONGER)
    alone = run_replica(
        job(store, ASKED, *one_by_one(PROMPTS), *one_by_one(extra), connected=False), folder
    )
    look = looks(alone.answers[0])
    first = job(store, *one_by_one(PROMPTS), SAVED, look)
    second = job(
        store, *one_by_one(PROMPTS), look, ResetPrefixCache(), *one_by_one(extra), NUMBERS_TOLD
    )
    runs = {"first": first, "second": second}
    return {"alone": alone} | {name: run_replica(run, folder) for name, run in runs.items()}


def test_a_second_replica_loads_up_to_the_last_block_that_leaves_a_token() -> None:
    runs = shared()
    count = len(PROMPTS)
    assert runs["first"].cached == [0] * count
    assert runs["second"].cached[:count] == loaded(runs["alone"].answers[0], *LENGTHS)


def test_a_prefix_is_loaded_as_far_as_a_state_was_kept_of_it() -> None:
    runs = shared()
    [kept] = loaded(runs["alone"].answers[0], LENGTHS[-1])
    # The first replica kept a state after so many tokens (800, say), and none before.
    assert kept > len(SHORTER.tokens) > LENGTHS[-2]
    assert runs["second"].cached[len(PROMPTS) : len(PROMPTS) + 2] == [0, kept]


def test_the_tokens_are_those_of_vllm_alone() -> None:
    runs = shared()
    alone = runs["alone"].tokens
    assert runs["first"].tokens == alone[: len(PROMPTS)]
    assert runs["second"].tokens[: len(alone)] == alone
    assert len(set(alone)) == len(alone)


def test_loaded_blocks_and_states_hold_the_very_bytes_that_were_computed() -> None:
    runs = shared()
    computed, loaded = runs["first"].answers[-1], runs["second"].answers[0]
    assert computed == loaded
    for pages in loaded:
        assert len(pages) == 4
        assert all(digests[-1] for digests in pages.values())
        states = [digests for layer, digests in pages.items() if "linear_attn" in layer]
        assert len(states) == 3
        assert all(set(digests[:-1]) <= {""} for digests in states)


@scenario
def in_pieces(folder: Path) -> Values:
    """Steps of two blocks: states are kept where each ends, also in the middle of a prompt."""
    store = SharedStore(folder / "store")
    step = 2 * shared()["alone"].answers[0]
    first = job(store, *one_by_one((PROMPTS[-1],)), SAVED, tokens=step)
    second = job(store, *one_by_one((SHORTER, PROMPTS[-1])), NUMBERS_TOLD, tokens=step)
    return {"first": run_replica(first, folder), "second": run_replica(second, folder)}


@pytest.mark.wide
def test_states_between_the_steps_of_a_long_prompt_are_shared_too() -> None:
    runs, alone = in_pieces(), shared()["alone"].tokens
    block = shared()["alone"].answers[0]
    ends = loaded(2 * block, len(SHORTER.tokens)) + loaded(block, LENGTHS[-1])
    assert runs["second"].cached[:2] == ends
    # Of other steps than those alone, so these are compared among each other.
    assert runs["second"].tokens[1] == runs["first"].tokens[0]
    assert len(alone) == len(PROMPTS) + 2


@scenario
def spoiled(folder: Path) -> Values:
    """A bit is turned in a state's payload of one prompt, and in the attention's of another."""
    store = SharedStore(folder / "store")
    alone = run_replica(job(store, ASKED, *one_by_one(SPOILED), connected=False), folder)
    first = run_replica(job(store, *one_by_one(SPOILED), SAVED), folder)
    (namespace,) = store.namespaces()
    for prompt, group in zip(SPOILED, (STATE_GROUP, FULL_GROUP), strict=True):
        last = prefix_hashes(namespace, prompt.tokens, alone.answers[0], PromptExtras())[-1].hex()
        (payload,) = store.bulk.glob(f"*/*/{last}/{group}.*.safetensors")
        raw = bytearray(payload.read_bytes())
        raw[-5] ^= 1
        payload.write_bytes(raw)
    steps = (*one_by_one(SPOILED), SAVED, NUMBERS_TOLD)
    second = run_replica(job(store, *steps), folder)
    third = run_replica(job(store, *steps), folder)
    return {"alone": alone, "first": first, "second": second, "third": third}


@pytest.mark.wide
def test_what_is_spoiled_is_computed_again_with_the_same_tokens_and_replaced() -> None:
    runs = spoiled()
    alone = runs["alone"].tokens
    assert runs["first"].tokens == alone
    assert runs["second"].tokens[: len(SPOILED)] == alone
    assert runs["second"].metrics["vllm:objkv_load_corrupt"] == len(SPOILED)
    assert runs["third"].tokens[: len(SPOILED)] == alone
    assert runs["third"].cached[: len(SPOILED)] == loaded(runs["alone"].answers[0], 410, 420)
    assert not any(
        "error" in (o.finish_reason or "") for outs in runs["second"].outputs for o in outs
    )
