"""A node agent outlives a real engine, and an engine its agent."""

import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from objkv.index.sqlite.index import SqliteIndex
from tests.engine.fleet import CHUNK, NOWHERE, RESET, SAVED, SETTLED, SharedStore
from tests.engine.harness import ReplicaFailed, run_replica
from tests.engine.job import Job, Result, Step, call, generate, prompt_of
from tests.support.agents import AgentProcess, agent_folder
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow
PROMPTS = (prompt_of(300), prompt_of(600, seed=1))
LOADED = [256, 512]
CHUNKS = sum(LOADED) // CHUNK
ASK: tuple[Step, ...] = (generate(*PROMPTS), SETTLED)


def kill(_llm: Any, pid: int = 0) -> None:
    """From within the replica: the agent, or the engine itself."""
    os.kill(pid or os.getpid(), signal.SIGKILL)


def test_a_kill_of_the_engine_loses_no_payload_and_one_of_the_agent_no_token(
    tmp_path: Path,
) -> None:
    """The engine ends when the agent has its payloads, most of which are not stored yet."""
    store = SharedStore(tmp_path / "store")
    own = {"agent_memory_bytes": "64MiB", "codec": "lz4", "save_deadline_ms": "600s"}
    alone = run_replica(Job(steps=ASK), tmp_path).tokens
    with AgentProcess(store.places | own) as agent, closing(SqliteIndex(store.index_file)) as index:

        def run(*steps: Step) -> Result:
            return run_replica(store.job(*steps, agent=agent.url, **NOWHERE), tmp_path)

        with pytest.raises(ReplicaFailed, match="exit status -9"):
            run(*ASK, SAVED, call(kill))
        wait_until(lambda: sum(one.payloads for one in index.usage()) >= CHUNKS)
        second = run(*ASK, call(kill, pid=agent.process.pid), RESET, *ASK)
    assert second.cached == [*LOADED, 0, 0]
    assert second.tokens == alone * 2


def test_a_replica_without_its_stores_serves_or_refuses_and_shows_no_secret(
    tmp_path: Path,
) -> None:
    far: dict[str, Any] = {
        "bulk_url": "s3://chunks/fleet",
        "s3_endpoint_url": "http://127.0.0.1:9",
        "index_url": "redis://127.0.0.1:9/0",
        "agent": "private",
        "drain_deadline_ms": 3_000,
    }
    # In the environment, because vLLM prints the settings that it is given.
    names = ("S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY", "REDIS_PASSWORD")
    store = SharedStore(tmp_path / "store")
    with agent_folder() as sockets:
        env = {f"OBJKV_{name}": "open-sesame" for name in names}
        env["XDG_RUNTIME_DIR"] = str(sockets)

        def lived(**more: Any) -> Result:
            job = store.job(*ASK, **far, **more).model_copy(update={"env": env})
            return run_replica(job, tmp_path)

        run = lived()
        with pytest.raises(ReplicaFailed, match=r"objkv\.errors\.") as refused:
            lived(at_start="strict")
    assert run.tokens == run_replica(Job(steps=ASK), tmp_path).tokens
    assert "s3://chunks" in str(refused.value)
    assert "open-sesame" not in run.log + str(refused.value)
