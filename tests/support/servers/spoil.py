"""Proxies that spoil a server's answers: of S3 and of Redis, whole requests and answers at a time.

``with SpoilS3(("127.0.0.1", 7480)) as s3: s3.spoil(Spoil("flip", frozenset({"GET"})))``. They count
requests by verb. A client's ``Host`` is passed on as it is, so that signatures hold.
"""

import re
import socket
import struct
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

from tests.support.servers.listener import Listener

FAULTS = frozenset(
    ("reset", "unanswered", "stall", "lag", "truncate", "flip", "another", "error", "hook")
)
SMALL_BYTES = 1024
HEAD_BYTES_MAX = 64 << 10
KEPT_BYTES_MAX = 64 << 20
_KEPT = 64
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Spoil:
    fault: str
    """One of ``FAULTS``.

    ``reset``: the connection is reset, halfway through the answer if that has a body;
    ``unanswered``: the server does what is asked, and the connection is reset instead of the
    answer; ``stall``: nothing comes any more, halfway through a body; ``lag``: the answer comes
    ``lag_s`` later; ``truncate``: of an answer's body comes half, and as far as HTTP goes that is
    all there is, while Redis closes the connection; of a body that is put, half goes on before both
    connections end; ``flip``: one bit of the body, of the answer or of what is put, is another;
    ``another``: the bytes of another value of this server, as long as the right ones if there are
    such; ``error``: the answer is ``error`` and the server is not asked; ``hook``: nothing, but
    that ``hook`` is called first.
    """
    verbs: frozenset[str] = frozenset()
    """``GET``, ``LIST``, ``EVALSHA``; empty: all."""
    containing: bytes = b""
    """A part of the request's head, its target or its key for instance."""
    when: Callable[[bytes], bool] = lambda _: True
    """Told the request's head: its first line and headers, or a command's first words."""
    lag_s: float = 0.05
    error: str = ""
    """``503 SlowDown`` where HTTP is spoken, ``LOADING wait`` of Redis."""
    hook: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        assert self.fault in FAULTS
        assert (self.fault == "error") == bool(self.error)


class Spoiler(Listener):
    """A proxy to ``target``. Subclasses carry one request and its answer."""

    def __init__(self, target: tuple[str, int], *, port: int = 0) -> None:
        self.target = target
        """May be replaced at any time: of connections that are made from then on."""
        self.asked: Counter[str] = Counter()
        """Requests so far, by verb, spoiled ones included."""
        self.spoiled: Counter[str] = Counter()
        """Of those, how many met each fault."""
        self.overlooked = b""
        """A part of the head of requests that are neither counted nor spoiled; empty: there are
        none. For what clients ask by the clock, whatever else they do."""
        self._rules: list[Spoil] = []
        self._rules_lock = threading.Lock()
        self._ended = threading.Event()
        self._mended = threading.Event()
        super().__init__(port)

    def spoil(self, *rules: Spoil) -> None:
        """From now on these faults, and no others: the first rule that a request matches."""
        self.mend()
        with self._rules_lock:
            self._mended = threading.Event()
            self._rules = list(rules)

    def mend(self) -> None:
        """No faults from now on. Who was stalled is hung up on."""
        with self._rules_lock:
            self._rules = []
            self._mended.set()

    def close(self) -> None:
        self._ended.set()
        self.mend()
        super().close()

    def serve(self, connection: socket.socket) -> None:
        upstream = Upstream(self.target)
        with connection.makefile("rb") as client:
            try:
                while self._serve_one((connection, client), upstream):
                    pass
            except OSError:  # the server is gone: so are we
                reset(connection)
            finally:
                upstream.close()

    def _serve_one(self, ends: tuple[socket.socket, BinaryIO], upstream: "Upstream") -> bool:
        raise NotImplementedError

    def _rule_for(self, verb: str, head: bytes) -> Spoil | None:
        if self.overlooked and self.overlooked in head:
            return None
        with self._rules_lock:
            self.asked[verb] += 1
            for rule in self._rules:
                if rule.verbs and verb not in rule.verbs:
                    continue
                if rule.containing in head and rule.when(head):
                    self.spoiled[rule.fault] += 1
                    return rule
        return None

    def _stall(self, client: socket.socket) -> None:
        """Until the rules change or the client has gone."""
        mended = self._mended
        while not (mended.wait(_POLL_S) or self._ended.is_set()) and is_open(client):
            pass

    def _lag(self, seconds: float) -> None:
        self._ended.wait(seconds)


class Upstream:
    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self.socket: socket.socket | None = None
        self._file: BinaryIO | None = None

    def send(self, parts: Iterable[bytes | memoryview]) -> BinaryIO:
        """Send them, and where the answer comes from. Raises ``OSError``."""
        if self.socket is None:
            self.socket = socket.create_connection(self._target)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._file = self.socket.makefile("rb")
        for part in parts:
            self.socket.sendall(part)
        assert self._file is not None
        return self._file

    def close(self) -> None:
        if self.socket is not None:
            with suppress(OSError):
                self.socket.close()
            if self._file is not None:
                self._file.close()
            self.socket = self._file = None


