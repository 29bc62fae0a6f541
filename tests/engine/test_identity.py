"""KV belongs to weights: those of an adapter's files, those that changed in place, those from
before a reset are never loaded for others."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.engine.fleet import CHUNK, SAVED, SharedStore, one_by_one
from tests.engine.harness import run_replica, run_replicas
from tests.engine.job import Call, Generate, Job, Prompt, ResetPrefixCache, Settle, Step
from tests.engine.model import make_adapter
from tests.engine.prompts import prompt_of
from tests.engine.scenario import Values, scenario
from tests.engine.tiered import tiered

pytestmark = pytest.mark.slow
CHUNKS = 3
WHOLE = CHUNKS * CHUNK
PLAIN = prompt_of(WHOLE + 9)
OTHER = prompt_of(WHOLE + 9, seed=1)
ASK = one_by_one([PLAIN])
UPDATE = Call(function="tests.engine.fleet:update_weights")
RESET = ResetPrefixCache(connector=True)
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
ONE_AT_A_TIME = LORA | {"max_loras": 1, "max_cpu_loras": 1}
"""Of two adapters vLLM puts the older away, and reads its files again for its next request."""


def adapted(folder: Path) -> Prompt:
    return PLAIN.model_copy(update={"lora": folder})


def exchange(_llm: Any, folder: str, other: str) -> None:
    """Put other files where an adapter's are, as a training job does. Runs in the replica."""
    for file in Path(other).iterdir():
        partial = Path(folder) / f"{file.name}.partial"
        shutil.copyfile(file, partial)
        partial.rename(Path(folder) / file.name)


def nap(llm: Any) -> None:
    """Sleep and wake up again; vLLM on the CPU keeps its memory all the same."""
    llm.sleep(level=1)
    llm.wake_up()


@scenario
def exchanges(folder: Path) -> Values:
    store = SharedStore(folder / "store")
    ada, ben, cid = (
        make_adapter(folder / name, seed=i) for i, name in enumerate(("ada", "ben", "cid"))
    )
    arguments = {"folder": str(ada), "other": str(ben)}
    exchanged = Call(function="tests.engine.test_identity:exchange", arguments=arguments)
    steps = (
        *one_by_one([adapted(ada), adapted(ada)]),
        exchanged,
        *one_by_one([adapted(ada)]),  # vLLM still has the weights that it read
        *one_by_one([adapted(cid)]),  # now it has not
        *one_by_one([adapted(ada), adapted(ada)]),
    )
    first = run_replica(store.job(*steps, engine=ONE_AT_A_TIME), folder)
    files = len(store.payloads())
    again = one_by_one([adapted(ada), adapted(ben)])
    alone = Job(steps=one_by_one([adapted(cid), adapted(ben)]), engine=LORA)
    second, other = run_replicas([store.job(*again, engine=LORA), alone], folder)
    return {"first": first, "second": second, "alone": other, "files": files}


def test_an_adapter_exchanged_while_the_engine_runs_is_neither_loaded_nor_saved() -> None:
    """Whichever of the two vLLM computes with, which nobody tells."""
    run = exchanges()
    old = run["first"].tokens[0]
    cid, new = run["alone"].tokens
    assert run["first"].tokens == [old, old, old, cid, new, new]
    assert run["first"].cached == [0, WHOLE, 0, 0, 0, 0]
    assert run["files"] == 2 * CHUNKS
    assert [w for w in run["first"].warnings if "adapter changed in place" in w.message]


def test_a_replica_that_starts_afterwards_knows_the_new_adapter_by_its_files() -> None:
    run = exchanges()
    new = run["alone"].tokens[1]
    assert run["second"].tokens == [new, new]
    assert run["second"].cached == [0, WHOLE]


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


@scenario
def below_vllms_offloading(folder: Path) -> Values:
    """The same of objkv's tier. Cached tokens after the first come from vLLM's own memory."""
    store = SharedStore(folder / "store")

    def ask(prompt: Prompt) -> tuple[Step, ...]:
        return (Generate(prompts=(prompt,)), Settle(), ResetPrefixCache())

    run_replica(tiered(store, *ask(PLAIN), *ask(OTHER), chunk_tokens=CHUNK), folder)
    plain, other = 2 * ask(PLAIN), 2 * ask(OTHER)
    # Another prompt, because vLLM's own memory keeps what it had before the update.
    steps = (*ask(PLAIN), Settle(), RESET, *plain, UPDATE, *other, Settle(), RESET, *other)
    return {
        "run": run_replica(tiered(store, *steps, chunk_tokens=CHUNK), folder),
        "namespaces": len(store.namespaces()),
    }


def test_a_tier_loads_nothing_from_before_a_reset_or_of_other_weights() -> None:
    run = below_vllms_offloading()["run"]
    old, *_, new = changes()["alone"].tokens
    assert run.cached == [WHOLE, 0, WHOLE, 0, WHOLE, 0, WHOLE]
    assert run.tokens == [old] * 3 + [new] * 4
    assert below_vllms_offloading()["namespaces"] == 3
