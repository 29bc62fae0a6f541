"""Two OpenAI-compatible servers that share an index and a bucket, and a client that asks both."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from objkv.config import Config
from objkv.ops.demo.backing import backing_servers
from objkv.ops.demo.job import (
    CONNECTOR,
    KV_CACHE_BYTES,
    SCALES,
    Answer,
    Prompt,
    Size,
    prompts_of,
    warm_up_of,
)
from objkv.ops.demo.openai import MODEL, Server
from objkv.ops.demo.place import Place
from objkv.ops.demo.process import Program
from objkv.ops.demo.replicas import Shown, Tell
from objkv.ops.demo.report import compare
from objkv.testing.servers.ports import free_port

_START_S = 300.0
_SAVED_S = 30.0
_COUNTED_TWICE = "What was recomputed is stored as well, each prompt under a cache_salt of its own."


@dataclass(frozen=True, slots=True)
class Fleet:
    """What runs."""

    first: Server
    second: Server
    settings: Mapping[str, str]
    """Environment variables that lead to what the servers share."""
    notices: tuple[str, ...]
    engine: str
    device: str


@dataclass(frozen=True, slots=True)
class ShownByFleet:
    """What the fleet showed."""

    shown: Shown
    metrics: Mapping[str, Mapping[str, float]]


@contextmanager
def running_fleet(size: Size, place: Place, tell: Tell) -> Iterator[Fleet]:
    """Start everything; all of it is gone afterwards. Takes a minute or two.

    Raises ``ProgramFailed``, and ``ConfigError`` if there is no Redis to start.
    """
    with ExitStack() as stack:
        tell("model", "making it")
        model = _make_model(size, place)
        tell("index and bucket", "starting")
        backing = stack.enter_context(backing_servers(place.logs))
        tell(f"two servers on {backing.index} and {backing.bulk}", "starting")
        servers = []
        for name in ("A", "B"):
            port = free_port()
            log_file = place.logs / f"server-{name}.log"
            program = Program(
                f"server {name}",
                _arguments(size, model["folder"], port),
                log_file,
                # /reset_prefix_cache is there in development mode only.
                {"VLLM_SERVER_DEV_MODE": "1", **backing.settings},
                speaks=False,
            )
            stack.enter_context(program)
            servers.append(Server(program, f"http://127.0.0.1:{port}"))
        for server in servers:
            server.wait_until_ready(bound_s=_START_S)
        first, second = servers
        yield Fleet(
            first,
            second,
            settings=backing.settings,
            notices=(*backing.notices, _COUNTED_TWICE),
            engine=model["engine"],
            device=model["device"],
        )


def ask_fleet(fleet: Fleet, size: Size, chunks: Callable[[], int], tell: Tell) -> ShownByFleet:
    """Ask both servers. ``chunks()`` counts what is stored. Raises ``ProgramFailed``."""
    prompts = prompts_of(size)
    before = tuple(prompt for prompt in prompts if prompt.asked_before)
    warm_up = Prompt(name="warm-up", tokens=warm_up_of(size), asked_before=True)
    saved = _Saved(chunks)

    def ask(
        server: Server, what: str, asked: tuple[Prompt, ...], *, alone: bool = False
    ) -> dict[str, Answer]:
        answers = {}
        for prompt in (warm_up, *asked):
            tell(f"{server.name} {what}", f"answering {prompt.name}")
            salt = f"alone: {prompt.name}" if alone else None
            answers[prompt.name] = server.ask(prompt, salt=salt)
            saved.expect(prompt, salt)
        tell(f"{server.name} {what}", "saving")
        saved.wait()
        return answers

    # Under a salt of its own a prompt shares nothing, so it is computed as without objkv.
    recomputed = ask(fleet.second, "recomputes", prompts, alone=True)
    first = ask(fleet.first, "computes and saves", before)
    second = ask(fleet.second, "loads", prompts)
    metrics = {server.name: server.metrics() for server in (fleet.first, fleet.second)}
    failures = sum(told.get("vllm:objkv_load_failures_total", 0) for told in metrics.values())
    rows = compare(prompts, recomputed, first, second)
    return ShownByFleet(Shown(fleet.engine, fleet.device, rows, int(failures)), metrics)


class _Saved:
    """Waits for what is saved in the background."""

    def __init__(self, chunks: Callable[[], int]) -> None:
        self._chunks = chunks
        self._expected: set[tuple[str | None, tuple[int, ...]]] = set()
        self._chunk_tokens = Config.model_fields["chunk_tokens"].default

    def expect(self, prompt: Prompt, salt: str | None) -> None:
        size = self._chunk_tokens
        for end in range(size, len(prompt.tokens) + 1, size):
            self._expected.add((salt, prompt.tokens[:end]))

    def wait(self) -> None:
        """Until all is there, or it takes too long: what is missing then is not served."""
        deadline = time.monotonic() + _SAVED_S
        while self._chunks() < len(self._expected) and time.monotonic() < deadline:
            time.sleep(0.1)


def _make_model(size: Size, place: Place) -> dict[str, str]:
    arguments = ("-m", "objkv.connector.demo.model", str(place.models), size)
    log_file = place.logs / "model.log"
    with Program("making the model", arguments, log_file, {}) as program:
        lines = list(program.lines(bound_s=_START_S))
    made: dict[str, str] = json.loads(lines[-1])
    return made


def _arguments(size: Size, model: str | Path, port: int) -> tuple[str, ...]:
    longest = str(SCALES[size].longest)
    return (
        *("-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", MODEL, "--skip-tokenizer-init"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager", "--seed", "0"),
        *("--max-model-len", longest, "--max-num-batched-tokens", longest),
        *("--max-num-seqs", "4", "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)),
        *("--kv-transfer-config", json.dumps(CONNECTOR), "--enable-prompt-tokens-details"),
    )
