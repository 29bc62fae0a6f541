"""A node agent outlives a real engine, and an engine its agent."""

import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from objkv.index.sqlite.index import SqliteIndex
from tests.engine.fleet import CHUNK, SAVED, SharedStore
from tests.engine.harness import ReplicaFailed, run_replica
from tests.engine.job import Call, Generate, Job, ResetPrefixCache, Settle, Step
from tests.engine.prompts import prompt_of
from tests.support.agents import AgentProcess
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow
PROMPTS = (prompt_of(300), prompt_of(600, seed=1))
LOADED = [256, 512]
CHUNKS = sum(LOADED) // CHUNK
GENERATE: tuple[Step, ...] = (Generate(prompts=PROMPTS), Settle())
NOWHERE = {"bulk_url": "file:///nowhere/chunks", "index_url": "sqlite:///nowhere/index"}
"""A replica of an agent uses neither."""


def kill(_llm: Any, pid: int = 0) -> None:
    """From within the replica: the agent, or the engine itself."""
    os.kill(pid or os.getpid(), signal.SIGKILL)


def test_a_kill_of_the_engine_loses_no_payload_and_one_of_the_agent_no_token(
    tmp_path: Path,
) -> None:
    """The engine ends when the agent has its payloads, most of which are not stored yet."""
    store = SharedStore(tmp_path / "store")
    settings = {
        "bulk_url": f"file://{store.bulk}",
        "index_url": f"sqlite://{store.index_file}",
        "agent_memory_bytes": "64MiB",
        "codec": "lz4",
        "save_deadline_ms": "600s",
    }
    here = "tests.engine.test_agent:kill"
    alone = run_replica(Job(steps=GENERATE), tmp_path).tokens
    with AgentProcess(settings) as agent, closing(SqliteIndex(store.index_file)) as index:

        def job(*steps: Step) -> Job:
            return store.job(*steps, agent=agent.url, **NOWHERE)

        with pytest.raises(ReplicaFailed, match="exit status -9"):
            run_replica(job(*GENERATE, SAVED, Call(function=here)), tmp_path)
        wait_until(lambda: sum(one.payloads for one in index.usage()) >= CHUNKS)
        assert agent.metrics()["fills_total"] == 0
        end = Call(function=here, arguments={"pid": agent.process.pid})
        run = run_replica(job(*GENERATE, end, ResetPrefixCache(), *GENERATE), tmp_path)
    assert run.cached == [*LOADED, 0, 0]
    assert run.tokens == alone * 2
