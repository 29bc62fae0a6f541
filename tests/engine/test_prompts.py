"""Prompts that share a beginning in one replica, one after the other and at once."""

from pathlib import Path

import pytest

from tests.engine.fleet import BLOCK, CHUNK, METRICS, NUMBERS_TOLD, SAVED, SharedStore, one_by_one
from tests.engine.harness import run_replica
from tests.engine.job import Generate, Job, Prompt, ResetPrefixCache
from tests.engine.prompts import prompt_of
from tests.engine.scenario import Values, scenario

pytestmark = pytest.mark.slow
MODES = ("async", "layerwise", "auto")
LONG = prompt_of(5 * CHUNK + 40)
HEAD = Prompt(tokens=LONG.tokens[: CHUNK + 2 * BLOCK])
"""Ends inside the long prompt's second chunk."""
LATE = LONG.model_copy(update={"after_steps": 2})
TWINS = prompt_of(3 * CHUNK + 5, seed=50)
STEPS = (
    METRICS,
    Generate(prompts=(HEAD,)),
    METRICS,
    Generate(prompts=(LONG,)),
    METRICS,
    ResetPrefixCache(),
    Generate(prompts=(LONG, LONG, LATE)),
)


@scenario
def shared(folder: Path) -> Values:
    store = SharedStore(folder / "store")
    twins = Generate(prompts=(TWINS, TWINS))
    named = {"kv_connector_module_path": "objkv.connector"}
    saver = store.job(*one_by_one([LONG]), twins, SAVED, NUMBERS_TOLD, transfer=named)
    values: Values = {"alone": run_replica(Job(steps=STEPS), folder)}
    values["first"] = run_replica(saver, folder)
    values |= {"files": len(store.payloads()), "bytes": store.payload(LONG, 1).stat().st_size}
    for mode in MODES:
        values[mode] = run_replica(store.job(*STEPS, load_mode=mode), folder)
    return values


def test_two_equal_prompts_at_once_are_written_once() -> None:
    first = shared()["first"]
    assert first.tokens[1] == first.tokens[2]
    assert first.metrics["vllm:objkv_saves"] == shared()["files"] == 5 + 3


@pytest.mark.parametrize("mode", MODES)
def test_what_is_in_the_own_cache_is_not_loaded_again(mode: str) -> None:
    run, nbytes = shared()[mode], shared()["bytes"]
    assert run.tokens == shared()["alone"].tokens
    assert run.cached[:2] == [CHUNK, 5 * CHUNK]
    told = [answer for answer in run.answers if isinstance(answer, dict)]
    for name, head, both in (
        ("hit_tokens", CHUNK, 5 * CHUNK - len(HEAD.tokens)),
        ("load_bytes", nbytes, 4 * nbytes),
    ):
        counts = [one.get(f"vllm:objkv_{name}", 0) for one in told]
        assert [counts[1] - counts[0], counts[2] - counts[1]] == [head, both]


@pytest.mark.parametrize("mode", MODES)
def test_prompts_at_once_with_one_prefix_all_find_it(mode: str) -> None:
    """Whoever is looked up first loads. The others load as well, or find in the replica's own
    cache what the first has by then."""
    found = [tokens or 0 for tokens in shared()[mode].cached[-3:]]
    assert min(found) == 5 * CHUNK
    assert set(found) <= {5 * CHUNK, len(LONG.tokens) // BLOCK * BLOCK}
