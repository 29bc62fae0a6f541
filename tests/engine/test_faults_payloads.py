"""Payloads that are gone, short, changed or another's, and records that are lost: recomputed."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.cache import Values, scenario
from tests.engine.fleet import CHUNK, SharedStore, one_by_one
from tests.engine.harness import run_replicas
from tests.engine.job import Generate, Job, Prompt, Step
from tests.engine.prompts import prompt_of, tokens_of

MODES = ("async", "layerwise")
CHUNKS = 5
BAD = 2
"""The chunk that something happens to."""


def flip(store: SharedStore, prompt: Prompt, *, offset: int) -> None:
    """Flip one bit of a payload; a negative offset counts from its end."""
    path = store.payload(prompt, BAD)
    spoiled = bytearray(path.read_bytes())
    spoiled[offset] ^= 4
    path.write_bytes(spoiled)


def truncate(store: SharedStore, prompt: Prompt, *, nbytes: int) -> None:
    path = store.payload(prompt, BAD)
    path.write_bytes(path.read_bytes()[:nbytes])


def swap(store: SharedStore, prompt: Prompt) -> None:
    shutil.copyfile(store.payload(prompt, BAD + 1), store.payload(prompt, BAD))


FAULTS: dict[str, Callable[[SharedStore, Prompt], None]] = {
    "nothing": lambda store, prompt: None,
    "bit flipped in a frame": lambda store, prompt: flip(store, prompt, offset=-1000),
    "bit flipped in the header": lambda store, prompt: flip(store, prompt, offset=20),
    "payload missing": lambda store, prompt: store.payload(prompt, BAD).unlink(),
    "payload empty": lambda store, prompt: truncate(store, prompt, nbytes=0),
    "payload cut in the header": lambda store, prompt: truncate(store, prompt, nbytes=100),
    "payload cut in a frame": lambda store, prompt: truncate(store, prompt, nbytes=-1),
    "payload of another chunk": swap,
    "record lost": lambda store, prompt: store.forget(prompt, BAD),
}
NAMES = list(FAULTS)
MISSING = {"payload missing"}
UNNOTICED = {"nothing", "record lost"}
CORRUPT = [name for name in NAMES if name not in MISSING | UNNOTICED]
PROMPTS = {name: prompt_of(CHUNKS * CHUNK + 9, seed=i) for i, name in enumerate(FAULTS)}
SIBLINGS = [
    Prompt(tokens=prompt.tokens[: 4 * CHUNK] + tokens_of(77, seed=70 + i))
    for i, prompt in enumerate(PROMPTS.values())
]
"""Prompts with the same chunks, run beside the others: they meet the same fault at once."""
STEPS = one_by_one(PROMPTS.values())
WITH_SIBLINGS: tuple[Step, ...] = (
    Generate(
        prompts=tuple(x for pair in zip(PROMPTS.values(), SIBLINGS, strict=True) for x in pair)
    ),
)


@scenario
def spoiled(folder: Path) -> Values:
    store = SharedStore(folder / "store")
    alone, saver = run_replicas([Job(steps=STEPS), store.job(*STEPS)], folder)
    for name, spoil in FAULTS.items():
        spoil(store, PROMPTS[name])
    copies = {mode: store.copy(folder / mode) for mode in MODES}
    values: Values = {"alone": alone, "saver": saver}
    second = run_replicas([copies[m].job(*STEPS, load_mode=m) for m in MODES], folder)
    values |= {f"second {m}": run for m, run in zip(MODES, second, strict=True)}
    third = run_replicas([copies[m].job(*STEPS, load_mode=m) for m in MODES], folder)
    values |= {f"third {m}": run for m, run in zip(MODES, third, strict=True)}
    return values


@scenario
def spoiled_for_many(folder: Path) -> Values:
    """All prompts and their siblings at once: many requests, some of which fail."""
    store = SharedStore(folder / "store")
    alone, _ = run_replicas([Job(steps=WITH_SIBLINGS), store.job(*STEPS)], folder)
    for name, spoil in FAULTS.items():
        spoil(store, PROMPTS[name])
    copies = {mode: store.copy(folder / mode) for mode in MODES}
    runs = run_replicas([copies[m].job(*WITH_SIBLINGS, load_mode=m) for m in MODES], folder)
    return {"alone": alone} | dict(zip(MODES, runs, strict=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("replica", ["second", "third"])
@pytest.mark.parametrize("name", NAMES)
def test_no_fault_changes_a_token_or_ends_a_request(name: str, replica: str, mode: str) -> None:
    run, at = spoiled()[f"{replica} {mode}"], NAMES.index(name)
    assert run.tokens[at] == spoiled()["alone"].tokens[at]
    assert run.outputs[at][0].finish_reason == "length"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_the_replica_after_the_next_loads_all_of_it_again(name: str, mode: str) -> None:
    assert spoiled()[f"third {mode}"].cached[NAMES.index(name)] == CHUNKS * CHUNK


@pytest.mark.parametrize("mode", MODES)
def test_only_chunks_before_a_lost_record_are_loaded(mode: str) -> None:
    cached = spoiled()[f"second {mode}"].cached
    assert cached[NAMES.index("record lost")] == BAD * CHUNK
    assert cached[NAMES.index("nothing")] == CHUNKS * CHUNK


@pytest.mark.parametrize("mode", MODES)
def test_each_fault_is_counted_once(mode: str) -> None:
    metrics = spoiled()[f"second {mode}"].metrics
    assert metrics["vllm:objkv_load_failures"] == len(CORRUPT) + len(MISSING)
    assert metrics["vllm:objkv_load_ghosts"] == len(MISSING)
    assert metrics["vllm:objkv_load_corrupt"] == len(CORRUPT)
    assert not spoiled()[f"third {mode}"].metrics.get("vllm:objkv_load_failures")


@pytest.mark.parametrize("mode", MODES)
def test_each_corrupt_payload_is_told_of_once(mode: str) -> None:
    refused = [w for w in spoiled()[f"second {mode}"].warnings if "payload refused" in w.message]
    assert len(refused) == len(CORRUPT)


@pytest.mark.parametrize("mode", MODES)
def test_many_requests_with_the_same_faults_at_once_all_get_their_tokens(mode: str) -> None:
    run = spoiled_for_many()[mode]
    assert run.tokens == spoiled_for_many()["alone"].tokens
    assert {output.finish_reason for output in run.outputs[0]} == {"length"}
    assert run.metrics["vllm:objkv_load_failures"] >= len(CORRUPT) + len(MISSING)
