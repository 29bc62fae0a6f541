"""HTTP/1.1 on connections that stay open: one request and its response at a time on each.

Every call ends by the deadline of its thread (``objkv.net.deadline``).
"""

import os
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from botocore.exceptions import HTTPClientError, SSLError

from objkv.net.deadline import EndsBy, bound_waits, ends_s

STEP_BYTES = 4 << 20
"""How much one call sends or receives at most, and after how much progress is reported."""
HEAD_BYTES_MAX = 64 << 10
BODY_BYTES_MAX = 64 << 20
"""Limit for a body that is no value: a listing, an error."""
VALUE_BYTES_MAX = 5 << 30
"""Limit for a value: the most that S3 takes in one request."""
_ADDRESS_S = 1.0
"""Minimum time for connecting to one of several addresses: TCP then resends a lost packet."""
_LOOK_S = 0.02
"""The longest wait of one socket call. After it, progress is reported."""
_READ_BYTES = 16 << 10
_KERNEL_TLS = 1 << 3
"""``ssl.OP_ENABLE_KTLS``, which Python names since 3.12."""
_EARLY_S = 1.0
"""How long to wait for the response of a server that stopped reading the request."""
T = TypeVar("T")


class ConnectionFailed(HTTPClientError):
    """There is no usable response. The AWS client's exception, which it retries like its own."""

    fmt = "{error}"

    def __init__(self, error: object) -> None:
        super().__init__(error=error)


class NoResponse(ConnectionFailed):
    """The server closed the connection before it sent a byte of the response."""


class Connections:
    """The connections of one store. Thread-safe. ``ca``: file of trusted authorities, if TLS."""

    def __init__(self, *, connect_s: float, read_s: float, ca: str | None) -> None:
        self._connect_s = connect_s
        self._read_s = read_s
        self._idle: dict[str, deque[HttpConnection]] = {}
        self._tls: ssl.SSLContext | None = None
        if ca is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            self._tls.load_verify_locations(ca)
            if ssl.OPENSSL_VERSION_INFO >= (3,):  # without effect if kernel or OpenSSL lack it
                self._tls.options |= _KERNEL_TLS
        self._is_closed = False

    def ask(self, url: str, head: bytes, body: memoryview | bytes = b"") -> "HttpResponse":
        """Send one request to the server of ``url``, ``scheme://host:port``, and read the head of
        its response, which the caller closes. A connection that the server had closed meanwhile is
        replaced once. Raises ``ConnectionFailed`` and botocore's ``SSLError``."""
        for is_fresh in (False, True):
            connection = self.acquire(url, is_fresh=is_fresh)
            try:
                return connection.send(head, body) or connection.read_head()
            except BaseException as exc:
                connection.release()
                if is_fresh or not connection.is_used or not isinstance(exc, NoResponse):
                    raise
        raise AssertionError

    def acquire(self, url: str, *, is_fresh: bool = False) -> "HttpConnection":
        """Return the connection used last, or a new one, to be released. Raises like ``ask``."""
        idle = self._idle.setdefault(url, deque())
        while idle and not is_fresh:
            with suppress(IndexError):  # another thread was faster
                connection = idle.pop()
                if connection.is_quiet():
                    connection.is_used = True
                    return connection
                connection.close()
        wait_s = min(self._connect_s, ends_s() - time.monotonic())
        if wait_s <= 0:
            raise ConnectionFailed("the deadline passed")
        parts = urlsplit(url)
        try:
            if (parts.scheme == "https") != (self._tls is not None):
                raise ValueError("the endpoint's scheme is another")  # never in clear by mistake
            made = _connected(parts, time.monotonic() + wait_s)
            if self._tls is not None:  # closes the socket if the handshake fails
                host = (parts.hostname or "").rstrip(".")
                made = self._tls.wrap_socket(made, server_hostname=host)
        except ssl.SSLError as exc:
            raise SSLError(endpoint_url=url, error=exc) from exc
        except (OSError, ValueError) as exc:
            raise ConnectionFailed(f"no connection to {url}: {exc}") from exc
        return HttpConnection(made, timeout_s=self._read_s, keep=self._keep, url=url)

    def _keep(self, connection: "HttpConnection") -> None:
        self._idle[connection.url].append(connection)
        if self._is_closed:
            self.close()

    def close(self) -> None:
        """Close what is idle now, and what is released later. Idempotent."""
        self._is_closed = True
        for idle in list(self._idle.values()):
            with suppress(IndexError):  # the last one was closed, or another thread took it
                while True:
                    idle.pop().close()


def host_of(parts: SplitResult) -> str:
    """Return the host as requests name and sign it: without the usual port."""
    return parts.netloc.lower().removesuffix({"http": ":80", "https": ":443"}[parts.scheme])


