"""A request that is aborted during the very step that found its load failed leaves no wrong KV."""

from pathlib import Path
from typing import Any

from tests.engine.cache import Values, scenario
from tests.engine.fleet import CHUNK, SharedStore, one_by_one
from tests.engine.harness import run_replica
from tests.engine.job import Call, Generate, Job, Result
from tests.engine.prompts import prompt_of

STORED = prompt_of(2 * CHUNK + 9)
LONGER = prompt_of(6 * CHUNK + 9)
"""Begins as ``STORED`` does: the rest is computed in the step that loads."""


def abort_within(llm: Any, tokens: list[int]) -> bool:
    """Ask for ``tokens``, and abort them while the step that loads their prefix runs, as a client
    that goes away would; whether there was such a step."""
    from vllm import SamplingParams

    core = llm.llm_engine.engine_core.engine_core
    execute, aborted = core.model_executor.execute_model, []

    def execute_model(output: Any, *args: Any, **kwargs: Any) -> Any:
        if output.has_sync_kv_loads:
            aborted.extend(output.num_scheduled_tokens)
            core.aborts_queue.put_nowait(list(aborted))
        return execute(output, *args, **kwargs)

    core.model_executor.execute_model = execute_model
    params = SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False)
    llm.llm_engine.add_request("aborted", {"prompt_token_ids": tokens}, params)
    while core.scheduler.has_requests():
        llm.llm_engine.step()
    llm.llm_engine.abort_request(["aborted"])
    core.model_executor.execute_model = execute
    return bool(aborted)


@scenario
def aborted_within_the_step(folder: Path) -> Values:
    store = SharedStore(folder / "store")
    run_replica(store.job(*one_by_one([STORED])), folder)
    for path in store.payloads():
        path.unlink()
    here = "tests.engine.test_lifecycle_abort_within:abort_within"
    twice = (Generate(prompts=(LONGER,)), Generate(prompts=(LONGER,)))
    abort = Call(function=here, arguments={"tokens": LONGER.tokens})
    return {
        "alone": run_replica(Job(steps=twice), folder),
        "run": run_replica(store.job(abort, *twice, load_mode="layerwise"), folder),
    }


def test_a_prompt_after_it_is_computed_as_if_it_had_never_been() -> None:
    run, alone = (aborted_within_the_step()[name] for name in ("run", "alone"))
    assert isinstance(run, Result)
    assert run.answers == (True,)
    assert run.tokens == alone.tokens
    assert run.cached == alone.cached
