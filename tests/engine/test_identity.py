"""KV belongs to weights: those that changed in place, or from before a reset, are never loaded for
others."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.fleet import CHUNK, SAVED, SharedStore, one_by_one
from tests.engine.harness import run_replica
from tests.engine.job import Call, Generate, Job, ResetPrefixCache, Settle
from tests.engine.prompts import prompt_of
from tests.engine.scenario import Values, scenario

pytestmark = pytest.mark.slow
CHUNKS = 3
WHOLE = CHUNKS * CHUNK
PLAIN = prompt_of(WHOLE + 9)
OTHER = prompt_of(WHOLE + 9, seed=1)
ASK = one_by_one([PLAIN])
UPDATE = Call(function="tests.engine.fleet:update_weights")
RESET = ResetPrefixCache(connector=True)


def nap(llm: Any) -> None:
    """Sleep and wake up again; vLLM on the CPU keeps its memory all the same."""
    llm.sleep(level=1)
    llm.wake_up()


@scenario
def changes(folder: Path) -> Values:
    """Updates of the weights, with and without blocks of the old ones; sleep; resets."""
    store = SharedStore(folder / "store")
    steps = (*ASK, *ASK, UPDATE, *ASK, *ASK)
    alone = run_replica(Job(steps=(*steps, *one_by_one([OTHER]))), folder)
    updated = run_replica(store.job(*steps), folder)
    kept = (Generate(prompts=(PLAIN,)), SAVED, Settle())
    unclean = (*kept, UPDATE, ResetPrefixCache(), *ASK, *ASK)
    spoilt = run_replica(store.copy(folder / "spoilt").job(*unclean), folder)
    slept = SharedStore(folder / "slept")
    sleep = Call(function="tests.engine.test_identity:nap")
    resets = (*ASK, *ASK, RESET, *ASK, *ASK, RESET, *ASK)
    reset = SharedStore(folder / "reset")
    return {
        "alone": alone,
        "updated": updated,
        "namespaces": len(store.namespaces()),
        "spoilt": spoilt,
        "fresh": run_replica(store.job(*ASK), folder),
        "slept": run_replica(slept.job(*ASK, sleep, *ASK, *ASK), folder),
        "reset": run_replica(reset.job(*resets), folder),
        "reset namespaces": len(reset.namespaces()),
    }


def test_after_an_update_nothing_of_the_old_weights_is_loaded() -> None:
    run = changes()
    old, _, new, *_ = run["alone"].tokens
    assert old != new
    assert run["updated"].tokens == [old, old, new, new]
    assert run["updated"].cached == [0, WHOLE, 0, WHOLE]
    assert run["namespaces"] == 2
    told = [w.message for w in run["updated"].warnings if "weights may have" in w.message]
    assert told == ["weights may have changed in place by=reload_weights"]


def test_replicas_with_the_old_weights_never_see_the_new_ones_kv() -> None:
    assert changes()["fresh"].cached == [WHOLE]
    assert changes()["fresh"].tokens == changes()["alone"].tokens[:1]


def test_an_update_with_blocks_left_is_over_once_vllm_dropped_them() -> None:
    run = changes()["spoilt"]
    old, _, new, *_ = changes()["alone"].tokens
    assert run.tokens == [old, new, new]
    assert run.cached == [WHOLE, 0, WHOLE]


def test_a_replica_that_slept_answers_as_before_and_shares_with_itself() -> None:
    """While it sleeps its weights may be exchanged, of which nobody tells a connector."""
    run = changes()["slept"]
    assert run.tokens == changes()["alone"].tokens[:1] * 3
    assert run.cached == [0, 0, WHOLE]


def test_a_reset_replica_loads_nothing_from_before_and_saves_anew() -> None:
    run = changes()["reset"]
    assert run.tokens == changes()["alone"].tokens[:1] * 5
    assert run.cached == [0, WHOLE, 0, WHOLE, 0]
    assert changes()["reset namespaces"] == 3
    assert len([w for w in run.warnings if "cache reset" in w.message]) == 2