def _connected(parts: SplitResult, until_s: float) -> socket.socket:
    """Return a connection to the first address that accepts one. All share the time."""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    found = socket.getaddrinfo(parts.hostname, port, 0, socket.SOCK_STREAM)
    addresses = [str(address[0]) for *_, address in found]
    while True:
        left_s = until_s - time.monotonic()
        wait_s = max(1e-3, min(left_s, max(_ADDRESS_S, left_s / len(addresses))))
        try:
            made = socket.create_connection((addresses.pop(0), port), wait_s)
        except OSError:
            if not addresses or time.monotonic() >= until_s:
                raise
        else:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return made


class HttpConnection:
    """Belongs to one request until its ``release``."""

    def __init__(
        self,
        made: socket.socket,
        *,
        timeout_s: float,
        keep: Callable[["HttpConnection"], None],
        url: str = "",
    ) -> None:
        self.url = url
        self.socket = made
        self._timeout_s = timeout_s
        self._keep = keep
        self._pid = os.getpid()
        self._poll = select.poll()
        self._poll.register(made, select.POLLIN)
        self._tls = made if isinstance(made, ssl.SSLSocket) else None
        """Python waits for it, as TLS keeps state between calls; the kernel waits for others."""
        if self._tls is None:
            bound_waits(made, _LOOK_S)
        self._waits_s = -1.0
        """The last time-out that was set for TLS."""
        self.is_used = False
        """Whether it carried an earlier request, so the server may have closed it meanwhile."""
        self._has_body = True

    def is_quiet(self) -> bool:
        """Whether it is open, has no unexpected input, and is not a parent process's."""
        return self._pid == os.getpid() and not self._poll.poll(0)

    def send(self, head: bytes, body: memoryview | bytes) -> "HttpResponse | None":
        """Send a request. A server that refuses a body may respond and close the connection early;
        that response is returned. Raises like ``read_head``."""
        self._has_body = not head.startswith(b"HEAD ")
        try:
            if self._bounded(self.socket.send, head) != len(head):
                raise TimeoutError("the server did not accept the head of the request")
            at = 0
            while at < len(body):
                at += self._bounded(self.socket.send, body[at : at + STEP_BYTES])
            return None
        except (OSError, ValueError) as exc:
            try:
                with EndsBy(time.monotonic() + _EARLY_S):
                    response = self.read_head()
            except NoResponse:
                raise
            except ConnectionFailed:
                raise ConnectionFailed(f"sending: {exc}") from exc
            if response.status < 300:
                reason = "the server responded before the whole body was sent"
                raise ConnectionFailed(reason) from exc
            response.keeps = False
            return response

    def read_head(self) -> "HttpResponse":
        """Raises ``ConnectionFailed``, or ``NoResponse`` if not one byte arrived."""
        raw = b""
        try:
            while b"\r\n\r\n" not in raw:
                if len(raw) > HEAD_BYTES_MAX:
                    raise ValueError("the head of the response does not end")
                raw += self.receive()
                while raw.startswith(b"HTTP/1.1 1") and b"\r\n\r\n" in raw:
                    raw = raw.partition(b"\r\n\r\n")[2]  # an interim response
            return HttpResponse(self, raw, has_body=self._has_body)
        except (OSError, ValueError) as exc:
            if not raw and not isinstance(exc, TimeoutError):
                raise NoResponse(exc) from exc
            raise ConnectionFailed(f"reading: {exc}") from exc

    def receive(self) -> bytes:
        """Return what has arrived as soon as that is something. Raises OSError."""
        more = self._bounded(self.socket.recv, _READ_BYTES)
        if not more:
            raise ConnectionError("the response ended early")
        return more

    def receive_into(self, into: memoryview) -> int:
        """Fill ``into``, or only its start if the rest is slow. Return 0 at the end of stream."""
        if self._tls is None:
            return self._bounded(self.socket.recv_into, into, 0, socket.MSG_WAITALL)
        at, end_s = 0, ends_s()
        self._limit_wait(end_s)
        while at < len(into):  # each call returns a record of up to 16 KiB
            if end_s - time.monotonic() < self._waits_s:
                self._limit_wait(end_s)
            with into[at:] as rest:
                got: Any = self._tls.read(len(rest), rest)  # its number, with a buffer
            if not got:
                break
            at += got
        return at

    def _bounded(self, call: Callable[..., T], *args: Any) -> T:
        """Make one socket call, which ends by the deadline and within the time-out."""
        if self._tls is not None:
            self._limit_wait(ends_s())
            return call(*args)
        now_s, end_s = time.monotonic(), ends_s()
        until_s = min(now_s + self._timeout_s, end_s)
        while now_s < until_s:
            with suppress(BlockingIOError):
                return call(*args)
            now_s = time.monotonic()
        raise TimeoutError("the deadline passed")

    def _limit_wait(self, end_s: float) -> None:
        wait_s = min(self._timeout_s, end_s - time.monotonic())
        if wait_s <= 0:
            raise TimeoutError("the deadline passed")
        if wait_s != self._waits_s:
            self.socket.settimeout(wait_s)
            self._waits_s = wait_s

    def shut(self) -> None:
        """End another thread's wait on this connection at once; that thread releases it.
        ``SSLSocket.shutdown`` would remove the TLS layer while the other thread still reads."""
        with suppress(OSError):
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def release(self, *, is_clean: bool = False) -> None:
        """Keep the connection for another request if nothing can arrive on it any more, else close
        it. Called once for each request."""
        # TLS may hold unexpected bytes; the next user checks the socket itself.
        is_empty = self._tls is None or not self._tls.pending()
        if is_clean and is_empty:
            self._keep(self)
        else:
            self.close()

    def close(self) -> None:
        """Close the socket, unsent bytes included."""
        self.socket.close()


