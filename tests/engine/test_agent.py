"""Real engines on one node agent: the same tokens, each payload fetched once, saves that outlive
their engine, and an agent that is killed."""

from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from objkv.index.sqlite.index import SqliteIndex
from tests.engine.fleet import CHUNK, SAVED, SharedStore
from tests.engine.harness import ReplicaFailed, run_replica, run_replicas
from tests.engine.job import Call, Generate, Job, ResetPrefixCache, Settle, Step
from tests.engine.prompts import prompt_of
from tests.engine.scenario import Values, scenario
from tests.support.agents import AgentProcess, agent_folder
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow
PROMPTS = (prompt_of(300), prompt_of(600, seed=1))
LOADED = [256, 512]
CHUNKS = sum(LOADED) // CHUNK
GENERATE: tuple[Step, ...] = (Generate(prompts=PROMPTS), Settle())
NOWHERE = {"bulk_url": "file:///nowhere/chunks", "index_url": "sqlite:///nowhere/index"}
"""A replica of an agent uses neither."""


def settings(store: SharedStore) -> dict[str, str]:
    return {
        "bulk_url": f"file://{store.bulk}",
        "index_url": f"sqlite://{store.index_file}",
        "agent_memory_bytes": "64MiB",
        "codec": "lz4",
        "save_deadline_ms": "600s",
        "drain_deadline_ms": "600s",
    }


def await_saved(_llm: Any, index: str, count: int) -> None:
    """Wait until the agent has published so many payloads."""
    with closing(SqliteIndex(Path(index))) as records:
        wait_until(lambda: sum(one.payloads for one in records.usage()) >= count)


def saved(store: SharedStore, count: int = CHUNKS) -> Call:
    arguments = {"index": str(store.index_file), "count": count}
    return Call(function="tests.engine.test_agent:await_saved", arguments=arguments)


def job(store: SharedStore, agent: AgentProcess, *steps: Step, **more: Any) -> Job:
    return store.job(*steps, agent=agent.url, **NOWHERE, **more)


def kill_this(llm: Any) -> None:
    """End the engine as a machine would that loses power."""
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


@scenario
def on_one_agent(folder: Path) -> Values:
    store = SharedStore(folder / "store")
    alone = run_replica(Job(steps=GENERATE), folder)
    with AgentProcess(settings(store)) as agent:
        again = (saved(store), ResetPrefixCache(), *GENERATE)
        first = run_replica(job(store, agent, *GENERATE, *again), folder)
        loads = [
            job(store, agent, *GENERATE),
            job(store, agent, *GENERATE, load_mode="layerwise"),
        ]
        both = run_replicas(loads, folder)
        before = agent.end()
    with AgentProcess(settings(store)) as agent:
        later = run_replicas([job(store, agent, *GENERATE) for _ in range(2)], folder)
        after = agent.end()
    return {
        "alone": alone,
        "first": first,
        "both": both,
        "later": later,
        "before": before,
        "after": after,
        "payloads": len(store.payloads()),
    }


@scenario
def with_nothing_configured(folder: Path) -> Values:
    store = SharedStore(folder / "store")
    with agent_folder() as sockets:
        environment = {"XDG_RUNTIME_DIR": str(sockets)}
        made = store.job(*GENERATE, agent="auto").model_copy(update={"env": environment})
        runs = [run_replica(made, folder) for _ in range(2)]
        (log,) = sockets.glob("objkv/*.log")
        return {"runs": runs, "log": log.read_text()}


@scenario
def engine_killed(folder: Path) -> Values:
    """Killed as soon as the agent has its payloads, most of which are not stored yet."""
    store = SharedStore(folder / "store")
    with AgentProcess(settings(store)) as agent:
        killed = Call(function="tests.engine.test_agent:kill_this")
        try:
            run_replica(job(store, agent, *GENERATE, SAVED, killed), folder)
        except ReplicaFailed as exc:
            reason = str(exc)
        await_saved(None, str(store.index_file), CHUNKS)
        after = run_replica(job(store, agent, *GENERATE), folder)
        return {"reason": reason, "after": after, "numbers": agent.end()}


