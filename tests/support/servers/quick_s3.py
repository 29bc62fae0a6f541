"""An S3 server in memory that costs as little as a server can, to measure clients against.

``python -m tests.support.servers.quick_s3`` runs it in a process of its own, with a
``PlainServer`` beside it. It checks no signature, knows every bucket, and forgets all when it ends.
"""

import argparse
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.servers.listener import Listener
from tests.support.servers.plain_limit import PlainServer
from tests.support.servers.process import running_server
from tests.support.servers.quick_s3_values import Answer, Request, Values, failure

HEAD_BYTES_MAX = 64 << 10
_MORE = getattr(socket, "MSG_MORE", 0)

Intercept = Callable[[Request], Answer | bytes | None]
"""Asked before each request, its body read; what it returns is the answer instead. Bytes are sent
as they are, and the connection is closed."""


class QuickS3(Listener):
    """GET (``Range``, ``If-Match``), PUT and completed uploads (``If-None-Match: *``), HEAD,
    DELETE, listings, uploads in parts. Bucket in the path. A context manager.

    ``tls`` is a folder of ``make_certificates``.
    """

    def __init__(
        self, port: int = 0, *, tls: Path | None = None, intercept: Intercept | None = None
    ) -> None:
        self._values = Values()
        self._intercept = intercept
        self._tls: ssl.SSLContext | None = None
        if tls is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(tls / "cert.pem", tls / "key.pem")
        super().__init__(port)
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.address[1]}"
        """Where clients find it."""

    def wrap(self, connection: socket.socket) -> socket.socket:
        """TLS, if there is a certificate."""
        if self._tls is None:
            return connection
        return self._tls.wrap_socket(connection, server_side=True)

    def serve(self, connection: socket.socket) -> None:
        """Answer requests of one connection."""
        reader = _Reader(connection)
        while (request := reader.read_head()) is not None:
            body = self._values.buffer(request.nbytes)
            reader.read_body(request, body)
            answer = self._intercept(request) if self._intercept is not None else None
            if isinstance(answer, bytes):
                connection.sendall(answer)
                return
            if answer is None:
                answer = self._values.answer(request, body)
            try:
                _send(connection, request, answer)
            finally:
                answer.done()


class _Reader:
    """Requests of one connection. What came with a head belongs to the body after it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._rest = b""

    def read_head(self) -> Request | None:
        """The next request, or None if the client is gone or sends what is none."""
        head, end = self._rest, b""
        while not end:
            head, end, rest = head.partition(b"\r\n\r\n")
            if end:
                break
            more = self._connection.recv(HEAD_BYTES_MAX)
            if not more or len(head) > HEAD_BYTES_MAX:
                return None
            head += more
        self._rest = rest
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        return Request(method, target, headers)

    def read_body(self, request: Request, body: memoryview) -> None:
        """Fill ``body`` from the socket; only what came with the head is copied."""
        if request.headers.get("expect") == "100-continue":
            self._connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        at = min(len(self._rest), len(body))
        body[:at] = self._rest[:at]
        self._rest = self._rest[at:]
        while at < len(body):
            got = self._connection.recv_into(body[at:])
            if not got:
                raise ConnectionError("the client is gone")
            at += got


def _send(connection: socket.socket, request: Request, answer: Answer) -> None:
    nbytes = sum(len(part) for part in answer.body)
    lines = [f"HTTP/1.1 {answer.status} {answer.reason}"]
    lines += [f"{name}: {value}" for name, value in answer.headers.items()]
    if answer.status != 204:
        lines.append(f"Content-Length: {answer.headers.get('Content-Length', nbytes)}")
    head = ("\r\n".join(dict.fromkeys(lines)) + "\r\n\r\n").encode("latin-1")
    if request.method == "HEAD" or not nbytes:
        connection.sendall(head)
        return
    if isinstance(connection, ssl.SSLSocket):
        connection.sendall(head)
    else:
        connection.sendall(head, _MORE)
    for part in answer.body:
        connection.sendall(part)


@dataclass(frozen=True, slots=True)
class QuickS3Process:
    """Where the servers of one process listen."""

    url: str
    plain: tuple[str, int]
    """Of the ``PlainServer``."""
    pid: int


@contextmanager
def quick_s3_process(*, tls: Path | None = None) -> Iterator[QuickS3Process]:
    """Both servers in one new process, killed at the end. ``tls``: see ``QuickS3``."""
    options = () if tls is None else ("--tls", str(tls))
    with running_server("quick_s3", *options) as (process, line):
        url, host, port = line.split()
        yield QuickS3Process(url, (host, int(port)), process.pid)


def main() -> None:
    """Serve until killed; print the S3 URL, and host and port of the plain server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--plain-port", type=int, default=0)
    parser.add_argument("--tls", type=Path)
    given = parser.parse_args()
    with QuickS3(given.port, tls=given.tls) as server, PlainServer(given.plain_port) as plain:
        print(server.url, *plain.address, flush=True)
        while True:
            time.sleep(3600)


__all__ = ["Answer", "QuickS3", "QuickS3Process", "Request", "failure", "quick_s3_process"]

if __name__ == "__main__":
    threading.current_thread().name = "quick-s3"
    main()
