"""KV belongs to weights: those that changed in place, or from before a reset, are never loaded for
others."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.engine import fleet
from tests.engine.fleet import CHUNK, RESET, SAVED, SETTLED, SharedStore, one_by_one
from tests.engine.harness import run_replica
from tests.engine.job import Job, call, generate, prompt_of

pytestmark = pytest.mark.slow
WHOLE = 3 * CHUNK
PLAIN = prompt_of(WHOLE + 9)
ASK = one_by_one([PLAIN])
UPDATE = call(fleet.update_weights)
RESET_ALL = call(fleet.reset, connector=True)


@functools.cache
def alone() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What vLLM generates without objkv, before an update of the weights and after it."""
    with tempfile.TemporaryDirectory() as folder:
        old, new = run_replica(Job(steps=(*ASK, UPDATE, *ASK)), Path(folder)).tokens
    assert old != new
    return old, new


def test_after_an_update_nothing_of_the_old_weights_is_loaded_nor_the_new_ones_by_others(
    tmp_path: Path,
) -> None:
    store, (old, new) = SharedStore(tmp_path / "store"), alone()
    run = run_replica(store.job(*ASK, *ASK, UPDATE, *ASK, *ASK), tmp_path)
    assert run.tokens == [old, old, new, new]
    assert run.cached == [0, WHOLE, 0, WHOLE]
    assert len(store.namespaces()) == 2
    told = [w.message for w in run.warnings if "weights may have" in w.message]
    assert told == ["weights may have changed in place by=reload_weights"]
    # Blocks of the old weights are left until vLLM has dropped them.
    kept = (generate(PLAIN), SAVED, SETTLED, UPDATE, RESET, *ASK, *ASK)
    unclean = run_replica(store.copy(tmp_path / "unclean").job(*kept), tmp_path)
    assert unclean.tokens == [old, new, new]
    assert unclean.cached == [WHOLE, 0, WHOLE]
    fresh = run_replica(store.job(*ASK), tmp_path)
    assert (fresh.tokens, fresh.cached) == ([old], [WHOLE])


def nap(llm: Any) -> None:
    """Sleep and wake up again; vLLM on the CPU keeps its memory all the same."""
    llm.sleep(level=1)
    llm.wake_up()


def test_a_replica_that_slept_answers_as_before_and_shares_with_itself(tmp_path: Path) -> None:
    """While it sleeps its weights may be exchanged, of which nobody tells a connector."""
    store = SharedStore(tmp_path / "store")
    run = run_replica(store.job(*ASK, call(nap), *ASK, *ASK), tmp_path)
    assert run.tokens == [alone()[0]] * 3
    assert run.cached == [0, 0, WHOLE]


def test_a_reset_replica_loads_nothing_from_before_and_saves_anew(tmp_path: Path) -> None:
    store = SharedStore(tmp_path / "store")
    run = run_replica(store.job(*ASK, *ASK, RESET_ALL, *ASK, *ASK, RESET_ALL, *ASK), tmp_path)
    assert run.tokens == [alone()[0]] * 5
    assert run.cached == [0, WHOLE, 0, WHOLE, 0]
    assert len(store.namespaces()) == 3
    assert len([w for w in run.warnings if "cache reset" in w.message]) == 2
