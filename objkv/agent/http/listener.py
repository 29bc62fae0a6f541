"""HTTP servers of an agent: on a Unix socket, and on an address if one is set.

Each has threads of its own, with limits on their number, on a client's silence and on the time of a
request, so that clients of one cannot keep those of the other waiting.
"""

import errno
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from socketserver import ThreadingMixIn
from threading import Condition, Lock, Thread
from time import monotonic, sleep
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from objkv.agent.peers import bind_private, is_served, peer_of
from objkv.errors import ConfigError, StoreBusy

StartResponse = Callable[..., Any]
Application = Callable[[dict[str, Any], StartResponse], Iterable[bytes]]
BODY_BYTES_MAX: Final = 16 << 20
"""Of all requests at a time. A prompt of a million tokens is half of that."""
_CLIENTS_MAX = 16
_SILENT_S, _REQUEST_S, _STOP_S = 10.0, 60.0, 5.0
"""How long a client may be silent, and how long a request may take."""
_POLL_S = 0.2
_PIECE_BYTES = 1 << 16
_ADMIT = "objkv.admit"
_NAME = "objkv"
_LISTENS = "0A"
"""The state in the kernel's tables of TCP sockets."""


class _Handler(WSGIRequestHandler):
    timeout = _SILENT_S

    def get_environ(self) -> dict[str, Any]:
        """Return the application's environment, with how it admits the client."""
        assert isinstance(self.server, _Server)
        return super().get_environ() | {_ADMIT: partial(self.server.admit, self.connection)}

    def address_string(self) -> str:
        """Return a name for clients: those of a Unix socket have no address."""
        return "client"

    def version_string(self) -> str:
        """Hide the versions of Python and wsgiref."""
        return _NAME

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 32

    def __init__(self, address: Any, family: int) -> None:
        self.address_family = family
        self._lock = Lock()
        self._began: dict[socket.socket, float] = {}
        self._admitted = set[socket.socket]()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without a lookup of this machine's name, which may take long."""
        if self.address_family == socket.AF_UNIX:
            bind_private(self.socket, str(self.server_address))
        else:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.socket.bind(self.server_address)
        self.server_name, self.server_port = _NAME, 0
        self.setup_environ()

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            sock, _ = self.socket.accept()
        except OSError:
            sleep(_POLL_S)  # such as no descriptor: it may be some time
            raise
        if self.address_family == socket.AF_UNIX and not is_served(peer_of(sock)[1]):
            sock.close()
            raise PermissionError("a process of another user")
        return sock, ("client", 0)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if has_slot := len(self._began) < _CLIENTS_MAX or self._drop_stranger():
                self._began[request] = monotonic()
        if not has_slot:
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread is free
            self._end(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._end(request)

    def admit(self, request: socket.socket) -> None:
        """A client has shown that it may ask: it keeps its slot."""
        with self._lock:
            if request in self._began:
                self._admitted.add(request)

    def _drop_stranger(self) -> bool:
        """Hang up on the oldest client not admitted. Returns whether there is one. Locked."""
        found = next((one for one in self._began if one not in self._admitted), None)
        if found is None:
            return False
        del self._began[found]
        with suppress(OSError):
            found.shutdown(socket.SHUT_RDWR)
        return True

    def _end(self, request: socket.socket) -> None:
        with self._lock:
            self._began.pop(request, None)
            self._admitted.discard(request)

    def service_actions(self) -> None:
        """Hang up on clients that send, or read, a byte now and then."""
        with self._lock:
            since = monotonic() - _REQUEST_S
            for request in [one for one, began in self._began.items() if began < since]:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do not log clients that disconnected."""


def check_address(where: tuple[str, int], holder: int = 0) -> None:
    """Raise ``ConfigError`` if nothing can listen there, not even once ``holder`` has ended."""
    try:
        address, family = _found(where)
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, OverflowError) as exc:
        in_use = isinstance(exc, OSError) and exc.errno == errno.EADDRINUSE
        if not (in_use and holder and _has_port(holder, where[1])):
            raise _refused(where, exc) from exc


class HttpListener:
    """Serves an application until it is closed."""

    def __init__(self, where: Path | tuple[str, int], application: Application) -> None:
        """``where``: a path, which is replaced, or host and port. Raises ``ConfigError``."""
        self._path = where if isinstance(where, Path) else None
        self._inode = 0
        with ExitStack() as undo:
            try:
                address, family = _found(where)
                if self._path is not None:
                    self._path.unlink(missing_ok=True)
                self._server = _Server(address, family)
                undo.callback(self._server.server_close)
                if self._path is not None:
                    undo.callback(self._path.unlink, missing_ok=True)
                    self._inode = self._path.stat().st_ino
                self._server.set_app(application)
                serve = self._server.serve_forever
                self._thread = Thread(target=serve, args=(_POLL_S,), name="objkv-http", daemon=True)
                self._thread.start()
            except Exception as exc:  # also if no thread or no memory is free
                raise _refused(where, exc) from exc
            undo.pop_all()

    @property
    def is_lost(self) -> bool:
        """Whether its Unix socket was removed, so that no client can connect."""
        return self._path is not None and not os.path.lexists(self._path)

    def close(self) -> None:
        """Stop. Idempotent."""
        if self._path is not None:
            with suppress(OSError):
                if self._path.stat().st_ino == self._inode:  # otherwise it is another agent's
                    self._path.unlink()
        self._server.shutdown()
        self._thread.join(_STOP_S)
        self._server.server_close()


class Bodies:
    """Reads the bodies of requests, which together have a bound. Thread-safe."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._left = BODY_BYTES_MAX

    @contextmanager
    def read(self, environ: dict[str, Any]) -> Iterator[bytes]:
        """Read a body, which counts in this block. Empty if too long. May raise ``StoreBusy``."""
        nbytes = _length(environ)
        with self._changed:
            has_room = self._changed.wait_for(lambda: nbytes <= self._left, _SILENT_S)
            self._left -= nbytes if has_room else 0
        if not has_room:
            skip_body(environ)
            raise StoreBusy("too many long requests at once: try again")
        try:
            yield environ["wsgi.input"].read(nbytes) if nbytes else b""
        finally:
            with self._changed:
                self._left += nbytes
                self._changed.notify_all()


def admit(environ: Mapping[str, Any]) -> None:
    """The client of a request may ask: it keeps its slot until it is answered, others do not."""
    environ[_ADMIT]()


def skip_body(environ: Mapping[str, Any]) -> None:
    """Read the body, because leaving it unread would reset the connection."""
    left = _length(environ)
    while left > 0 and (piece := environ["wsgi.input"].read(min(left, _PIECE_BYTES))):
        left -= len(piece)


def _length(environ: Mapping[str, Any]) -> int:
    try:
        nbytes = int(environ.get("CONTENT_LENGTH") or 0)
    except ValueError:
        return 0
    return nbytes if 0 < nbytes <= BODY_BYTES_MAX else 0


def _refused(where: Path | tuple[str, int], exc: Exception) -> ConfigError:
    why = exc.strerror if isinstance(exc, OSError) else exc
    name = where if isinstance(where, Path) else ":".join(map(str, where))
    return ConfigError(f"cannot listen on {name}: {why}")


def _has_port(pid: int, port: int) -> bool:
    """Whether a process of this user listens at a TCP port."""
    found: set[str] = set()
    try:
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{inode}]")
        return any(os.readlink(one) in found for one in Path(f"/proc/{pid}/fd").iterdir())
    except (OSError, ValueError):  # it has ended, or closed a file meanwhile
        return False


def _found(where: Path | tuple[str, int]) -> tuple[Any, int]:
    if isinstance(where, Path):
        return str(where), socket.AF_UNIX
    found = socket.getaddrinfo(*where, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return found[0][4], found[0][0]
