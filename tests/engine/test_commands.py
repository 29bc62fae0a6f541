"""``objkv diff`` of real replicas, and stores that are not there."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.fleet import CHUNK, PATIENT, SharedStore, one_by_one
from tests.engine.harness import ROOT, ReplicaFailed, run_replica
from tests.engine.job import Job
from tests.engine.prompts import prompt_of
from tests.support.agents import agent_folder

pytestmark = pytest.mark.slow


def diff(store: SharedStore, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and answer of the command, as users run it."""
    ends = (f"--bulk-url=file://{store.bulk}", f"--index-url=sqlite://{store.index_file}")
    command = [sys.executable, "-m", "objkv.cli", "diff", *arguments, *ends, "--json"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return ran.returncode, json.loads(ran.stdout)


def test_diff_tells_which_replicas_share_and_exactly_what_differs(tmp_path: Path) -> None:
    store, namespaces = SharedStore(tmp_path / "store"), {}
    engines: dict[str, dict[str, Any]] = {
        "plain": {},
        "copy": {"max_num_seqs": 4, "max_model_len": 1024},
        "loads only": {"block_size": 128},
    }
    log = tmp_path / "loads only.log"
    for name, engine in engines.items():
        role = "kv_consumer" if name == "loads only" else "kv_both"
        prompts = one_by_one([prompt_of(CHUNK + 9)])
        run = run_replica(store.job(*prompts, engine=engine, role=role), tmp_path)
        [namespaces[name]] = set(re.findall(r"objkv ready .*namespace=([0-9a-f]{32})", run.log))
        log.write_text(run.log)
    plain = namespaces["plain"][:8]
    code, document = diff(store, plain, namespaces["copy"])
    assert (code, document["share"], document["differences"]) == (0, True, [])
    assert document["a"]["namespace"] == namespaces["plain"] == namespaces["copy"]
    code, document = diff(store, plain, str(log))
    assert (code, document["share"]) == (1, False)
    [found] = [d for d in document["differences"] if d["follows_from"] is None]
    assert (found["field"], found["a"], found["b"]) == ("groups[0].block_size", 32, 128)
    assert document["b"]["namespace"] == namespaces["loads only"]


SECRET = "open-sesame"
FAR = "127.0.0.1:9"
"""``discard``: nobody listens there on a machine that runs tests."""


def test_a_replica_without_its_stores_serves_or_refuses_and_says_why(tmp_path: Path) -> None:
    places: dict[str, Any] = {
        "bulk_url": "s3://chunks/fleet",
        "s3_endpoint_url": f"http://{FAR}",
        "index_url": f"redis://{FAR}/0",
    }
    # In the environment, because vLLM prints the settings that it is given.
    names = ("S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY", "REDIS_PASSWORD")
    secrets = {f"OBJKV_{name}": SECRET for name in names}
    steps = one_by_one([prompt_of(4 * CHUNK), prompt_of(4 * CHUNK)])
    store = SharedStore(tmp_path / "store")
    alone = run_replica(Job(steps=steps), tmp_path)
    with agent_folder() as sockets:
        environment = {"env": secrets | {"XDG_RUNTIME_DIR": str(sockets)}}
        given = places | {"agent": "private"}
        job = store.job(*steps, drain_deadline_ms=3_000, **given).model_copy(update=environment)
        run = run_replica(job, tmp_path)
        strict = store.job(*steps, at_start="strict", **given).model_copy(update=environment)
        with pytest.raises(ReplicaFailed, match="exit status 1") as refused:
            run_replica(strict, tmp_path)
    assert run.tokens == alone.tokens
    assert run.cached[0] == 0  # the agent keeps what it cannot save
    for slow, fast in zip(run.outputs, alone.outputs, strict=True):
        assert slow[0].seconds < fast[0].seconds + PATIENT["lookup_deadline_ms"] / 1000 / 2
    last = [line for line in str(refused.value).splitlines() if line.strip()][-1]
    assert "objkv.errors." in last
    assert "s3://chunks" in last
    assert SECRET not in run.log + str(refused.value)
