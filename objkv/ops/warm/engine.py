"""The engine of ``warm --model``: vLLM in a child process that reads and writes JSON lines.

Only the child imports vLLM. It ends in order at the end of its input, and is killed with this
process.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from threading import Lock, Thread
from typing import IO, Any, Final, cast

from objkv.errors import ConfigError, pip_install
from objkv.ops.programs import die_with_parent
from objkv.ops.warm.prefill import PrefillError, PrefillReply, PrefillRequest
from objkv.ops.warm.prompts import WarmPrompt

MODULE: Final = "objkv.programs.warm"
AT_ONCE: Final = 64
_TAIL_LINES = 200
_ERROR = re.compile(r"\b\w*(?:Error|Exception): |^\s*Value error, ")
"""A line of the log with an error, as Python and pydantic write it."""
_TOLD_MAX = 300
_LAST_WORDS_S = 10.0
"""Time that a failed child has to write its traceback after its answers end."""
_END_S = 60.0
_START_S = 3600.0
"""Allows for a large model on a slow disk."""


@dataclass(frozen=True, slots=True)
class WarmEngineJob:
    """The first line of the child's input."""

    model: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of ``vllm.LLM``."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Folders of LoRA adapters by name."""
    tokenizes: bool = True
    """Whether the model's own tokenizer is needed."""
    at_once: int = AT_ONCE


class EngineProcess:
    """See ``Prefiller``."""

    def __init__(
        self,
        job: WarmEngineJob,
        settings: Mapping[str, str],
        *,
        command: tuple[str, ...] = ("-m", MODULE),
    ) -> None:
        """``settings``: all objkv settings as environment variables. Raises ``ConfigError`` if vLLM
        is not installed."""
        if find_spec("vllm") is None:
            raise ConfigError(
                f"--model needs vLLM, which is not installed here: {pip_install('vllm')}, or "
                "use --endpoint"
            )
        self._job = job
        self._lock = Lock()
        self._speaking = Lock()
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._number = 0
        self._closed = False  # whether no further request is answered
        self._failure = ""  # the child's error after its engine failed for good
        self._is_ended = False
        self._ready: Future[dict[str, Any]] = Future()
        self._log, self._process = _start(command, settings)
        self._reader = Thread(target=self._read, name="objkv-warm-engine", daemon=True)
        self._reader.start()
        self._say({"model": job.model, "arguments": dict(job.arguments),
                   "adapters": dict(job.adapters), "tokenizes": job.tokenizes,
                   "at_once": job.at_once})  # fmt: skip

    @property
    def name(self) -> str:
        """See ``Prefiller``."""
        return f"engine of {self._job.model}"

    @property
    def at_once(self) -> int:
        """See ``Prefiller``."""
        return self._job.at_once

    def check(self) -> None:
        """See ``Prefiller``. The first call waits until the engine runs."""
        try:
            self._ready.result(_START_S)
        except (TimeoutError, CancelledError) as exc:
            raise PrefillError("down", f"{self.name} did not start: {self._tail()}") from exc
        if self._failure:
            raise PrefillError("down", f"{self.name}: {self._failure}")
        if self._closed:
            raise PrefillError("down", f"{self.name} ended: {self._tail()}")

    def tokenize(self, prompt: WarmPrompt) -> list[int]:
        """See ``Prefiller``."""
        if prompt.tokens is not None:
            return list(prompt.tokens)
        chat = None
        if prompt.chat is not None:
            chat = {"messages": list(prompt.chat.messages), "options": dict(prompt.chat.options)}
        answer = self._call({"kind": "tokenize", "text": prompt.text, "chat": chat})
        return [int(token) for token in answer["tokens"]]

    def ask(self, ask: PrefillRequest) -> PrefillReply:
        """See ``Prefiller``."""
        tokens = list(ask.tokens)
        answer = self._call(
            {"kind": "ask", "tokens": tokens, "salt": ask.salt, "adapter": ask.model}
        )
        return PrefillReply(answer["cached_tokens"])

    def close(self) -> None:
        """See ``Prefiller``. Waits up to ``_END_S`` for the engine's pending saves."""
        with self._lock:
            is_first, self._is_ended = not self._is_ended, True
            self._closed = True
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.cancel()
        if not is_first:
            return
        try:
            # A thread blocked in a write holds this lock if the child has stopped reading.
            if self._speaking.acquire(timeout=1.0):
                with contextlib.suppress(OSError):
                    cast("IO[str]", self._process.stdin).close()
                if self._ready.done():  # one that is still starting has nothing to save
                    self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._reader.join()
            cast("IO[str]", self._process.stdout).close()
        if self._ready.done() and not self._ready.cancelled():
            self._log.unlink(missing_ok=True)

    def _call(self, request: dict[str, Any]) -> dict[str, Any]:
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._closed:
                raise PrefillError("down", f"{self.name} was closed")
            self._number += 1
            number = self._number
            self._waiting[number] = future
        try:
            self._say({"id": number, **request})
            answer = future.result()
        except (CancelledError, OSError) as exc:
            raise PrefillError("down", f"{self.name} ended: {self._tail()}") from exc
        if "error" in answer:
            if answer["trouble"] == "down":
                self._failure = str(answer["error"])
            raise PrefillError(answer["trouble"], f"{self.name}: {answer['error']}")
        return answer

    def _say(self, value: dict[str, Any]) -> None:
        line = json.dumps(value) + "\n"
        stdin = cast("IO[str]", self._process.stdin)
        with self._speaking, contextlib.suppress(OSError, ValueError):  # the child has ended
            stdin.write(line)
            stdin.flush()

    def _read(self) -> None:
        for line in cast("IO[str]", self._process.stdout):
            answer = json.loads(line)
            if "ready" in answer:
                self._ready.set_result(answer)
                continue
            with self._lock:
                future = self._waiting.pop(answer["id"], None)
            if future is not None:
                future.set_result(answer)
        # The child has ended: no request is answered any more.
        self._ready.cancel()
        with self._lock:
            waiting, self._waiting = self._waiting, {}
            self._closed = True
        for future in waiting.values():
            future.cancel()

    def _tail(self) -> str:
        if self._ready.done():
            # Standard output closes before Python writes the traceback.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LAST_WORDS_S)
        return f"{_reason(self._log)}; its log is {self._log}"


def _start(
    command: tuple[str, ...], settings: Mapping[str, str]
) -> tuple[Path, subprocess.Popen[str]]:
    """Start the child; return its log file and the process."""
    descriptor, name = tempfile.mkstemp(prefix="objkv-warm-", suffix=".log")
    with os.fdopen(descriptor, "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", *command],
            env=_environment(settings),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            # Ctrl-C must reach only this process; the child ends in order with its input.
            start_new_session=True,
            preexec_fn=die_with_parent,
            text=True,
        )
    return Path(name), process


def _reason(log: Path) -> str:
    """Return the last error in the log, as one line."""
    lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    errors = [line for line in lines if _ERROR.search(line)]
    errors = errors or [line for line in lines if "Error" in line]
    return errors[-1].strip().rstrip(".")[:_TOLD_MAX] if errors else "no error in its log"


def _environment(settings: Mapping[str, str]) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("OBJKV_")}
    return own | {"VLLM_NO_USAGE_STATS": "1"} | dict(settings)