def reset(client: socket.socket) -> None:
    """Make the close that follows a reset instead of an orderly end."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def flipped(body: bytes) -> bytes:
    """The same but for one bit. Payloads begin with a header of some 4 KiB, and what follows it is
    what the model reads: that of a large body is in its last quarter. A small one is no payload."""
    at, bit = (len(body) - 1 - len(body) // 8, 4) if len(body) >= SMALL_BYTES else (0, 0x80)
    return body[:at] + bytes((body[at] ^ bit,)) + body[at + 1 :]


def is_open(client: socket.socket) -> bool:
    try:
        return client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == 1  # ESTABLISHED
    except (OSError, AttributeError):
        return False


def wait_for(reached: Callable[[], bool], *, bound_s: float = 30.0) -> bool:
    end = time.monotonic() + bound_s
    while not reached():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_S / 4)
    return True


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
        return self.target.partition("?")[0].strip("/").count("/") == 0


class SpoilS3(Spoiler):
    """A proxy of S3. Verbs are HTTP's, and ``LIST``. Of what is put through it, the newest few
    values are kept, to be somebody else's answer."""

    def __init__(self, target: tuple[str, int], *, port: int = 0) -> None:
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        super().__init__(target, port=port)
        self.url = f"http://127.0.0.1:{self.address[1]}"

    def _serve_one(self, ends: tuple[socket.socket, BinaryIO], upstream: Upstream) -> bool:
        connection, client = ends
        request = _read_request(client)
        if request is None:
            return False
        rule = self._rule_for(request.verb, request.head)
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


class SpoilRedis(Spoiler):
    """A proxy of RESP 2, one command and its answer at a time: what a client sends in one go is
    answered in order. Verbs are commands, in capitals. It knows no ``unanswered``, ``stall`` nor
    ``hook``, and no subscriptions."""

    def __init__(self, target: tuple[str, int], *, port: int = 0) -> None:
        self._kept: OrderedDict[tuple[str, bytes], bytes] = OrderedDict()
        super().__init__(target, port=port)
        self.url = f"redis://127.0.0.1:{self.address[1]}/0"

    def _serve_one(self, ends: tuple[socket.socket, BinaryIO], upstream: Upstream) -> bool:
        connection, client = ends
        command = _read_command(client)
        if command is None:
            return False
        raw, words = command
        verb = words[0].decode("latin-1").upper()
        rule = self._rule_for(verb, b" ".join(words[1:4]))
        fault = rule.fault if rule is not None else ""
        if rule is not None and fault == "error":
            connection.sendall(f"-{rule.error}\r\n".encode())
            return True
        if fault == "reset":
            reset(connection)
            return False
        answer = _read_resp(upstream.send((raw,)))
        if rule is not None and fault == "lag":
            self._lag(rule.lag_s)
        if fault == "truncate":
            connection.sendall(answer[: len(answer) // 2])
            return False
        if fault == "another":
            answer = self._of_another(verb, words, answer)
        elif fault == "flip":
            answer = _flipped_resp(answer)
        else:
            self._keep(verb, words, answer)
        connection.sendall(answer)
        return True

    def _keep(self, verb: str, words: list[bytes], answer: bytes) -> None:
        if len(words) < 2 or answer[:1] not in b"$*" or len(answer) < 16:
            return
        with self._rules_lock:
            self._kept[verb, words[1]] = answer
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)

    def _of_another(self, verb: str, words: list[bytes], answer: bytes) -> bytes:
        """What the same command was answered for another key, or as it is if none was asked for."""
        if len(words) < 2:
            return answer
        with self._rules_lock:
            for (other, key), kept in reversed(self._kept.items()):
                if other == verb and key != words[1] and len(kept) == len(answer):
                    return kept
        return answer


def _read_command(client: BinaryIO) -> tuple[bytes, list[bytes]] | None:
    """The bytes of the next command, and its words; None at the end."""
    line = client.readline(HEAD_BYTES_MAX)
    if not line:
        return None
    raw, words = [line], []
    for _ in range(int(line[1:])):
        size = client.readline(HEAD_BYTES_MAX)
        word = client.read(int(size[1:]) + 2)
        raw += size, word
        words.append(word[:-2])
    return b"".join(raw), words


def _read_resp(server: BinaryIO) -> bytes:
    line = server.readline(HEAD_BYTES_MAX)
    if not line:
        raise ConnectionError("the server closed the connection")
    kind = line[:1]
    if kind == b"$" and (nbytes := int(line[1:])) >= 0:
        return line + server.read(nbytes + 2)
    if kind == b"*" and (count := int(line[1:])) > 0:
        return line + b"".join(_read_resp(server) for _ in range(count))
    return line


def _flipped_resp(answer: bytes) -> bytes:
    """One bit of the last value in the answer; what has no value stays as it is."""
    if answer[:1] not in b"$*" or len(answer) < 8:
        return answer
    at = answer.rfind(b"\r\n", 0, -2)
    head, value = answer[: at + 2], answer[at + 2 : -2]
    if answer[:1] == b"$":
        end = answer.index(b"\r\n") + 2
        head, value = answer[:end], answer[end:-2]
    return head + flipped(value) + b"\r\n" if value else answer
