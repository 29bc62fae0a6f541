"""HTTP on connections of the client's pool: one request and its response per connection use."""

import os
import re
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import Event
from typing import Any, TypeVar

from objkv.errors import StoreUnavailable
from objkv.net.deadline import bound_waits, can_wait

KEEP_S = 10.0
STEP_BYTES = 512 << 10
"""Read size that fits in a core's own cache, so that a checksum still finds the bytes there."""
SEND_BYTES = 4 << 20
HEAD_BYTES_MAX = 64 << 10
_LOOK_S = 0.02
"""The longest wait of one socket call. After it, progress is reported, and a sender checks whether
the server has already responded."""
_HEAD_READ_BYTES = 16 << 10
_HEADER = re.compile(
    r"\r\n(content-(?:length|range)|connection|etag|transfer-encoding)[ \t]*:([^\r]*)",
    re.IGNORECASE,
)
T = TypeVar("T")


class WireFailed(Exception):
    """The direct path has no usable response. The caller then repeats the request through the
    client, which retries, follows redirects and explains errors."""


class Chunked(WireFailed):
    """A value in chunks, whose length is unknown: the client must read it."""


class NotSent(WireFailed):
    """The request was not sent at all, so the server cannot have carried it out."""


class NoResponse(WireFailed):
    """The server closed the connection before it sent a byte of the response."""


def strong_tag(etag: str) -> str:
    """Return the version of the response's value; empty if the server sends none or a weak one
    (``W/``), which several versions may share."""
    return "" if etag.startswith("W/") else etag.strip('"')


def check_time(deadline_s: float, what: str) -> None:
    """Raise ``StoreUnavailable`` if the deadline has passed, so that no fallback is tried."""
    if time.monotonic() >= deadline_s:
        raise StoreUnavailable(f"{what}: the deadline passed")


@dataclass(frozen=True, slots=True)
class _Idle:
    pool: Any
    connection: Any
    timeout_s: float
    """The time-out that the client expects on its sockets."""
    poll: select.poll
    pid: int
    since_s: float

    def is_quiet(self) -> bool:
        """Whether the connection is open, without unexpected input or an end of stream."""
        return self.connection.sock is not None and not self.poll.poll(0)

    def give_back(self) -> None:
        """Return the connection to the pool, in the state in which the client left it."""
        if self.pid != os.getpid():
            return  # it belongs to the parent process
        places = self.pool.pool
        # Full if the client opened others meanwhile; the pool would then log a warning.
        has_room = places is not None and not places.full()
        if self.is_quiet() and has_room:
            self.connection.sock.settimeout(self.timeout_s)
            self.pool._put_conn(self.connection)
            return
        self.connection.close()
        if has_room:
            self.pool._put_conn(None)


class KeptConnections:
    """Connections of one client's pools that stay ready between requests. Thread-safe.

    Taking a connection from the client's pool, preparing it and returning it costs as much as
    signing a request. A connection that was idle for ``KEEP_S`` returns to its pool for the client
    to use.
    """

    def __init__(self) -> None:
        self._idle: deque[_Idle] = deque()
        self._closed = Event()

    def take(self, pool: Any) -> Any | None:
        """Return the most recently used connection of ``pool``, or None. The caller later passes it
        to ``keep`` or to the pool."""
        while pool.pool is not None and (idle := self._popped()) is not None:
            if idle.pool is pool and idle.pid == os.getpid() and idle.is_quiet():
                return idle.connection
            idle.give_back()
        return None

    def keep(self, pool: Any, connection: Any, timeout_s: float) -> None:
        """Keep a connection that has no unread bytes."""
        poll, now_s = select.poll(), time.monotonic()
        poll.register(connection.sock, select.POLLIN)
        self._idle.append(_Idle(pool, connection, timeout_s, poll, os.getpid(), now_s))
        with suppress(IndexError):  # taken by another thread
            if self._idle[0].since_s < now_s - KEEP_S:
                self._idle.popleft().give_back()
        if self._closed.is_set():
            self.close()

    def close(self) -> None:
        """Return all connections to their pools; later ones return at once. Idempotent."""
        self._closed.set()
        while (idle := self._popped()) is not None:
            idle.give_back()

    def _popped(self) -> _Idle | None:
        try:
            return self._idle.pop()
        except IndexError:  # empty, or another thread was faster
            return None


