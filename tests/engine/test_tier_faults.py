"""objkv's tier with bad payloads and slow stores, an abort, and weights that change: computed, and
with the tokens of a replica without a connector."""

from pathlib import Path

import pytest

from tests.engine.cache import Values, scenario
from tests.engine.fleet import SharedStore, asked
from tests.engine.harness import run_replica, run_replicas
from tests.engine.job import Call, Generate, Job, ResetPrefixCache, Settle, Step, Touch
from tests.engine.prompts import prompt_of
from tests.engine.tiered import spoil, tiered

pytestmark = pytest.mark.wide

CHUNK = 128
WHOLE = 2 * CHUNK
NAMES = ("index hangs", "load hangs", "abort", "payloads gone", "reset", "weights")
PROMPTS = {name: prompt_of(WHOLE + 20, seed=i) for i, name in enumerate(NAMES)}
FORGET = (Settle(), ResetPrefixCache())
RESET = (Settle(), ResetPrefixCache(connector=True))
UPDATE = Call(function="tests.engine.fleet:update_weights")
SHORT_S = 0.3
"""How long a tier waits for what never comes."""


def ask(*names: str) -> tuple[Step, ...]:
    return tuple(step for name in names for step in (Generate(prompts=(PROMPTS[name],)), *FORGET))


def call(name: str, **arguments: object) -> Call:
    module = "fleet" if name == "hold_gets" else "tiered"
    return Call(function=f"tests.engine.{module}:{name}", arguments=arguments)


def hanging(folder: Path) -> tuple[Step, ...]:
    """Ask while the index, and then a payload, does not come; then abort a load."""
    index, loads, last = (folder / name for name in ("index", "loads", "last"))
    aborted = PROMPTS["abort"].model_copy(update={"abort_when": asked(last)})
    return (
        call("hold_finds", gate=str(index), deadline_s=SHORT_S),
        Generate(prompts=(PROMPTS["index hangs"],)),
        Touch(path=index),
        *FORGET,
        call("hold_finds", gate=str(index), deadline_s=120),
        call("hold_gets", gate=str(loads)),
        call("shorten_loads", deadline_s=SHORT_S),
        *ask("load hangs"),
        Touch(path=loads),
        call("shorten_loads", deadline_s=300),
        call("hold_gets", gate=str(last)),
        Generate(prompts=(aborted,)),
        Touch(path=last),
        *FORGET,
        *ask("abort"),
    )


def changing(store: SharedStore) -> tuple[Step, ...]:
    """Remove all payloads, reset all caches, and change the weights before another reset."""
    return (
        call("lose", folder=str(store.bulk)),
        *ask("payloads gone", "reset"),
        *RESET,
        *ask("reset", "reset"),
        UPDATE,
        *ask("weights", "weights"),
        *RESET,
        *ask("weights", "weights"),
    )


ALONE = (*ask(*NAMES), UPDATE, ResetPrefixCache(), *ask("weights"))


@scenario
def troubled(folder: Path) -> Values:
    store = SharedStore(folder / "store")
    jobs = [Job(steps=ALONE), tiered(store, *ask(*NAMES), chunk_tokens=CHUNK)]
    alone, saver = run_replicas(jobs, folder)
    spoilt = store.copy(folder / "spoilt")
    values: Values = {"spoilt payloads": spoil(spoilt)}
    steps = (*hanging(folder), *changing(store))
    jobs = [
        tiered(store, *steps, chunk_tokens=CHUNK),
        tiered(spoilt, *ask(*NAMES), chunk_tokens=CHUNK),
    ]
    busy, first = run_replicas(jobs, folder)
    again = run_replica(tiered(spoilt, *ask(*NAMES), chunk_tokens=CHUNK), folder)
    values |= {"alone": alone, "saver": saver, "busy": busy, "first": first, "again": again}
    return values | {"namespaces": len(store.namespaces())}


def test_no_fault_changes_a_token_or_ends_a_request() -> None:
    runs = troubled()
    alone = dict(zip((*NAMES, "new weights"), runs["alone"].tokens, strict=True))
    assert len(set(alone.values())) == len(alone)
    old = [alone[name] for name in NAMES]
    assert [runs[name].tokens for name in ("saver", "first", "again")] == [old] * 3
    ended = [tokens for tokens in runs["busy"].tokens if tokens]  # except for the aborted request
    new = [alone["new weights"]] * 4
    assert ended == [alone[name] for name in (*NAMES[:5], *["reset"] * 2)] + new


def test_a_changed_payload_is_computed_and_saved_anew() -> None:
    runs = troubled()
    assert runs["spoilt payloads"] == 2 * len(NAMES)
    assert runs["first"].cached == [0] * len(NAMES)
    assert runs["first"].metrics["vllm:objkv_tier_load_corrupt"] == 2 * len(NAMES)
    assert runs["again"].cached == [WHOLE] * len(NAMES)


def test_what_hangs_or_is_gone_is_computed_after_its_deadline() -> None:
    run = troubled()["busy"]
    assert run.cached[:2] == [0, 0]
    assert run.cached[4:6] == [0, 0]
    for name, count in {"lookup_deadlines": 1, "load_deadlines": 1, "load_ghosts": 4}.items():
        assert run.metrics[f"vllm:objkv_tier_{name}"] == count


def test_a_load_whose_request_was_aborted_serves_the_next() -> None:
    run = troubled()["busy"]
    assert run.outputs[2][0].finish_reason == "abort"
    assert run.cached[3] == WHOLE


def test_nothing_from_before_a_reset_or_of_other_weights_is_loaded() -> None:
    """Cached tokens afterwards come from vLLM's own memory."""
    runs = troubled()
    assert all(runs["busy"].answers[-1:])
    assert runs["busy"].cached[6:] == [0, WHOLE] * 3
    assert runs["namespaces"] == 3
    assert runs["busy"].metrics["vllm:objkv_tier_save_refused"] == 2  # between update and reset
