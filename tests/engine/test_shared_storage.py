"""Replicas that are given one folder and nothing else share all that vLLM's own example would.

``ExampleConnector`` (once SharedStorageConnector) saves whole prompts below a folder. Where it does
not find what it saved, it stands beside objkv here. Source: vLLM 0.32,
``kv_connector/v1/example_connector.py``.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engine.cache import Values, scenario
from tests.engine.fleet import BLOCK, CONNECTOR, NUMBERS_TOLD, PATIENT, SAVED, SharedStore
from tests.engine.harness import run_replica, run_replicas
from tests.engine.images import Shown, engine, images, make_model, words
from tests.engine.job import Generate, Job, Prompt, ResetPrefixCache, Result, Settle, Step
from tests.engine.prompts import prompt_of, tokens_of

pytestmark = pytest.mark.wide


def objkv(folder: Path, *steps: Step, **more: Any) -> Job:
    """A replica whose only address is a folder; chunks are single blocks, as the example's are."""
    extra = PATIENT | {"bulk_url": f"file://{folder}", "chunk_tokens": BLOCK} | more.pop("also", {})
    connector = {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    return Job(steps=steps, connector=connector, **more)


def example(folder: Path, *steps: Step, **more: Any) -> Job:
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    return Job(steps=steps, connector=connector, **more)


def one_by_one(prompts: Sequence[Prompt]) -> tuple[Step, ...]:
    """Each prompt alone; none finds anything in the replica's own cache."""
    steps: list[Step] = []
    for prompt in prompts:
        steps += (Generate(prompts=(prompt,)), Settle(), ResetPrefixCache())
    return tuple(steps)


WHOLE = prompt_of(3 * BLOCK + 2)
ONE_MORE = {n: prompt_of(n * BLOCK + 1, seed=n) for n in (1, 2, 5)}
"""A chunk or some, and one token: all that can be loaded of a prompt, and nothing besides."""
LONGER = prompt_of(7 * BLOCK + 2)
"""Begins with ``WHOLE``."""
BRANCH = Prompt(tokens=WHOLE.tokens[: 2 * BLOCK] + tokens_of(80, seed=9))
"""Begins as ``WHOLE`` does, and goes on otherwise."""
SAVED_FIRST = (WHOLE, *ONE_MORE.values())
ASKED = (WHOLE, *ONE_MORE.values(), LONGER, BRANCH)
AGAIN = (LONGER, BRANCH)


@scenario
def texts(folder: Path) -> Values:
    own, theirs = folder / "objkv", folder / "example"
    asked = one_by_one((*ASKED, *AGAIN))
    return {
        "alone": run_replica(Job(steps=one_by_one(ASKED)), folder),
        "first": run_replica(objkv(own, *one_by_one(SAVED_FIRST)), folder),
        "second": run_replica(objkv(own, *one_by_one(ASKED)), folder),
        "third": run_replica(objkv(own, *one_by_one(AGAIN), NUMBERS_TOLD), folder),
        "example first": run_replica(example(theirs, *one_by_one(SAVED_FIRST)), folder),
        "example second": run_replica(example(theirs, *asked), folder),
        "entries": sorted(path.name for path in own.iterdir()),
        "payloads": len(list(own.glob("*/*/*/*.safetensors"))),
    }


def cached(run: str) -> list[int | None]:
    result: Result = texts()[run]
    return [None if n is None else n // BLOCK for n in result.cached]


def test_loaded_or_not_every_prompt_gets_the_tokens_of_vllm_alone() -> None:
    alone = texts()["alone"].tokens
    assert texts()["first"].tokens == alone[: len(SAVED_FIRST)]
    assert texts()["second"].tokens == alone
    assert texts()["third"].tokens[: len(AGAIN)] == alone[-len(AGAIN) :]
    assert len(set(alone)) == len(ASKED)


def test_another_process_loads_what_the_example_would_load_as_well() -> None:
    assert cached("first") == [0] * len(SAVED_FIRST)
    assert cached("second")[0] == 3
    assert cached("example second")[0] == 3


def test_a_prompt_of_some_chunks_and_one_token_is_loaded() -> None:
    """The example saves such a prompt under one name and looks for it under another."""
    assert cached("second")[1:4] == [1, 2, 5]
    assert cached("example second")[1:4] == [0, 0, 0]


def test_a_prefix_of_another_prompt_is_loaded() -> None:
    """The example knows whole prompts only."""
    assert cached("second")[4:] == [3, 2]
    assert cached("example second")[4:6] == [0, 0]


def test_a_request_that_loaded_its_beginning_saves_its_end() -> None:
    """The example does one or the other."""
    assert cached("third")[: len(AGAIN)] == [7, len(BRANCH.tokens) // BLOCK]


def test_the_folder_holds_payloads_and_one_identity_and_no_index() -> None:
    [namespace] = texts()["entries"]
    assert len(namespace) == 32
    whole = {tuple(p.tokens[: n * BLOCK]) for p in ASKED for n in range(1, 1 + _chunks(p))}
    assert texts()["payloads"] == len(whole)


def _chunks(prompt: Prompt) -> int:
    return len(prompt.tokens) // BLOCK


HEAD, TAIL = words(10, 40), words(60, 30)
"""The image stands in the second and third chunk of 32."""
RED, BLUE = 1, 2
ONE: list[Shown] = [{"words": f"{HEAD} <image> {TAIL}", "seeds": [seed]} for seed in (RED, BLUE)]
TWO: list[Shown] = [
    {"words": f"{HEAD} <image> {TAIL} <image> {words(200, 20)}", "seeds": seeds}
    for seeds in ([RED, RED], [RED, BLUE], [BLUE, RED])
]
SHOWN_FIRST = [ONE[0], TWO[0]]
SHOWN = [*ONE, *TWO]


@scenario
def pictures(folder: Path) -> Values:
    model = engine(make_model(folder / "model"))
    own, asked = folder / "objkv", images(SHOWN)
    return {
        "alone": run_replica(Job(steps=(asked,), engine=model), folder),
        "first": run_replica(objkv(own, images(SHOWN_FIRST), engine=model), folder),
        "second": run_replica(objkv(own, asked, engine=model), folder),
    }


def shown(run: str, what: str) -> list[Any]:
    [answers] = pictures()[run].answers
    return [answer[what] for answer in answers]


def test_prompts_with_images_get_the_tokens_of_vllm_alone() -> None:
    assert shown("second", "tokens") == shown("alone", "tokens")
    assert len({tuple(tokens) for tokens in shown("alone", "tokens")}) == len(SHOWN)


def test_a_prompt_is_shared_up_to_the_first_image_that_is_another() -> None:
    """The example's names hold all images of a prompt, so that it would find the first only."""
    assert shown("first", "cached") == [0, 64]
    second_image = 32 * ((40 + 7 + 30) // 32)
    whole = 32 * ((shown("second", "length")[2] - 1) // 32)
    assert shown("second", "cached") == [64, 32, whole, second_image, 64]


NEW_TOKENS = 108
LENGTH = 9 * BLOCK + 12
CROWD = tuple(prompt_of(LENGTH, seed=30 + i, max_tokens=NEW_TOKENS) for i in range(6))
TINY = {"num_gpu_blocks_override": 32, "max_model_len": 640}
"""Three prompts fit, and not what they generate."""
MODES = ("async", "layerwise")


@scenario
def crowded(folder: Path) -> Values:
    own = folder / "objkv"
    crowd = (Generate(prompts=CROWD), SAVED, NUMBERS_TOLD)
    alone = run_replica(Job(steps=one_by_one(CROWD)), folder)
    first = run_replica(objkv(own, *crowd, engine=TINY), folder)
    copies = {mode: SharedStore(own).copy(folder / mode).folder for mode in MODES}
    jobs = [
        objkv(copies[mode], *crowd, engine=TINY, also={"load_mode": mode, "save_decode": True})
        for mode in MODES
    ]
    runs = run_replicas(jobs, folder)
    return {"alone": alone, "first": first} | dict(zip(MODES, runs, strict=True))


@pytest.mark.parametrize("run", ["first", *MODES])
def test_requests_that_were_preempted_and_resumed_get_their_tokens(run: str) -> None:
    result: Result = crowded()[run]
    assert result.metrics["vllm:num_preemptions"] > 0
    assert result.tokens[: len(CROWD)] == crowded()["alone"].tokens
    assert {output.finish_reason for output in result.outputs[0]} == {"length"}


@pytest.mark.parametrize("mode", MODES)
def test_requests_that_were_preempted_load_what_lies_in_the_folder(mode: str) -> None:
    result: Result = crowded()[mode]
    assert not result.metrics.get("vllm:objkv_load_failures")
    assert all(count and count >= LENGTH // BLOCK * BLOCK for count in result.cached[: len(CROWD)])
