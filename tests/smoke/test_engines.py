"""Two real replicas share a prefix through a node agent; two ranks share theirs with one."""

import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from tests.engine.fleet import CHUNK, NOWHERE, SAVED, SETTLED, SharedStore
from tests.engine.harness import run_replica
from tests.engine.job import Job, call, generate, prompt_of
from tests.support.agents import AgentProcess
from tests.support.servers.process import has_ended

PROMPTS = (prompt_of(300, max_tokens=4), prompt_of(600, seed=1, max_tokens=4))
LOADED = [256, 512]
ASK = (generate(*PROMPTS), SETTLED)


def contents(_llm: Any) -> dict[str, list[str]]:
    """What this process has imported, the other ends of its sockets, and objkv's threads."""
    peers = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            with socket.socket(fileno=os.dup(fd)) as one:
                peers.append(str(one.getpeername()))
        except OSError:  # no socket, or one that is not connected
            continue
    names = [thread.name for thread in threading.enumerate()]
    return {
        "modules": sorted({name.partition(".")[0] for name in sys.modules}),
        "peers": peers,
        "threads": sorted(name for name in names if name.startswith("objkv")),
    }


def test_two_replicas_share_a_prefix_through_an_agent(tmp_path: Path) -> None:
    """Their processes talk to nothing but the agent."""
    store = SharedStore(tmp_path / "store")
    look = call(contents)
    alone = run_replica(Job(steps=(*ASK, look)), tmp_path)
    with AgentProcess(store.places | {"agent_memory_bytes": "64MiB"}) as agent:
        job = store.job(*ASK, SAVED, look, agent=agent.url, **NOWHERE)
        first, second = (run_replica(job, tmp_path) for _ in range(2))
        counted = agent.end()
    assert has_ended(agent.process.pid)
    assert (first.cached, second.cached) == ([0, 0], LOADED)
    assert first.tokens == second.tokens == alone.tokens
    before, found = alone.answers[-1], second.answers[-1]
    assert {"boto3", "botocore", "redis"}.isdisjoint({*found["modules"]} - {*before["modules"]})
    assert {*found["peers"]} - {*before["peers"]} == {f"{agent.path}.new"}  # as it was bound
    assert found["threads"] == ["objkv-gather-0", "objkv-load", "objkv-lookup", "objkv-save-0"]
    assert second.metrics["vllm:objkv_hit_tokens"] == sum(LOADED)
    assert counted["saves"] == counted["hits"] == len(store.payloads()) == sum(LOADED) // CHUNK


def test_one_rank_loads_what_two_saved(tmp_path: Path) -> None:
    store = SharedStore(tmp_path / "store")
    two = run_replica(store.job(*ASK, SAVED, ranks=2), tmp_path)
    one = run_replica(store.job(*ASK), tmp_path)
    assert (two.cached, one.cached) == ([0, 0], LOADED)
    assert one.tokens == two.tokens
    assert [path.stem for path in store.payloads()] == ["0"] * (sum(LOADED) // CHUNK)
