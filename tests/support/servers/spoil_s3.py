"""A proxy in front of a real S3 server that spoils the answers it is told to.

``with SpoilS3(("127.0.0.1", 7480)) as s3: s3.spoil(Spoil("flip", frozenset({"GET"})))``. The
client's ``Host`` is passed on as it is, so that signatures hold. Of what is put through it, the
newest few values are kept, to be somebody else's answer.
"""

import re
import socket
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

from tests.support.servers.spoil import Spoil, Spoiler, Upstream, flipped, reset

HEAD_BYTES_MAX = 64 << 10
KEPT_BYTES_MAX = 64 << 20
_LENGTH = re.compile(rb"(\r\ncontent-length: *)\d+", re.IGNORECASE)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass(frozen=True, slots=True)
class _Request:
    head: bytes
    method: str
    target: str
    headers: dict[str, str]

    @property
    def verb(self) -> str:
        """The method; ``LIST`` for what asks for a listing."""
        is_list = self.method == "GET" and ("list-type=" in self.target or self.is_bucket)
        return "LIST" if is_list else self.method

    @property
    def is_bucket(self) -> bool:
        """Whether no key is named."""
        return self.target.partition("?")[0].strip("/").count("/") == 0


class SpoilS3(Spoiler):
    """The proxy; ``url`` is for clients. Verbs are HTTP's, and ``LIST``."""

    def __init__(self, target: tuple[str, int], *, port: int = 0) -> None:
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        super().__init__(target, port=port)
        self.url = f"http://127.0.0.1:{self.address[1]}"

    def serve(self, connection: socket.socket) -> None:
        """Requests of one connection, one after the other."""
        upstream = Upstream(self.target)
        with connection.makefile("rb") as client:
            try:
                while (request := _read_request(client)) is not None:
                    rule = self._rule_for(request.verb, request.head)
                    if not self._serve(request, rule, (connection, client), upstream):
                        return
            except OSError:  # the server is gone: so are we
                reset(connection)
            finally:
                upstream.close()

    def _serve(
        self,
        request: _Request,
        rule: Spoil | None,
        ends: tuple[socket.socket, BinaryIO],
        upstream: Upstream,
    ) -> bool:
        """Whether the connection goes on."""
        connection, client = ends
        fault = rule.fault if rule is not None else ""
        if rule is not None and fault == "hook":
            rule.hook()
        if fault in ("reset", "stall") and request.verb != "GET":
            return self._end(fault, connection)
        if request.headers.get("expect", "").lower() == "100-continue":
            connection.sendall(_CONTINUE)
        body = _exactly(client, int(request.headers.get("content-length", 0)))
        if rule is not None and fault == "error":
            connection.sendall(_refusal(rule.error))
            return False
        if request.method == "PUT" and fault == "flip":
            body = flipped(body)
        if request.method == "PUT" and "?" not in request.target:
            self._keep(request.target, body)
        # The server is not asked to go on: what it would say has been said.
        head = b"\r\n".join(
            line for line in request.head.split(b"\r\n") if not line.lower().startswith(b"expect:")
        )
        if request.method == "PUT" and fault == "truncate":
            upstream.send((head, body[: len(body) // 2]))
            return self._end("reset", connection)
        answer = upstream.send((head, body))
        if rule is not None and fault == "lag":
            self._lag(rule.lag_s)
        head, value, ends_here = _read_answer(answer, request.method)
        if fault == "unanswered":
            return self._end("reset", connection)
        if request.verb == "GET" and head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 206")):
            if fault in ("reset", "stall"):
                connection.sendall(head + value[: len(value) // 2])
                return self._end(fault, connection)
            if fault == "truncate":
                value = value[: len(value) // 2]
                head = _LENGTH.sub(b"\\g<1>%d" % len(value), head)
            elif fault == "flip":
                value = flipped(value)
            elif fault == "another":
                value = self._of_another(request, value)
        elif fault in ("reset", "stall"):
            return self._end(fault, connection)
        connection.sendall(head + value)
        return not ends_here

    def _end(self, fault: str, connection: socket.socket) -> bool:
        if fault == "stall":
            self._stall(connection)
        reset(connection)
        return False

    def _keep(self, target: str, body: bytes) -> None:
        with self._rules_lock:
            self._kept[target] = body
            self._kept.move_to_end(target)
            while sum(map(len, self._kept.values())) > KEPT_BYTES_MAX:
                self._kept.popitem(last=False)

    def _of_another(self, request: _Request, value: bytes) -> bytes:
        """As many bytes of another value's at the same place."""
        start = 0
        if wanted := request.headers.get("range"):
            start = int(wanted.partition("=")[2].partition("-")[0])
        with self._rules_lock:
            for target, body in reversed(self._kept.items()):
                found = body[start : start + len(value)]
                is_payload = target.endswith(".safetensors") and target != request.target
                if is_payload and len(found) == len(value) and found != value:
                    return found
        raise AssertionError(f"nothing as long as {request.target} was put through this proxy")


def _read_request(client: BinaryIO) -> _Request | None:
    head = _read_head(client)
    if not head:
        return None
    first, headers = _parsed(head)
    method, target, _ = first.split(" ")
    return _Request(head, method, target, headers)


def _read_answer(server: BinaryIO, method: str) -> tuple[bytes, bytes, bool]:
    """Head, body, and whether the connection ends with it."""
    while True:
        head = _read_head(server)
        if not head:
            raise ConnectionError("the server closed the connection")
        first, headers = _parsed(head)
        status = int(first.split(" ")[1])
        if status >= 200:
            break
    ends_here = headers.get("connection", "").lower() == "close"
    if method == "HEAD" or status in (204, 304):
        return head, b"", ends_here
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return head, _chunks(server), ends_here
    if "content-length" in headers:
        return head, _exactly(server, int(headers["content-length"])), ends_here
    return head, server.read(), True


def _read_head(file: BinaryIO) -> bytes:
    """Up to the empty line, with it; empty where nothing comes any more."""
    head = b""
    with suppress(ConnectionError):
        while not head.endswith(b"\r\n\r\n"):
            line = file.readline(HEAD_BYTES_MAX)
            if not line or len(head) > HEAD_BYTES_MAX:
                return b""
            head += line
    return head


def _parsed(head: bytes) -> tuple[str, dict[str, str]]:
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return first, {name.strip().lower(): value.strip() for name, _, value in pairs}


def _exactly(file: BinaryIO, nbytes: int) -> bytes:
    got = file.read(nbytes) if nbytes else b""
    if len(got) != nbytes:
        raise ConnectionError("the other end is gone")
    return got


def _chunks(server: BinaryIO) -> bytes:
    """A body in chunks, as it came."""
    out = b""
    while True:
        line = server.readline(HEAD_BYTES_MAX)
        size = int(line.split(b";")[0], 16)
        out += line + _exactly(server, size + 2)
        if not size:
            return out


def _refusal(error: str) -> bytes:
    """``error`` is a status and S3's code, as in ``503 SlowDown``."""
    status, _, code = error.partition(" ")
    body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
    head = f"HTTP/1.1 {status} {code}\r\nContent-Type: application/xml\r\nConnection: close\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