@scenario
def held_back(folder: Path) -> Values:
    store = SharedStore(folder / "store")
    with AgentProcess(settings(store) | {"save_to_bucket": "reused"}) as agent:
        killed = Call(function="tests.engine.test_agent:kill_this")
        with suppress(ReplicaFailed):
            run_replica(job(store, agent, *GENERATE, SAVED, killed), folder)
        once = len(store.payloads())
        after = run_replica(job(store, agent, *GENERATE, saved(store)), folder)
        return {
            "once": once,
            "after": after,
            "payloads": len(store.payloads()),
            "numbers": agent.end(),
        }


def kill_agent(llm: Any, pid: int) -> None:
    """Kill the agent from within the replica, between two prompts."""
    import os
    import signal

    os.kill(pid, signal.SIGKILL)


@scenario
def agent_killed(folder: Path) -> Values:
    store = SharedStore(folder / "store")
    with AgentProcess(settings(store)) as agent:
        run_replica(job(store, agent, *GENERATE, saved(store)), folder)
        arguments = {"pid": agent.process.pid}
        kill = Call(function="tests.engine.test_agent:kill_agent", arguments=arguments)
        steps = (*GENERATE, kill, ResetPrefixCache(), *GENERATE)
        return {"run": run_replica(job(store, agent, *steps), folder)}


def test_replicas_of_one_agent_share_their_kv_with_the_same_tokens() -> None:
    runs = on_one_agent()
    alone = runs["alone"].tokens
    assert runs["first"].cached == [0, 0, *LOADED]
    assert runs["first"].tokens == [*alone, *alone]
    for run in runs["both"]:
        assert run.cached == LOADED
        assert run.tokens == alone


def test_by_default_the_first_replica_starts_an_agent_that_the_next_one_uses_too() -> None:
    values = with_nothing_configured()
    first, second = values["runs"]
    assert values["log"].count("agent ready") == 1
    assert first.cached == [0, 0]
    assert second.cached == LOADED
    assert second.metrics["vllm:objkv_load_bytes"] > 0
    assert first.tokens == second.tokens == on_one_agent()["alone"].tokens


def test_what_was_saved_is_read_from_memory_and_stored_once() -> None:
    runs = on_one_agent()
    assert runs["before"]["fills"] == 0
    assert runs["before"]["hits"] == 3 * CHUNKS
    assert runs["before"]["saves"] == CHUNKS == runs["payloads"]


def test_after_a_restart_each_payload_is_fetched_once() -> None:
    runs = on_one_agent()
    assert [run.cached for run in runs["later"]] == [LOADED] * 2
    assert all(run.tokens == runs["alone"].tokens for run in runs["later"])
    assert runs["after"]["fills"] == CHUNKS
    assert runs["after"]["hits"] == CHUNKS


def test_an_engine_that_is_killed_loses_nothing_that_it_computed() -> None:
    runs = engine_killed()
    assert "exit status -9" in runs["reason"]
    assert runs["after"].cached == LOADED
    assert runs["after"].tokens == on_one_agent()["alone"].tokens
    assert runs["numbers"]["fills"] == 0, "it was resident"


def test_payloads_are_stored_when_a_second_engine_reads_them() -> None:
    runs = held_back()
    assert runs["once"] == 0
    assert runs["after"].cached == LOADED
    assert runs["after"].tokens == on_one_agent()["alone"].tokens
    assert runs["payloads"] == CHUNKS
    assert runs["numbers"]["saves"] == CHUNKS
    assert runs["numbers"]["fills"] == runs["numbers"]["unsaved"] == 0


def test_an_agent_that_is_killed_costs_loads_and_no_token() -> None:
    run = agent_killed()["run"]
    assert run.cached == [*LOADED, 0, 0]
    assert run.tokens == on_one_agent()["alone"].tokens * 2
