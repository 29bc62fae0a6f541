"""OpenAI-compatible servers: vLLM as operators run it, its engine in processes of its own.

    with Server(folder / "one", settings={"OBJKV_BULK_URL": ...}) as server:
        server.wait_until_ready()
        answer = server.complete(prompt)

Ready after half a minute or more, so start several at once.
"""

import json
import os
import re
import signal
import urllib.request
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.engine import model
from tests.engine.endings import (
    END_S,
    ENGINE_S,
    EngineTold,
    exit_status,
    kill_session,
    session_processes,
)
from tests.engine.harness import environment, nursery
from tests.engine.job import Prompt
from tests.support.servers.redis import free_port
from tests.support.waiting import wait_for_server

READY_S = 600.0
"""On a busy machine."""
ANSWER_S = 300.0
"""More than objkv's deadlines of a lookup and a load together."""
NAME = "tiny"
PATIENT = {
    "OBJKV_ADMISSION": "always",
    "OBJKV_CODEC": "none",
    "OBJKV_LOOKUP_DEADLINE_MS": "120000",
    "OBJKV_LOAD_DEADLINE_MS": "120000",
    "OBJKV_SAVE_DEADLINE_MS": "240000",
}
"""Settings with which a busy machine changes neither what is loaded nor what is stored."""
_CONNECTOR = {"kv_connector": "ObjKVConnector", "kv_role": "kv_both"}
_ARGUMENTS = {
    "--served-model-name": NAME,
    "--dtype": "float32",
    "--max-model-len": "2048",
    "--max-num-seqs": "8",
    "--max-num-batched-tokens": "2048",
    "--block-size": "32",
    "--kv-cache-memory-bytes": str(256 << 20),
    "--seed": "0",
    "--shutdown-timeout": str(ENGINE_S),
    "--kv-transfer-config": json.dumps(_CONNECTOR),
}
_FLAGS = ("--skip-tokenizer-init", "--enforce-eager", "--enable-prompt-tokens-details")


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    cached_tokens: int


class Server:
    """One server on a free port of loopback. As a context manager it does not outlive its block."""

    def __init__(
        self,
        folder: Path,
        *,
        settings: dict[str, str],
        with_tokenizer: Path | None = None,
        arguments: tuple[str, ...] = (),
    ) -> None:
        """``settings`` are environment variables, ``folder`` has its log. ``with_tokenizer``: the
        folder of a model that has one, which is used then."""
        folder.mkdir(parents=True, exist_ok=True)
        self.log_file = folder / "server.log"
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        command = ["--model", str(with_tokenizer or model.make("llama")), "--host", "127.0.0.1"]
        command += [flag for flag in _FLAGS if not (with_tokenizer and "tokenizer" in flag)]
        command += arguments
        command += ["--port", str(port), *(word for pair in _ARGUMENTS.items() for word in pair)]
        # Never through a proxy: it is on this machine.
        self._http = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self.log_file.touch()
        self._process = nursery().fork(
            "vllm.entrypoints.openai.api_server",
            *command,
            environment=environment() | settings,
            log=self.log_file,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        kill_session(self._process.pid)
        self._process.wait()

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def wait_until_ready(self) -> None:
        """Wait until it serves. Raises AssertionError, or RuntimeError if it ended by itself."""

        def is_ready() -> bool:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended: {self.log[-4000:]}")
            try:
                with self._http.open(f"{self.url}/health", timeout=5):
                    return True
            except OSError:  # refused, late, not ready: it may pass
                return False

        wait_for_server(is_ready, f"{self.url} to serve, see {self.log_file}", bound_s=READY_S)

    def complete(self, prompt: Prompt, **headers: str) -> Answer:
        asked: dict[str, Any] = {
            "model": NAME,
            "prompt": list(prompt.tokens),
            "max_tokens": prompt.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"} | headers,
        )
        with self._http.open(request, timeout=ANSWER_S) as response:
            answer = json.load(response)
        details = answer["usage"].get("prompt_tokens_details") or {}
        return Answer(
            tokens=tuple(answer["choices"][0]["token_ids"]),
            cached_tokens=details.get("cached_tokens") or 0,
        )

    def metrics(self) -> dict[str, float]:
        """Its counters by name, as Prometheus would read them, summed over labels."""
        with self._http.open(f"{self.url}/metrics", timeout=ANSWER_S) as response:
            lines = response.read().decode().splitlines()
        values = defaultdict[str, float](float)
        for line in lines:
            if found := re.match(r"(\w+(?::\w+)?_total)(?:\{.*\})? (\S+)$", line):
                values[found[1]] += float(found[2])
        return dict(values)

    def tell_to_end(self) -> None:
        """As Kubernetes does. Returns when its engine has heard of it."""
        os.kill(self._process.pid, signal.SIGTERM)
        wait_for_server(
            EngineTold(self.log_file), f"the engine to be told, see {self.log_file}", bound_s=END_S
        )

    def wait_for_end(self) -> int | None:
        """Wait until it has ended; its exit status, or None if it hung in vLLM and was killed.
        Raises RuntimeError if it hung in objkv."""
        return exit_status(self._process, self.log_file)

    def processes(self) -> list[int]:
        """Processes of its session that still run: it, its engine, its workers."""
        return session_processes(self._process.pid)
