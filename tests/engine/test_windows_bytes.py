"""A model whose every other layer has a sliding window: what is loaded are the very bytes saved."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from objkv.keys.prefix import PromptExtras, prefix_hashes
from tests.engine.cache import Values, scenario
from tests.engine.fleet import NUMBERS_TOLD, SAVED, SharedStore
from tests.engine.harness import run_replica
from tests.engine.job import Call, Generate, Job, Prompt, ResetPrefixCache, Result, Step
from tests.engine.model import SLIDING_WINDOW
from tests.engine.pages import LOADED_PAGES
from tests.engine.prompts import prompt_of

BLOCK = 32
CHUNKS = (256, BLOCK)
"""Larger and smaller than the window."""
EACH_CHUNK = (CHUNKS[0], pytest.param(CHUNKS[1], marks=pytest.mark.wide))
LENGTHS = {
    256: (40, 255, 256, 257, 511, 512, 513, 700, 1500),
    BLOCK: (20, 33, 48, 64, 65, 97, 200, 700),
}
DENSE = {"prefix_cache_retention_interval": BLOCK}
"""By default vLLM keeps a window's blocks at the very end of a prompt only, and shows no others."""
TURNS = (300, 900)
"""Two prompts, one the beginning of the other: the second loads what the first lacks."""
PIECES = (prompt_of(1500, seed=5), prompt_of(700, seed=6))
"""Longer than a step may compute."""
SPOILED = {0: prompt_of(700, seed=7), 1: prompt_of(600, seed=8)}
"""By the group whose payload is spoiled: the window's, the other."""
GOOD = prompt_of(650, seed=9)
LOADED = 512
"""Whole chunks of these three."""


def job(store: SharedStore, *steps: Step, **settings: Any) -> Job:
    """A replica on the store, whose own prefix cache keeps all that a window passes."""
    on_store = store.job(*steps, engine=DENSE, **settings)
    return on_store.model_copy(update={"model": "gpt_oss"})


def usable(length: int, chunk: int) -> int:
    """Tokens that can be loaded of a stored prompt: whole chunks, and one token stays to do."""
    return (length - 1) // chunk * chunk


def one_by_one(prompts: Sequence[Prompt]) -> tuple[Generate, ...]:
    """Each alone in its steps; what the replica itself has cached stays for the next."""
    return tuple(Generate(prompts=(prompt,)) for prompt in prompts)


def looks(prompts: list[tuple[int, ...]], chunk: int) -> Call:
    """A look at what can have been loaded of each prompt, no more."""
    cut = [list(tokens[: usable(len(tokens), chunk) + 1]) for tokens in prompts]
    return Call(function=LOADED_PAGES, arguments={"prompts": cut})


def without(pages: dict[str, list[str]], blocks: slice) -> dict[str, list[str]]:
    """The digests of all other blocks."""
    return {
        layer: digests[: blocks.start] + digests[blocks.stop :] for layer, digests in pages.items()
    }


@scenario
def alone(folder: Path) -> Values:
    """vLLM without a connector: the tokens of every prompt of this file, by ``name_of``."""
    prompts = [prompt_of(n, seed=n) for n in {n for several in LENGTHS.values() for n in several}]
    prompts += [prompt_of(n, seed=1) for n in TURNS]
    prompts += [*PIECES, *SPOILED.values(), GOOD]
    run = run_replica(Job(model="gpt_oss", steps=one_by_one(prompts)), folder)
    return {name_of(p): list(t) for p, t in zip(prompts, run.tokens, strict=True)}


def name_of(prompt: Prompt) -> str:
    return f"{len(prompt.tokens)} tokens from {prompt.tokens[0]}"


def expected(*prompts: Prompt) -> list[tuple[int, ...]]:
    """What vLLM alone generates."""
    known = alone()
    return [tuple(known[name_of(prompt)]) for prompt in prompts]


@scenario
def saved_and_loaded(folder: Path, chunk: int) -> Values:
    """One replica saves; the next loads everything, the long prompt in two turns."""
    store = SharedStore(folder / "store")
    prompts = [prompt_of(length, seed=length) for length in LENGTHS[chunk]]
    turns = [prompt_of(length, seed=1) for length in TURNS]
    look = looks([p.tokens for p in [*prompts, turns[1]]], chunk)
    first = job(store, *one_by_one([*prompts, turns[1]]), SAVED, look, chunk_tokens=chunk)
    second = job(
        store,
        *one_by_one([*prompts, *turns]),
        SAVED,
        look,
        ResetPrefixCache(),
        Generate(prompts=(*prompts, turns[1])),
        chunk_tokens=chunk,
        load_mode="layerwise",  # a window's loads are between steps all the same
    )
    return {"first": run_replica(first, folder), "second": run_replica(second, folder)}


@pytest.mark.parametrize("chunk", EACH_CHUNK)
def test_every_whole_chunk_before_the_last_token_is_loaded(chunk: int) -> None:
    runs = saved_and_loaded(chunk)
    lengths = LENGTHS[chunk]
    count = len(lengths)
    assert runs["first"].cached == [0] * (count + 1)
    assert runs["second"].cached[:count] == [usable(length, chunk) for length in lengths]
    first_turn, second_turn = TURNS
    local = first_turn // BLOCK * BLOCK
    assert runs["second"].cached[count] == usable(first_turn, chunk)
    assert runs["second"].cached[count + 1] == max(local, usable(second_turn, chunk))