class HttpResponse:
    """Status and headers of a response. A context manager that releases its connection. Raises
    ValueError for a value of unknown length. A body in chunks has arrived when the object is made.
    """

    def __init__(self, connection: HttpConnection, raw: bytes, *, has_body: bool = True) -> None:
        head, _, rest = raw.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        version, code = lines[0].split(" ", 2)[:2]
        self.status = int(code)
        found = [line.partition(":")[::2] for line in lines[1:]]
        self.headers = {name.rstrip().lower(): text.strip() for name, text in found}
        self._connection = connection
        self.keeps = version == "HTTP/1.1" and self.headers.get("connection", "").lower() != "close"
        length = self.headers.get("content-length", "")
        if not has_body or self.status == 204:
            length = "0"
        elif "transfer-encoding" in self.headers:
            rest = self._chunks(bytearray(rest))
            length = self.headers["content-length"] = str(len(rest))
        elif not length and self.status >= 300:
            length, self.keeps = str(len(rest)), False  # an error, explained or not
        if not length.isdecimal():
            raise ValueError("a response of unknown length")
        self.left = int(length)
        """Bytes of the body that are still unread."""
        self._rest = memoryview(rest)
        if self.left < len(rest):
            if has_body and self.status < 300:
                raise ValueError("more bytes than the response announced")
            self._rest, self.keeps = self._rest[: self.left], False

    def _chunks(self, raw: bytearray) -> bytes:
        if self.headers["transfer-encoding"].lower() != "chunked":
            raise ValueError("a response in an unknown encoding")
        body, size = bytearray(), -1
        while size:
            while (end := raw.find(b"\r\n")) < 0:
                if len(raw) > HEAD_BYTES_MAX:
                    raise ValueError("a chunk of unknown length")
                raw += self._connection.receive()
            size = int(raw[:end].partition(b";")[0], 16)
            if not 0 <= size <= VALUE_BYTES_MAX - len(body):
                raise ValueError("a chunk of impossible length")
            start, next_at = end + 2, end + size + 4
            while len(raw) < next_at:
                raw += self._connection.receive()
            body += raw[start : start + size]
            if raw[start + size : next_at] != b"\r\n":
                raise ValueError("a chunk that does not end, or a trailer")
            del raw[:next_at]
        self.keeps = self.keeps and not raw
        return bytes(body)

    @property
    def etag(self) -> str:
        """The version of the value; empty if the server sends none."""
        return self.headers.get("etag", "")

    @property
    def total(self) -> int:
        """Length of the whole value in bytes. Raises ``ConnectionFailed`` if it is unknown."""
        if self.status != 206:
            return int(self.headers["content-length"])
        try:
            return int(self.headers["content-range"].rpartition("/")[2])
        except (KeyError, ValueError) as exc:
            raise ConnectionFailed("a range at an unknown position") from exc

    def starts_at(self, start: int) -> bool:
        """Whether the response is a range that begins at this byte of the value."""
        return self.headers.get("content-range", "").startswith(f"bytes {start}-")

    def fill(
        self,
        into: memoryview,
        progress: Callable[[int], None] = lambda _: None,
        step_bytes: int = STEP_BYTES,
    ) -> None:
        """Fill ``into`` straight from the socket, and call ``progress`` with the number of bytes so
        far every ``step_bytes`` or earlier. Raises ``ConnectionFailed``, also at the deadline."""
        at = min(len(self._rest), len(into))
        into[:at] = self._rest[:at]
        self._rest = self._rest[at:]
        self.left -= at
        if at:
            progress(at)
        while at < len(into):
            # Release the view at once: an exception in flight would keep it alive.
            with into[at : at + step_bytes] as step:
                try:
                    got = self._connection.receive_into(step)
                except (OSError, ValueError) as exc:
                    raise ConnectionFailed(f"reading: {exc}") from exc
            if not got:
                raise ConnectionFailed(f"the body ended after {at} of {len(into)} bytes")
            at += got
            self.left -= got
            progress(at)

    def read(self) -> bytes:
        """Return the body, which is no value. Raises ``ConnectionFailed``."""
        if self.left > BODY_BYTES_MAX:
            raise ConnectionFailed(f"a body of {self.left} bytes, more than {BODY_BYTES_MAX}")
        body = bytearray(self.left)
        self.fill(memoryview(body))
        return bytes(body)

    def shut(self) -> None:
        self._connection.shut()

    def __enter__(self) -> "HttpResponse":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.release(is_clean=self.keeps and self.left == 0)