class HttpConnection:
    """A connection in use for one request. ``release`` keeps it for the next request, unless part
    of a response may still arrive on it."""

    def __init__(
        self, pool: Any, connection: Any, *, timeout_s: float, kept: KeptConnections
    ) -> None:
        self._pool = pool
        self._kept = kept
        self._connection = connection
        self._timeout_s = timeout_s
        self.is_used = connection.sock is not None
        """Whether it carried an earlier request, so the server may have closed it meanwhile."""
        self.is_clean = False
        self._waits_in_kernel = False
        self._waits_s = -1.0
        """The last time-out that was set, if the kernel does not wait."""
        self._is_released = False
        self.early = False
        """Whether the response arrived before the whole request was sent."""
        self.on_release: Callable[[], None] | None = None
        """Called once, before the connection can be used for another request."""

    def connect(self, timeout_s: float, *, is_kept: bool = False) -> None:
        """Connect if necessary. A connection that ``is_kept`` is already prepared. Raises
        ``WireFailed``."""
        try:
            if not self.is_used:
                self._connection.timeout = timeout_s  # as the client sets it before each request
                self._pool._validate_conn(self._connection)  # connects if the pool uses TLS
                if self._connection.sock is None:
                    self._connection.connect()
            self._waits_in_kernel = can_wait(self.socket)
            if self._waits_in_kernel and not is_kept:
                bound_waits(self.socket, _LOOK_S)
        except Exception as exc:  # the client retries and explains the error
            self._connection.close()
            raise WireFailed(f"no connection: {exc}") from exc

    @property
    def socket(self) -> socket.socket:
        """The connection's socket, plain or TLS."""
        found: socket.socket = self._connection.sock
        return found

    def send(self, head: bytes, body: memoryview | None, deadline_s: float) -> None:
        """Send a request, with the body in slices of the caller's buffer. Raises ``WireFailed``.

        A server that refuses a request responds without waiting for the body, then closes the
        connection. If calls wait in the kernel, check for such a response before each slice,
        because a reset would discard it.
        """
        try:
            if self._bounded(deadline_s, self.socket.send, head) != len(head):
                raise TimeoutError("the server did not accept the head of the request")
            if body is None:
                return
            if self._waits_in_kernel:
                self._send_watching(body, deadline_s)
                return
            for at in range(0, len(body), SEND_BYTES):
                self._bounded(deadline_s, self.socket.sendall, body[at : at + SEND_BYTES])
        except (OSError, ValueError) as exc:
            raise WireFailed(f"sending: {exc}") from exc

    def _send_watching(self, body: memoryview, deadline_s: float) -> None:
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        at, until_s = 0, 0.0
        while at < len(body):
            if poll.poll(0):
                self.early = True
                return
            if not until_s:
                until_s = self._until(deadline_s)
            elif time.monotonic() >= until_s:
                raise TimeoutError(f"the server accepted no more than {at} of {len(body)} bytes")
            with suppress(BlockingIOError):
                at += self.socket.send(body[at : at + SEND_BYTES])
                until_s = 0.0

    def read_head(self, deadline_s: float) -> "HttpResponse":
        """Return the response with its status and headers. Raises ``WireFailed``, or ``NoResponse``
        if not one byte arrived."""
        raw = b""
        try:
            while b"\r\n\r\n" not in raw:
                more = self._bounded(deadline_s, self.socket.recv, _HEAD_READ_BYTES)
                if not more or len(raw) > HEAD_BYTES_MAX:
                    raise ConnectionError("the head of the response is incomplete")
                raw += more
                while raw.startswith(b"HTTP/1.1 1") and b"\r\n\r\n" in raw:
                    raw = raw.partition(b"\r\n\r\n")[2]  # an interim response
            return HttpResponse(self, raw)
        except (OSError, ValueError) as exc:
            if not raw and not isinstance(exc, TimeoutError):
                raise NoResponse(str(exc)) from exc
            raise WireFailed(f"reading: {exc}") from exc

    def receive_into(self, into: memoryview, deadline_s: float) -> int:
        """Fill ``into``, or only its start with the bytes that arrive soon. Return 0 at the end of
        stream."""
        how = (0, socket.MSG_WAITALL) if self._waits_in_kernel else ()
        return self._bounded(deadline_s, self.socket.recv_into, into, *how)

    def _bounded(self, deadline_s: float, call: Callable[..., T], *args: Any) -> T:
        """Return the result of one socket call that waits neither past the deadline nor longer than
        the client would. Raises TimeoutError."""
        if not self._waits_in_kernel:
            wait_s = min(self._timeout_s, deadline_s - time.monotonic())
            if wait_s <= 0:
                raise TimeoutError("the deadline passed")
            if wait_s != self._waits_s:  # saves a system call for each TLS record
                self.socket.settimeout(wait_s)
                self._waits_s = wait_s
            return call(*args)
        until_s = self._until(deadline_s)
        while True:
            with suppress(BlockingIOError):
                return call(*args)
            if time.monotonic() >= until_s:
                raise TimeoutError("the deadline passed")

    def _until(self, deadline_s: float) -> float:
        now_s = time.monotonic()
        if now_s >= deadline_s:
            raise TimeoutError("the deadline passed")
        return min(now_s + self._timeout_s, deadline_s)

    def shut(self) -> None:
        """End another thread's wait on this connection at once. That thread releases the
        connection.

        ``SSLSocket.shutdown`` is unsuitable: it removes the TLS layer while the other thread still
        reads.
        """
        self.is_clean = False
        sock = self._connection.sock
        if sock is not None:
            with suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def release(self) -> None:
        """Keep the connection if ``is_clean``, else close it. Later calls do nothing, because
        another request may already use it."""
        if self._is_released:
            return
        self._is_released = True
        if self.on_release is not None:
            self.on_release()
            self.on_release = None
        if self.is_clean and not self.early and not self._has_more():
            self._kept.keep(self._pool, self._connection, self._timeout_s)
        else:
            self._connection.close()
            self._pool._put_conn(None)

    def _has_more(self) -> bool:
        """Whether TLS holds unexpected bytes; the pool checks the socket itself."""
        return isinstance(self.socket, ssl.SSLSocket) and self.socket.pending() > 0


