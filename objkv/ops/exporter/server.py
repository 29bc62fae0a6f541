"""Serves ``/metrics`` and ``/healthz`` over HTTP, with the limits of the agent's server."""

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import make_wsgi_app

from objkv.agent.http.listener import HttpListener, StartResponse, admit

_HEADS = [
    ("Content-Type", "text/plain; charset=utf-8"),
    ("X-Content-Type-Options", "nosniff"),
]


class ExporterServer:
    """Serves until its block ends. A context manager."""

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
        self._listener = HttpListener((host, port), self._answer)

    @property
    def url(self) -> str:
        """The server's address."""
        host, port = self._listener.address
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def __enter__(self) -> "ExporterServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _answer(self, environ: dict[str, Any], start_plain: StartResponse) -> Iterable[bytes]:
        def start(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            return start_plain(status, [*headers, ("Server", "objkv")], *more)

        admit(environ)
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
    start(status, [*_HEADS])  # the callee appends the length to this list
    return [f"{text}\n".encode()]