@pytest.mark.parametrize("chunk", EACH_CHUNK)
def test_prompts_that_run_together_load_together(chunk: int) -> None:
    runs = saved_and_loaded(chunk)
    lengths = (*LENGTHS[chunk], TURNS[1])
    assert runs["second"].cached[-len(lengths) :] == [usable(n, chunk) for n in lengths]


@pytest.mark.parametrize("chunk", EACH_CHUNK)
def test_the_tokens_are_those_of_vllm_alone(chunk: int) -> None:
    runs = saved_and_loaded(chunk)
    prompts = [prompt_of(length, seed=length) for length in LENGTHS[chunk]]
    first_turn, second_turn = (prompt_of(length, seed=1) for length in TURNS)
    assert runs["first"].tokens == expected(*prompts, second_turn)
    one_by_one_then_together = (*prompts, first_turn, second_turn, *prompts, second_turn)
    assert runs["second"].tokens == expected(*one_by_one_then_together)


@pytest.mark.parametrize("chunk", EACH_CHUNK)
def test_the_loaded_blocks_hold_the_bytes_that_were_computed(chunk: int) -> None:
    runs = saved_and_loaded(chunk)
    computed, loaded = runs["first"].answers[-1], runs["second"].answers[1]
    # The second replica computed these blocks itself, as the end of a shorter prompt. On some
    # processors the order of sums depends on the number of tokens in a step.
    own = slice(usable(TURNS[0], chunk) // BLOCK, TURNS[0] // BLOCK)
    assert computed[:-1] == loaded[:-1]
    assert without(computed[-1], own) == without(loaded[-1], own)
    for pages, length in zip(loaded, (*LENGTHS[chunk], TURNS[1]), strict=True):
        tokens = usable(length, chunk)
        for layer, digests in pages.items():
            assert len(digests) == tokens // BLOCK
            windowed = int(layer.split(".")[2]) % 2 == 0
            needed = -(-(SLIDING_WINDOW - 1) // BLOCK) if windowed else len(digests)
            assert all(digests[len(digests) - min(needed, len(digests)) :]), layer


@scenario
def cut_into_steps(folder: Path) -> Values:
    """Chunks that end in the middle of a later step."""
    look = looks([prompt.tokens for prompt in PIECES], 256)
    store = SharedStore(folder / "store")
    replica = job(store, Generate(prompts=PIECES), SAVED, look, chunk_tokens=256)
    engine = replica.engine | {"max_num_batched_tokens": 384}
    replica = replica.model_copy(update={"engine": engine})
    return {"first": run_replica(replica, folder), "second": run_replica(replica, folder)}


def test_what_was_computed_in_pieces_is_saved_whole() -> None:
    runs = cut_into_steps()
    assert runs["first"].tokens == runs["second"].tokens == expected(*PIECES)
    assert runs["first"].cached == [0, 0]
    assert runs["second"].cached == [1280, 512]
    assert runs["first"].answers[-1] == runs["second"].answers[-1]


@scenario
def bad_payloads(folder: Path) -> Values:
    """Of three stored prompts one has, in its last chunk, a wrong byte in the window's payload,
    one in the other group's, and one is whole. Asked for twice by the second replica."""
    store = SharedStore(folder / "store")
    prompts = (*SPOILED.values(), GOOD)

    def run(*generates: Generate) -> Result:
        steps = [step for generate in generates for step in (generate, SAVED, NUMBERS_TOLD)]
        return run_replica(job(store, *steps, chunk_tokens=256), folder)

    first = run(*one_by_one(prompts))
    (namespace,) = store.namespaces()
    for group, prompt in SPOILED.items():
        last = prefix_hashes(namespace, prompt.tokens, 256, PromptExtras())[-1].hex()
        (payload,) = store.bulk.glob(f"*/*/{last}/{group}.*.safetensors")
        spoil(payload)
    together = Generate(prompts=prompts)
    return {"first": first, "second": run(together, together), "third": run(together)}


def spoil(payload: Path) -> None:
    """Flip a bit near the end, where only a frame's own checksum sees it."""
    raw = bytearray(payload.read_bytes())
    raw[-5] ^= 1
    payload.write_bytes(raw)


def test_a_bad_payload_is_recomputed_and_the_engine_lives() -> None:
    run = bad_payloads()["second"]
    prompts = (*SPOILED.values(), GOOD)
    for outputs in (run.outputs[0], run.outputs[2]):
        assert [output.tokens for output in outputs] == expected(*prompts)
        assert {output.finish_reason for output in outputs} == {"length"}
    assert run.outputs[0][-1].cached_tokens == LOADED
    assert run.metrics["vllm:objkv_load_corrupt"] == len(SPOILED)


def test_what_was_recomputed_replaces_the_bad_payload() -> None:
    runs = bad_payloads()
    third = runs["third"]
    assert [o.tokens for o in third.outputs[0]] == expected(*SPOILED.values(), GOOD)
    assert [o.cached_tokens for o in third.outputs[0]] == [LOADED] * 3
    assert runs["second"].metrics["vllm:objkv_saves"] == len(SPOILED)
