"""The agent's HTTP interface, on a Unix socket next to its own: for routers and for Prometheus.

``GET /healthz`` and ``/metrics``; ``POST /v1/match`` and ``/v1/prefetch`` with a JSON object that
names a namespace and a prompt, as ``tokens`` or as ``hashes``. Errors are JSON with the fix.
"""

import json
import logging
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from socketserver import ThreadingMixIn
from threading import BoundedSemaphore, Lock, Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from objkv.agent.core import Core
from objkv.agent.prefetch import Prefetches
from objkv.errors import ConfigError, ObjkvError
from objkv.keys.prefix import PREFIX_HASH_BYTES
from objkv.telemetry import MemoryRecorder, added

logger = logging.getLogger(__name__)
_BODY_BYTES_MAX = 16 << 20
"""A prompt of a million tokens is a third of that."""
_CLIENTS_MAX, _CLIENT_S, _STOP_S = 16, 10.0, 5.0
_DEADLINE_MS = 30_000
StartResponse = Callable[..., Any]


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_S

    def address_string(self) -> str:
        """Return a name for clients, which have no address."""
        return "local"

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


class _Server(ThreadingMixIn, WSGIServer):
    address_family = socket.AF_UNIX
    daemon_threads = True
    request_queue_size = 32

    def __init__(self, path: Path) -> None:
        self._slots = BoundedSemaphore(_CLIENTS_MAX)
        super().__init__(str(path), _Handler)  # type: ignore[arg-type]

    def server_bind(self) -> None:
        before = os.umask(0o177)
        try:
            self.socket.bind(self.server_address)
        finally:
            os.umask(before)
        self.server_name, self.server_port = "objkv", 0
        self.setup_environ()

    def get_request(self) -> tuple[socket.socket, Any]:
        return self.socket.accept()[0], ("local", 0)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do not log clients that disconnected."""


class AgentNumbers:
    """The totals of an agent's counters since its start. Thread-safe."""

    def __init__(self, recorder: MemoryRecorder) -> None:
        self._recorder = recorder
        self._lock = Lock()
        self._totals: dict[str, float] = {}

    def read(self) -> dict[str, float]:
        """Return all totals."""
        with self._lock:
            self._totals = added(self._totals, self._recorder.drain())
            return dict(self._totals)


