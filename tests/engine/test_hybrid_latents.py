"""Multi-head latent attention: what is loaded are the very bytes that were saved.

Tokens say nothing here: on this backend they depend on what else is in a step, and on whether a
prompt is computed in one piece, with or without objkv.
"""

from pathlib import Path

from safetensors import safe_open

from tests.engine.cache import Values, scenario
from tests.engine.fleet import NUMBERS_TOLD, SAVED, SharedStore
from tests.engine.harness import run_replica
from tests.engine.job import Call, Generate, Job, Step
from tests.engine.prompts import prompt_of

BLOCK = 16
"""What this backend makes of the wish for 32."""
LENGTHS = (300, 700)
PROMPTS = tuple(prompt_of(n, seed=n) for n in LENGTHS)
LOADED = [256, 640]
LAYERS = 3
PAGES = "tests.engine.pages:request_pages"


def job(store: SharedStore, *steps: Step) -> Job:
    """A replica on the store that notes the pages of each request before its first step."""
    watch = Call(function="tests.engine.pages:watch_pages")
    return store.job(watch, *steps).model_copy(update={"model": "deepseek"})


@scenario
def shared(folder: Path) -> Values:
    store = SharedStore(folder / "store")
    steps = (*(Generate(prompts=(prompt,)) for prompt in PROMPTS), SAVED, Call(function=PAGES))
    runs: Values = {"first": run_replica(job(store, *steps), folder)}
    runs["stored"] = sorted(_shapes(path) for path in store.payloads())
    runs["second"] = run_replica(job(store, *steps, NUMBERS_TOLD), folder)
    return runs


def _shapes(payload: Path) -> list[list[object]]:
    """Name, dtype and shape of each tensor of a payload."""
    with safe_open(payload, framework="np") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        return [[n, s.get_dtype(), list(s.get_shape())] for n, s in sorted(slices.items())]


def test_whole_chunks_are_loaded() -> None:
    runs = shared()
    assert runs["first"].cached == [0, 0]
    assert runs["second"].cached[: len(PROMPTS)] == LOADED


def test_the_loaded_blocks_hold_the_bytes_that_were_saved() -> None:
    runs = shared()
    computed, loaded = runs["first"].answers[-1], runs["second"].answers[-1]
    assert len(computed) == len(loaded) == len(PROMPTS)
    for before, after, tokens in zip(computed, loaded, LOADED, strict=True):
        assert len(before) == len(after) == LAYERS
        for layer, digests in before.items():
            assert after[layer][: tokens // BLOCK] == digests[: tokens // BLOCK], layer
            assert len(set(digests)) == len(digests)


def test_a_payload_has_one_head_whose_content_is_latent_and_rope() -> None:
    for tensors in shared()["stored"]:
        assert [(dtype, shape) for _, dtype, shape in tensors] == [
            ("F32", [8, 1, BLOCK, 512 + 64])
        ] * LAYERS
