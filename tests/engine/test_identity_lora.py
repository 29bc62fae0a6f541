"""An adapter is what its files hold: elsewhere it shares, exchanged it does not, also while the
engine runs and vLLM loads it once more."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.engine.cache import Values, scenario
from tests.engine.fleet import CHUNK, SharedStore, one_by_one
from tests.engine.harness import run_replica, run_replicas
from tests.engine.job import Call, Job, Prompt
from tests.engine.prompts import prompt_of
from tests.engine.test_share_isolation import make_adapter

pytestmark = pytest.mark.wide
CHUNKS = 3
WHOLE = CHUNKS * CHUNK
PLAIN = prompt_of(WHOLE + 9)
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
ONE_AT_A_TIME = LORA | {"max_loras": 1, "max_cpu_loras": 1}
"""Of two adapters vLLM puts the older away, and reads its files again for its next request."""


def with_adapter(folder: Path) -> Prompt:
    return PLAIN.model_copy(update={"lora": folder})


def exchange(_llm: Any, folder: str, other: str) -> None:
    """Put other files where an adapter's are, as a training job does. Runs in the replica."""
    for file in Path(other).iterdir():
        partial = Path(folder) / f"{file.name}.partial"
        shutil.copyfile(file, partial)
        partial.rename(Path(folder) / file.name)


def exchanged(folder: Path, other: Path) -> Call:
    arguments = {"folder": str(folder), "other": str(other)}
    return Call(function="tests.engine.test_identity_lora:exchange", arguments=arguments)


@scenario
def paths(folder: Path) -> Values:
    store = SharedStore(folder / "store")
    ada, ben = (make_adapter(folder / name, seed=i) for i, name in enumerate(("ada", "ben")))
    moved = folder / "mnt" / "elsewhere"
    shutil.copytree(ada, moved)
    ask = one_by_one([with_adapter(ada)])
    first, alone = run_replicas(
        [
            store.job(*ask, engine=LORA),
            Job(steps=one_by_one([with_adapter(ada), with_adapter(ben)]), engine=LORA),
        ],
        folder,
    )
    second = run_replica(store.job(*one_by_one([with_adapter(moved)]), engine=LORA), folder)
    exchange(None, str(ada), str(ben))
    third, fourth = run_replicas(
        [
            store.copy(folder / "third").job(*ask, *ask, engine=LORA),
            store.copy(folder / "fourth").job(*one_by_one([with_adapter(moved)]), engine=LORA),
        ],
        folder,
    )
    return {"alone": alone, "first": first, "second": second, "third": third, "fourth": fourth}


def test_the_same_adapter_at_another_path_in_another_process_shares() -> None:
    run = paths()
    assert run["first"].cached == [0]
    assert run["second"].cached == [WHOLE]
    assert run["first"].tokens == run["second"].tokens == run["alone"].tokens[:1]


def test_other_files_at_the_same_path_do_not_share_but_with_themselves() -> None:
    run = paths()
    ada, ben = run["alone"].tokens
    assert ada != ben
    assert run["third"].tokens == [ben, ben]
    assert run["third"].cached == [0, WHOLE]


def test_what_was_saved_before_stays_that_of_the_files_it_was_computed_with() -> None:
    run = paths()
    assert run["fourth"].cached == [WHOLE]
    assert run["fourth"].tokens == run["alone"].tokens[:1]


@scenario
def exchanges(folder: Path) -> Values:
    store = SharedStore(folder / "store")
    ada, ben, cid = (
        make_adapter(folder / name, seed=i) for i, name in enumerate(("ada", "ben", "cid"))
    )
    steps = (
        *one_by_one([with_adapter(ada), with_adapter(ada)]),
        exchanged(ada, ben),
        *one_by_one([with_adapter(ada)]),  # vLLM still has the weights that it read
        *one_by_one([with_adapter(cid)]),  # now it has not
        *one_by_one([with_adapter(ada), with_adapter(ada)]),
    )
    first = run_replica(store.job(*steps, engine=ONE_AT_A_TIME), folder)
    files = len(store.payloads())
    again = one_by_one([with_adapter(ada), with_adapter(ben)])
    second, alone = run_replicas(
        [
            store.job(*again, engine=LORA),
            Job(steps=one_by_one([with_adapter(cid), with_adapter(ben)]), engine=LORA),
        ],
        folder,
    )
    return {"first": first, "second": second, "alone": alone, "files": files}


def test_an_adapter_exchanged_while_the_engine_runs_is_neither_loaded_nor_saved() -> None:
    """Whichever of the two vLLM computes with, which nobody tells: KV of the other would be wrong
    tokens here, or in every replica that loads it."""
    run = exchanges()
    old = run["first"].tokens[0]
    cid, new = run["alone"].tokens
    assert run["first"].tokens == [old, old, old, cid, new, new]
    assert run["first"].cached == [0, WHOLE, 0, 0, 0, 0]
    assert run["files"] == 2 * CHUNKS
    assert [w for w in run["first"].warnings if "adapter changed in place" in w.message]


def test_a_replica_that_starts_afterwards_knows_the_new_one_by_its_files() -> None:
    run = exchanges()
    new = run["alone"].tokens[1]
    assert run["second"].tokens == [new, new]
    assert run["second"].cached == [0, WHOLE]
