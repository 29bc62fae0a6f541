"""Weights that change in place, and sleep: KV of the old weights is never the new ones'."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.cache import Values, scenario
from tests.engine.fleet import CHUNK, SAVED, SharedStore, one_by_one
from tests.engine.harness import run_replica, run_replicas
from tests.engine.job import Call, Generate, Job, ResetPrefixCache, Settle
from tests.engine.prompts import prompt_of

pytestmark = pytest.mark.wide

WHOLE = 3 * CHUNK
PROMPT = prompt_of(WHOLE + 9)
ASK = one_by_one([PROMPT])
UPDATE = Call(function="tests.engine.fleet:update_weights")
SLEEP = Call(function="tests.engine.test_identity_updates:nap")


def nap(llm: Any) -> bool:
    """Sleep and wake up again; vLLM on the CPU keeps its memory all the same."""
    llm.sleep(level=1)
    llm.wake_up()
    return bool(llm.llm_engine.is_sleeping())


@scenario
def updates(folder: Path) -> Values:
    store = SharedStore(folder / "store")
    steps = (*ASK, *ASK, UPDATE, *ASK, *ASK)
    # vLLM's own prefix cache still has blocks of the old weights when these are exchanged.
    kept = (Generate(prompts=(PROMPT,)), SAVED, Settle())
    unclean = (*kept, UPDATE, ResetPrefixCache(), *ASK, *ASK)
    alone, updated = run_replicas([Job(steps=steps), store.job(*steps)], folder)
    spoilt = run_replica(store.copy(folder / "spoilt").job(*unclean), folder)
    fresh = run_replica(store.job(*ASK), folder)
    return {
        "alone": alone,
        "updated": updated,
        "spoilt": spoilt,
        "fresh": fresh,
        "namespaces": len(store.namespaces()),
    }


def test_after_an_update_without_a_reset_nothing_of_the_old_weights_is_loaded() -> None:
    run = updates()
    old, _, new, _ = run["alone"].tokens
    assert old != new
    assert run["updated"].tokens == [old, old, new, new]
    assert run["updated"].cached == [0, WHOLE, 0, WHOLE]
    assert run["namespaces"] == 2


def test_replicas_with_the_old_weights_never_see_the_new_ones_kv() -> None:
    assert updates()["fresh"].cached == [WHOLE]
    assert updates()["fresh"].tokens == updates()["alone"].tokens[:1]


def test_an_update_with_blocks_left_is_over_once_vllm_dropped_them() -> None:
    run = updates()["spoilt"]
    old, _, new, _ = updates()["alone"].tokens
    assert run.tokens == [old, new, new]
    assert run.cached == [WHOLE, 0, WHOLE]


def test_an_update_is_told_to_the_operator() -> None:
    told = [w.message for w in updates()["updated"].warnings if "weights may have" in w.message]
    assert told == ["weights may have changed in place by=reload_weights"]


@scenario
def naps(folder: Path) -> Values:
    store = SharedStore(folder / "store")
    slept = run_replica(store.job(*ASK, SLEEP, *ASK, *ASK), folder)
    return {"slept": slept, "namespaces": len(store.namespaces())}


def test_a_replica_that_slept_answers_as_before_and_shares_with_itself() -> None:
    """While it sleeps its weights may be exchanged, of which nobody tells a connector."""
    run = naps()["slept"]
    assert len(set(run.tokens)) == 1
    assert run.cached == [0, 0, WHOLE]
    assert run.answers.count(False) == 1
    assert naps()["namespaces"] == 2