class AgentHttp:
    """Serves until it is closed."""

    def __init__(
        self,
        path: Path,
        core: Core,
        prefetches: Prefetches,
        numbers: AgentNumbers,
        clients: Callable[[], int],
    ) -> None:
        """Raises ``ConfigError`` if ``path`` cannot be served. ``clients``: connected replicas."""
        self._path, self._core, self._prefetches = path, core, prefetches
        self._numbers, self._clients = numbers, clients
        path.unlink(missing_ok=True)  # the caller holds the agent's lock
        try:
            self._server = _Server(path)
        except OSError as exc:
            raise ConfigError(f"the agent cannot listen on {path}: {exc}") from exc
        self._server.set_app(self._answer)
        self._thread = Thread(
            target=self._server.serve_forever, args=(0.2,), name="objkv-agent-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop. Idempotent."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
        self._server.shutdown()
        self._thread.join(_STOP_S)
        self._server.server_close()

    def _answer(self, environ: dict[str, Any], start: StartResponse) -> Iterable[bytes]:
        path, method = environ.get("PATH_INFO", "/"), environ.get("REQUEST_METHOD")
        reads = {"/healthz": self._health, "/metrics": self._metrics}
        posts = {"/v1/match": self._match, "/v1/prefetch": self._prefetch}
        content = _content(environ)  # unread, it would reset the connection
        try:
            if path in reads and method == "GET":
                return _say(start, "200 OK", reads[path](), "text/plain; charset=utf-8")
            if path in posts and method == "POST":
                return _say_json(start, "200 OK", posts[path](_body(content)))
        except ConfigError as exc:
            return _say_json(start, "400 Bad Request", {"error": str(exc)})
        except ObjkvError as exc:
            return _say_json(start, "503 Service Unavailable", {"error": str(exc)})
        if path in reads or path in posts:
            return _say_json(start, "405 Method Not Allowed", {"error": f"{method} {path}"})
        known = ", ".join((*reads, *posts))
        return _say_json(start, "404 Not Found", {"error": f"no {path}: there are {known}"})

    def _health(self) -> str:
        return "ok\n"

    def _metrics(self) -> str:
        residents = self._core.residents
        levels: dict[str, float] = {
            "arena_bytes": residents.total_bytes,
            "arena_free_bytes": residents.free_bytes,
            "resident_payloads": len(residents),
            "leased_payloads": residents.leased(),
            "unsaved_payloads": len(residents.unsaved),
            "unsaved_bytes": residents.unsaved.nbytes,
            "clients": self._clients(),
        }
        lines = []
        for name, value in levels.items():
            lines += [f"# TYPE objkv_agent_{name} gauge", f"objkv_agent_{name} {value:g}"]
        for name, value in sorted(self._numbers.read().items()):
            full = f"objkv_agent_{name.removeprefix('agent_')}_total"
            lines += [f"# TYPE {full} counter", f"{full} {value:g}"]
        return "\n".join(lines) + "\n"

    def _match(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return asdict(self._prefetches.match(*self._prompt(body)))

    def _prefetch(self, body: Mapping[str, Any]) -> dict[str, Any]:
        deadline_ms = _integer(body, "deadline_ms", _DEADLINE_MS)
        prompt = self._prompt(body)
        return asdict(self._prefetches.start(*prompt, deadline_s=deadline_ms / 1000))

    def _prompt(self, body: Mapping[str, Any]) -> tuple[str, list[bytes]]:
        namespace = body.get("namespace")
        if not isinstance(namespace, str) or len(namespace) != 32 or not _is_hex(namespace):
            raise ConfigError("namespace: give its 32 hex digits, as objkv ls --json prints them")
        if isinstance(tokens := body.get("tokens"), list):
            if not all(type(one) is int and 0 <= one < 1 << 32 for one in tokens):
                raise ConfigError("tokens: give a list of token ids")
            return namespace, self._prefetches.hashes_of(namespace, tokens)
        hashes = body.get("hashes")
        size = 2 * PREFIX_HASH_BYTES
        if not isinstance(hashes, list) or not all(
            isinstance(one, str) and len(one) == size and _is_hex(one) for one in hashes
        ):
            raise ConfigError(f"give tokens, or hashes of {size} hex digits each")
        return namespace, [bytes.fromhex(one) for one in hashes]


def _content(environ: Mapping[str, Any]) -> bytes:
    """Return the body, empty if it is too long."""
    try:
        size = int(environ.get("CONTENT_LENGTH") or 0)
    except ValueError:
        return b""
    content: bytes = environ["wsgi.input"].read(size) if 0 < size <= _BODY_BYTES_MAX else b""
    return content


def _body(content: bytes) -> Mapping[str, Any]:
    if not content:
        raise ConfigError(f"send a JSON object of at most {_BODY_BYTES_MAX} bytes")
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"the body is not JSON: {exc}") from exc
    if not isinstance(body, dict):
        raise ConfigError("the body is not a JSON object")
    return body


def _integer(body: Mapping[str, Any], name: str, default: int) -> int:
    value = body.get(name, default)
    if type(value) is not int or not 0 < value <= 600_000:
        raise ConfigError(f"{name}: give milliseconds, at most 600000")
    return value


def _is_hex(text: str) -> bool:
    return not text.strip("0123456789abcdef")


def _say_json(start: StartResponse, status: str, document: Mapping[str, Any]) -> Iterable[bytes]:
    return _say(start, status, json.dumps(document) + "\n", "application/json")


def _say(start: StartResponse, status: str, text: str, kind: str) -> Iterable[bytes]:
    body = text.encode()
    start(status, [("Content-Type", kind), ("Content-Length", str(len(body)))])
    return [body]
