"""Runs replicas: each a fresh process with a real vLLM engine on the CPU.

    first = run_replica(Job(steps=(generate(Prompt(tokens=(5, 6, 7))),)), folder)
    assert first.tokens == [(...)]

A replica takes about a second, ``fresh`` ones half a minute, most of it for imports.
"""

import contextlib
import functools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from objkv.config import Config
from tests.engine.endings import WORKER_S, kill_session
from tests.engine.job import Job, Result
from tests.support.agents import AgentProcess, agent_folder
from tests.support.nursery import Fork, Nursery

ROOT = Path(__file__).resolve().parents[2]
REPLICA = "tests.engine.replica"
LOG_TAIL_LINES = 60
PROGRAM_S = 1_200.0
_ARENA_BYTES = 256 << 20
VLLM_CACHE = {"VLLM_CACHE_ROOT": str(ROOT / ".cache" / "vllm")}
"""Where vLLM notes what each model class can do. To find that out it starts a process of 10 s."""
_ENVIRONMENT = VLLM_CACHE | {
    "HF_HUB_OFFLINE": "1",
    "NO_COLOR": "1",
    "OMP_NUM_THREADS": "1",  # sums in one order, and two replicas do not fight over two cores
    "PYTHONFAULTHANDLER": "1",
    "PYTHONPATH": str(ROOT),
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # other work runs on the same cores
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    # vLLM kills workers after 5 s, which on a busy machine says nothing of what they had to save.
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": str(WORKER_S),
}


class ReplicaFailed(Exception):
    """A replica did not finish its job; the message ends with what it printed last."""


class Replica:
    """A replica that is running. As a context manager it does not outlive its block."""

    def __init__(self, job: Job, folder: Path) -> None:
        """Start it. ``folder`` receives its job, its log and its result; it may hold others'."""
        folder.mkdir(parents=True, exist_ok=True)
        stem = folder / f"replica-{len(list(folder.glob('replica-*.job.json')))}"
        self.log_file = stem.with_suffix(".log")
        self._result_file = stem.with_suffix(".result.json")
        self._timeout_s = job.timeout_s
        job_file = stem.with_suffix(".job.json")
        job_file.write_text(job.model_dump_json(indent=1))
        files = (str(job_file), str(self._result_file))
        settings = _settings_of(job)
        self._agent = None if settings is None else AgentProcess(settings)
        """The replica's own; None if its settings name one, or it uses none."""
        self.process = _start(job, files, self.log_file, self._agent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.kill()
        if self._agent is not None:
            self._agent.__exit__(*error)

    def wait(self) -> Result:
        """Its result, when it is done. Raises ``ReplicaFailed``, also when its time is over."""
        try:
            status: int | None = self.process.wait(self._timeout_s)
            said = f"exit status {status}"
        except subprocess.TimeoutExpired:
            status, said = None, f"still running after {self._timeout_s:.0f} s"
        self.kill()
        log = self.log_file.read_text(errors="replace")
        if status != 0 or not self._result_file.exists():
            tail = "\n".join(log.splitlines()[-LOG_TAIL_LINES:])
            raise ReplicaFailed(f"{said}; the end of {self.log_file}:\n{tail}")
        update: dict[str, Any] = {"log": log}
        if self._agent is not None:
            # What it took is stored when it has ended.
            update["agent"] = self._agent.metrics() | self._agent.end()
        result = Result.model_validate_json(self._result_file.read_text())
        return result.model_copy(update=update)

    def kill(self) -> None:
        """Kill all its processes at once, as a machine that loses power would."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def run_replica(job: Job, folder: Path) -> Result:
    with Replica(job, folder) as replica:
        return replica.wait()


def _settings_of(job: Job) -> dict[str, str] | None:
    """Of the agent that a replica needs for itself, whichever of objkv's connectors it has."""
    kv, encoder = job.connector or {}, job.engine.get("ec_transfer_config") or {}
    given: dict[str, Any] = kv.get("kv_connector_extra_config", {})
    if kv.get("kv_connector") == "OffloadingConnector":
        (tier,) = given["secondary_tiers"]
        given = {name: value for name, value in tier.items() if name in Config.model_fields}
    elif kv.get("kv_connector") != "ObjKVConnector":
        if encoder.get("ec_connector") != "ObjKVECConnector":
            return None
        given = encoder.get("ec_connector_extra_config", {})
    environ = {n.removeprefix("OBJKV_").lower(): v for n, v in job.env.items() if "OBJKV_" in n}
    settings = {"agent_memory_bytes": _ARENA_BYTES} | environ | given
    if "agent" in settings:
        return None
    return {name: str(value) for name, value in settings.items() if value is not None}


def _start(
    job: Job, files: tuple[str, str], log_file: Path, agent: AgentProcess | None
) -> subprocess.Popen[bytes] | Fork:
    log_file.touch()
    own = {} if agent is None else {"OBJKV_AGENT": agent.url}
    if not job.fresh:
        return nursery().fork(REPLICA, *files, environment=_environment_of(job) | own, log=log_file)
    with log_file.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", REPLICA, *files],
            cwd=ROOT,
            env=_environment_of(job) | own,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run_program(*command: str, folder: Path, **variables: str) -> str:
    """Run a program that starts engines, as a user does with this folder and nothing of objkv
    configured; what it prints. Nothing that it has started outlives it."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"PATH": path, "XDG_CACHE_HOME": str(folder / "cache"), "no_proxy": "127.0.0.1"}
    with agent_folder() as sockets, (folder / "errors.log").open("w") as errors:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment() | own | {"XDG_RUNTIME_DIR": str(sockets)} | variables,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            out, _ = process.communicate(timeout=PROGRAM_S)
        finally:
            kill_session(process.pid)
            process.wait()
    logs = "\n".join(f"{log}: {log.read_text()[-3000:]}" for log in sorted(folder.glob("*.log")))
    assert process.returncode == 0, f"{out[-3000:]}\n{logs}"
    return out


@functools.cache
def nursery() -> Nursery:
    return Nursery(ROOT, _environment_of(Job(steps=())), ("tests.engine.preloaded",))


def environment() -> dict[str, str]:
    """What every process with an engine starts with, whatever is set where the tests are run."""
    foreign = ("OBJKV_", "VLLM_", "AWS_", "PYTHONHASHSEED")
    own = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return own | _ENVIRONMENT


def _environment_of(job: Job) -> dict[str, str]:
    mode = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(job.processes))}
    return environment() | mode | job.env
