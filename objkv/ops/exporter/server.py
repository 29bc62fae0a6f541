"""Serves ``/metrics`` and ``/healthz`` over HTTP, with limits on clients and on their time."""

import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import ThreadingWSGIServer, make_wsgi_app

from objkv.errors import ConfigError

_CLIENTS_MAX = 16
"""Clients served at once. A further connection is closed immediately; Prometheus retries."""
_CLIENT_S = 10.0
"""Time without a byte from or to a client before its connection is closed."""
_STOP_S = 5.0
_NAME = "objkv"
_TEXT = [("Content-Type", "text/plain; charset=utf-8"), ("X-Content-Type-Options", "nosniff")]

StartResponse = Callable[..., Any]


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_S

    def version_string(self) -> str:
        """Hide the versions of Python and wsgiref."""
        return _NAME

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log scrapes."""


class _Server(ThreadingWSGIServer):
    request_queue_size = 32

    def __init__(self, address: tuple[str, int], family: socket.AddressFamily) -> None:
        self.address_family = family
        self._slots = threading.BoundedSemaphore(_CLIENTS_MAX)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Skip the lookup of this machine's name, which may take long without DNS."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

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


class ExporterServer:
    """A context manager that serves until its block ends."""

    def __init__(
        self,
        registry: CollectorRegistry,
        host: str,
        port: int,
        *,
        is_healthy: Callable[[], bool],
    ) -> None:
        """Port 0 means any free port. Raises ``ConfigError`` if the address cannot be used."""
        self._metrics = make_wsgi_app(registry)
        self._is_healthy = is_healthy
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, address = found[0][0], found[0][4]
            self._server = _Server((str(address[0]), int(address[1])), family)
        except (OSError, OverflowError) as exc:
            why = exc.strerror if isinstance(exc, OSError) else exc
            raise ConfigError(f"cannot listen on {host}:{port}: {why}") from exc
        self._server.set_app(self._answer)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True
        )

    @property
    def url(self) -> str:
        """The server's address."""
        host = self._server.server_name
        return f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_port}"

    def __enter__(self) -> "ExporterServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join(_STOP_S)
        self._server.server_close()

    def _answer(self, environ: dict[str, Any], start_plain: StartResponse) -> Iterable[bytes]:
        def start(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            return start_plain(status, [*headers, ("Server", _NAME)], *more)

        path = environ.get("PATH_INFO", "/")
        if environ.get("REQUEST_METHOD") not in ("GET", "HEAD"):
            return _say(start, "405 Method Not Allowed", "only GET")
        if path == "/metrics":
            page: Iterable[bytes] = self._metrics(environ, start)
            return page
        if path == "/healthz":
            healthy = self._is_healthy()
            status = "200 OK" if healthy else "503 Service Unavailable"
            return _say(start, status, "ok" if healthy else "a watching thread has stopped")
        if path == "/":
            return _say(start, "200 OK", "objkv exporter: /metrics, /healthz")
        return _say(start, "404 Not Found", "no such page: /metrics, /healthz")


def _say(start: StartResponse, status: str, text: str) -> list[bytes]:
    start(status, [*_TEXT])  # the callee appends the length to this list
    return [f"{text}\n".encode()]
