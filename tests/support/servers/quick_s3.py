"""An S3 server in memory that costs as little as a server can, to measure clients against.

``python -m tests.support.servers.quick_s3`` runs it in a process of its own. It checks no
signature, knows every bucket, and forgets all when it ends.
"""

import argparse
import socket
import ssl
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote
from xml.sax.saxutils import escape

from tests.support.servers.listener import Listener
from tests.support.servers.process import start_server

HEAD_BYTES_MAX = 64 << 10
PAGE_KEYS = 1000
SPARE_BYTES_MAX = 1 << 30
_NOTHING = memoryview(b"")
_XML = '<?xml version="1.0" encoding="UTF-8"?>'


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    target: str
    headers: dict[str, str]
    head: bytes
    """Its first line and headers, as they came."""
    body: memoryview = _NOTHING

    @property
    def nbytes(self) -> int:
        return int(self.headers.get("content-length", 0))

    @property
    def key(self) -> str:
        return unquote(self.target.partition("?")[0]).lstrip("/")

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(self.target.partition("?")[2], keep_blank_values=True))


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, headers and the body in pieces; ``done`` is called when all of it was sent."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: tuple[memoryview, ...] = ()
    done: Callable[[], None] = lambda: None


def failure(status: int, code: str) -> Answer:
    return _xml(f"<Error><Code>{code}</Code><Message>{code}</Message></Error>", status)


def _xml(text: str, status: int = 200) -> Answer:
    return Answer(
        status, {"Content-Type": "application/xml"}, (memoryview((_XML + text).encode()),)
    )


@dataclass(slots=True)
class _Value:
    """Its bytes are never changed while ``readers`` send them."""

    content: memoryview
    modified_s: float = field(default_factory=time.time)
    etag: str = field(default_factory=lambda: f'"{uuid.uuid4().hex}"')
    readers: int = 0
    is_gone: bool = False

    @property
    def nbytes(self) -> int:
        return len(self.content)

    def told(self) -> str:
        modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(self.modified_s))
        return f"<Size>{self.nbytes}</Size><LastModified>{modified}</LastModified>"