class HttpResponse:
    """Status and headers of a response. A context manager that releases its connection.

    Raises ValueError for a response of unknown length, which the client must read.
    """

    def __init__(self, connection: HttpConnection, raw: bytes) -> None:
        head, _, rest = raw.partition(b"\r\n\r\n")
        text = head.decode("latin-1")
        version, code = text.partition("\r\n")[0].split(" ", 2)[:2]
        self.status = int(code)
        found: list[tuple[str, str]] = _HEADER.findall(text)
        self.headers = {name.lower(): value.strip() for name, value in found}
        """The relevant headers, by lower-case name."""
        if "transfer-encoding" in self.headers:
            if self.status in (200, 206):
                raise Chunked("a value in chunks")
            raise ValueError("a response in chunks")
        length = "0" if self.status == 204 else self.headers.get("content-length", "")
        if not length.isdecimal():
            raise ValueError("a response of unknown length")
        self.is_repeated = False
        """Whether an earlier attempt was sent and lost: the server may have carried it out."""
        self.left = int(length)
        """Bytes of the body that are still unread."""
        self._connection = connection
        self._rest = memoryview(rest)
        self._keeps = (
            version == "HTTP/1.1" and self.headers.get("connection", "").lower() != "close"
        )
        if self.left < len(rest):
            raise ValueError("more bytes than the response announced")

    @property
    def etag(self) -> str:
        """See ``strong_tag``."""
        return strong_tag(self.headers.get("etag", ""))

    @property
    def total(self) -> int:
        """Length of the whole value in bytes. Raises ``WireFailed`` if it is unknown."""
        if self.status != 206:
            return int(self.headers["content-length"])
        try:
            return int(self.headers["content-range"].rpartition("/")[2])
        except (KeyError, ValueError) as exc:
            raise WireFailed("a range at an unknown position") from exc

    def starts_at(self, start: int) -> bool:
        """Whether the response is a range that begins at this byte of the value."""
        return self.headers.get("content-range", "").startswith(f"bytes {start}-")

    def fill(
        self, into: memoryview, deadline_s: float, progress: Callable[[int], None] | None = None
    ) -> None:
        """Fill ``into`` with bytes of the body, straight from the socket, and call ``progress``
        with their number so far. Raises ``WireFailed``, also if the deadline passes."""
        at = min(len(self._rest), len(into))
        into[:at] = self._rest[:at]
        self._rest = self._rest[at:]
        self.left -= at
        if at and progress is not None:
            progress(at)
        while at < len(into):
            # Release the view at once: an exception in flight would keep it alive.
            with into[at : at + STEP_BYTES] as step:
                try:
                    got = self._connection.receive_into(step, deadline_s)
                except (OSError, ValueError) as exc:
                    raise WireFailed(f"reading: {exc}") from exc
            if not got:
                raise WireFailed(f"the body ended after {at} of {len(into)} bytes")
            at += got
            self.left -= got
            if progress is not None:
                progress(at)

    def text(self, deadline_s: float) -> bytes:
        """Return the body, if it is short like an error's. Raises ``WireFailed``."""
        if self.left > HEAD_BYTES_MAX:
            raise WireFailed("a long body instead of a short one")
        body = bytearray(self.left)
        self.fill(memoryview(body), deadline_s)
        return bytes(body)

    def __enter__(self) -> "HttpResponse":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.is_clean = self._keeps and self.left == 0
        self._connection.release()
