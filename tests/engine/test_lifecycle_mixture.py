"""Everything at once, drawn from a seed: shared prefixes, late arrivals, aborts, preemptions,
prefill in pieces, and a store of which a third is damaged."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine.cache import Values, scenario
from tests.engine.fleet import BLOCK, CHUNK, FREE_BLOCKS, SAVED, SharedStore, one_by_one
from tests.engine.harness import run_replica, run_replicas
from tests.engine.job import Generate, Job, Prompt, ResetPrefixCache, Result, Settle, Step
from tests.engine.prompts import prompt_of, tokens_of

pytestmark = pytest.mark.wide
MODES = ("async", "layerwise", "auto")
SEED = 11
PROMPTS = 40
WAVES = 3
CROWDED: dict[str, Any] = {
    "num_gpu_blocks_override": 30,
    "max_model_len": 640,
    "max_num_batched_tokens": 160,
    "max_num_seqs": 6,
}
CROWD = tuple(prompt_of(9 * BLOCK, seed=200 + i, max_tokens=60) for i in range(3))
"""They fit, and not what they generate: whatever else a wave brings, one of them is preempted."""


def drawn(source: random.Random) -> Prompt:
    """A prompt on one of three stems, that may be late, and may be aborted."""
    stem = tokens_of(4 * CHUNK, seed=100 + source.randrange(3))
    fork = source.choice([0, CHUNK - 1, CHUNK, 2 * CHUNK, 2 * CHUNK + 50, 4 * CHUNK])
    tail = tokens_of(source.randrange(1, 60), seed=source.randrange(4))
    return Prompt(
        tokens=stem[:fork] + tail,
        max_tokens=source.choice([1, 8, 60]),
        after_steps=source.randrange(60),
        abort_after_steps=source.choice([None, None, None, source.randrange(1, 30)]),
    )


def waves(seed: int) -> list[tuple[Prompt, ...]]:
    source = random.Random(seed)
    return [(*CROWD, *(drawn(source) for _ in range(PROMPTS))) for _ in range(WAVES)]


def damage(store: SharedStore, prompts: list[Prompt], seed: int) -> None:
    """Remove, cut or change in turn every third chunk that prompts ask for, so that each kind of
    damage is met, whatever else was stored."""
    source = random.Random(seed)
    stored = {path.parent.name: path for path in store.payloads()}
    asked = dict.fromkeys(digest.hex() for prompt in prompts for digest in store.hashes(prompt))
    for kind, path in enumerate(stored[name] for name in list(asked)[::3] if name in stored):
        if kind % 3 == 0:
            path.unlink()
        elif kind % 3 == 1:
            path.write_bytes(path.read_bytes()[: source.randrange(5000)])
        else:
            spoiled = bytearray(path.read_bytes())
            spoiled[source.randrange(len(spoiled))] ^= 1 << source.randrange(8)
            path.write_bytes(spoiled)


@scenario
def mixture(folder: Path, seed: int) -> Values:
    drawn_waves = waves(seed)
    quiet = [p.model_copy(update={"abort_after_steps": None}) for w in drawn_waves for p in w]
    steps: list[Step] = [FREE_BLOCKS]
    for wave in drawn_waves:
        steps += (Generate(prompts=wave), SAVED, Settle(), ResetPrefixCache(), FREE_BLOCKS)
    store = SharedStore(folder / "store")
    crowded: dict[str, Any] = {"engine": CROWDED, "save_decode": True}
    alone, first = run_replicas(
        [Job(steps=one_by_one(quiet)), store.job(*steps, **crowded)], folder
    )
    damage(store, quiet, seed)
    values: Values = {"alone": alone, "first": first}
    for mode in MODES:
        copy = store.copy(folder / mode)
        values[mode] = run_replica(copy.job(*steps, load_mode=mode, **crowded), folder)
    return values


@pytest.mark.parametrize("name", ["first", *MODES])
def test_every_prompt_gets_the_tokens_that_it_gets_alone(name: str) -> None:
    run: Result = mixture(SEED)[name]
    alone: Result = mixture(SEED)["alone"]
    prompts = [prompt for wave in waves(SEED) for prompt in wave]
    for prompt, found, expected in zip(prompts, run.tokens, alone.tokens, strict=True):
        aborted = prompt.abort_after_steps is not None
        assert found == (expected[: len(found)] if aborted else expected)


@pytest.mark.parametrize("name", ["first", *MODES])
def test_no_request_ends_otherwise_than_asked(name: str) -> None:
    run: Result = mixture(SEED)[name]
    reasons = [output.finish_reason for outputs in run.outputs for output in outputs]
    assert set(reasons) == {"length", "abort"}
    assert run.metrics["vllm:num_preemptions"] > 0


@pytest.mark.parametrize("name", ["first", *MODES])
def test_every_block_is_free_in_the_end(name: str) -> None:
    free = [answer for answer in mixture(SEED)[name].answers if type(answer) is int]
    assert set(free) == {CROWDED["num_gpu_blocks_override"] - 1}
    assert False not in mixture(SEED)[name].answers


@pytest.mark.parametrize("mode", MODES)
def test_damage_is_met_and_survived(mode: str) -> None:
    run: Result = mixture(SEED)[mode]
    assert run.metrics["vllm:objkv_load_corrupt"] > 0
    assert run.metrics["vllm:objkv_load_ghosts"] > 0
    assert run.metrics["vllm:objkv_load_bytes"] > 0
    assert not [w for w in run.warnings if w.logger.startswith("objkv") and w.level != "WARNING"]