class Values:
    """All values of a server. Memory of those replaced or deleted is used again: a page that is
    touched for the first time costs as much as receiving it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, _Value] = {}
        self._spare: defaultdict[int, list[memoryview]] = defaultdict(list)
        self._spare_bytes = 0

    def buffer(self, nbytes: int) -> memoryview:
        with self._lock:
            if self._spare[nbytes]:
                self._spare_bytes -= nbytes
                return self._spare[nbytes].pop()
        return memoryview(bytearray(nbytes))

    def answer(self, request: Request) -> Answer:
        bucket, _, name = request.key.partition("/")
        query = request.query
        if not name:
            return self._bucket(request, bucket, query)
        if request.method == "PUT":
            return self._put(request)
        if request.method == "DELETE":
            with self._lock:
                self._drop(self._values.pop(request.key, None))
            return Answer(204)
        return self._get(request)

    def newest(self) -> list[tuple[str, memoryview]]:
        """Of all values, those last that were put first."""
        with self._lock:
            return [(key, value.content) for key, value in reversed(self._values.items())]

    def _get(self, request: Request) -> Answer:
        with self._lock:
            value = self._values.get(request.key)
            if value is None:
                return failure(404, "NoSuchKey")
            if request.headers.get("if-match", value.etag).strip('"') != value.etag.strip('"'):
                return failure(412, "PreconditionFailed")
            value.readers += 1
        nbytes = value.nbytes
        headers = {
            "ETag": value.etag,
            "Last-Modified": formatdate(value.modified_s, usegmt=True),
            "Content-Type": "binary/octet-stream",
            "Accept-Ranges": "bytes",
        }
        status, start, end = 200, 0, nbytes
        if asked := request.headers.get("range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last or nbytes) + 1, nbytes)
            if start >= nbytes:
                self._leave(value)
                return failure(416, "InvalidRange")
            status, headers["Content-Range"] = 206, f"bytes {start}-{end - 1}/{nbytes}"
        if request.method == "HEAD":
            headers["Content-Length"] = str(end - start)
        return Answer(status, headers, (value.content[start:end],), lambda: self._leave(value))

    def _put(self, request: Request) -> Answer:
        value = _Value(request.body)
        with self._lock:
            if request.headers.get("if-none-match") == "*" and request.key in self._values:
                self._drop(value)
                return failure(412, "PreconditionFailed")
            self._drop(self._values.pop(request.key, None))  # the new one is the newest
            self._values[request.key] = value
        return Answer(200, {"ETag": value.etag})

    def _bucket(self, request: Request, bucket: str, query: dict[str, str]) -> Answer:
        if request.method != "GET":
            return Answer(200)
        start = f"{bucket}/{query.get('prefix', '')}"
        after = query.get("continuation-token", "")
        limit = int(query.get("max-keys", PAGE_KEYS))
        with self._lock:
            names = sorted(name for name in self._values if name.startswith(start) and name > after)
            page = [(name, self._values[name]) for name in names[:limit]]
        rows = []
        if delimiter := query.get("delimiter"):
            cut = {n: n[: n.find(delimiter, len(start)) + 1] for n in names}
            page = [(name, value) for name, value in page if not cut[name]]
            names = [name for name in names if not cut[name]]
            rows = [("CommonPrefixes", "Prefix", f, "") for f in sorted({*cut.values()} - {""})]
        rows += [("Contents", "Key", name, value.told()) for name, value in page]
        more, shown = len(names) > limit, quote if "encoding-type" in query else escape
        text = "<EncodingType>url</EncodingType>" if shown is quote else ""
        text += f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>"
        if more:
            text += f"<NextContinuationToken>{escape(page[-1][0])}</NextContinuationToken>"
        for kind, tag, name, told in rows:
            key = shown(name.removeprefix(f"{bucket}/"))
            text += f"<{kind}><{tag}>{key}</{tag}>{told}</{kind}>"
        return _xml(f"<ListBucketResult>{text}</ListBucketResult>")

    def _leave(self, value: _Value) -> None:
        with self._lock:
            value.readers -= 1
            if value.is_gone:
                self._drop(value)

    def _drop(self, value: _Value | None) -> None:
        """Keep its memory for others, once nobody sends it. The lock is held."""
        if value is None:
            return
        value.is_gone = True
        if value.readers == 0 and self._spare_bytes + value.nbytes <= SPARE_BYTES_MAX:
            self._spare[value.nbytes].append(value.content)
            self._spare_bytes += value.nbytes


_MORE = getattr(socket, "MSG_MORE", 0)

Intercept = Callable[[Request], Answer | bytes | None]
"""Asked before each request, its body read; what it returns is the answer instead. Bytes are sent
as they are, and the connection is closed."""
After = Callable[[Request, Answer], Answer | bytes | None]
"""The same once the request is done."""


class QuickS3(Listener):
    """GET (``Range``, ``If-Match``), PUT (``If-None-Match: *``), HEAD, DELETE, listings. Bucket in
    the path. A context manager.

    ``tls`` is a folder of ``make_certificates``.
    """

    def __init__(
        self,
        port: int = 0,
        *,
        tls: Path | None = None,
        intercept: Intercept = lambda _: None,
        after: After = lambda *_: None,
        values: Values | None = None,
    ) -> None:
        """``values``: of another server, which has the same buckets."""
        self.values = values or Values()
        self._intercept = intercept
        self._after = after
        self._tls: ssl.SSLContext | None = None
        if tls is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(tls / "cert.pem", tls / "key.pem")
        super().__init__(port)
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.address[1]}"
        """Where clients find it."""

    def wrap(self, connection: socket.socket) -> socket.socket:
        if self._tls is None:
            return connection
        return self._tls.wrap_socket(connection, server_side=True)

    def serve(self, connection: socket.socket) -> None:
        reader = Reader(connection)
        while (request := reader.read_head()) is not None:
            if not self.serve_one(connection, reader, request):
                return

    def serve_one(self, connection: socket.socket, reader: "Reader", request: Request) -> bool:
        """Whether the connection goes on after this request, after its head was read."""
        request = reader.read_body(request, self.values.buffer(request.nbytes))
        answer = self._intercept(request)
        if answer is None:
            done = self.values.answer(request)
            answer = self._after(request, done)
            answer = done if answer is None else answer
        if isinstance(answer, bytes):
            connection.sendall(answer)
            return False
        try:
            _send(connection, request, answer)
        finally:
            answer.done()
        return True


class Reader:
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
        return Request(method, target, headers, head)

    def read_body(self, request: Request, body: memoryview) -> Request:
        """The request with ``body``, which is filled from the socket; only what came with the head
        is copied."""
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
        return replace(request, body=body)


def head_of(answer: Answer) -> bytes:
    nbytes = sum(len(part) for part in answer.body)
    lines = [f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in answer.headers.items()]
    if answer.status != 204:
        lines.append(f"Content-Length: {answer.headers.get('Content-Length', nbytes)}")
    return ("\r\n".join(dict.fromkeys(lines)) + "\r\n\r\n").encode("latin-1")


def _send(connection: socket.socket, request: Request, answer: Answer) -> None:
    body = () if request.method == "HEAD" else answer.body
    is_plain = not isinstance(connection, ssl.SSLSocket)
    connection.sendall(head_of(answer), *([_MORE] if is_plain and any(map(len, body)) else []))
    for part in body:
        connection.sendall(part)


@dataclass(frozen=True, slots=True)
class QuickS3Process:
    url: str
    pid: int


@contextmanager
def quick_s3_process(*, tls: Path | None = None) -> Iterator[QuickS3Process]:
    """A server in a process of its own, killed at the end. ``tls``: see ``QuickS3``."""
    process, url = start_server("quick_s3", *(() if tls is None else ("--tls", str(tls))))
    with process:
        try:
            yield QuickS3Process(url, process.pid)
        finally:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tls", type=Path)
    given = parser.parse_args()
    with QuickS3(given.port, tls=given.tls) as server:
        print(server.url, flush=True)
        while True:
            time.sleep(3600)


if __name__ == "__main__":
    threading.current_thread().name = "quick-s3"
    main()
