"""Servers that spoil what they serve: an S3 of their own, and a proxy of Redis.

``with SpoilS3() as s3: s3.spoil(Spoil("flip", frozenset({"GET"})))``. They count requests by verb.
"""

import socket
import struct
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from tests.support.servers.listener import Listener
from tests.support.servers.quick_s3 import QuickS3, Reader, Request, failure, head_of

FAULTS = frozenset(
    ("reset", "unanswered", "stall", "lag", "truncate", "flip", "another", "error", "hook")
)
SMALL_BYTES = 1024
HEAD_BYTES_MAX = 64 << 10
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
    all there is, while Redis closes the connection; a body that is put is lost, with the
    connection; ``flip``: one bit of the body, of the answer or of what is put, is another;
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
    """A server with rules by which it spoils what it serves."""

    def __init__(self, **how: Any) -> None:
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
        super().__init__(**how)

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

    def _end(self, fault: str, client: socket.socket) -> bool:
        """End a connection that was reset, or is once it has stalled long enough."""
        if fault == "stall":
            self._stall(client)
        reset(client)
        return False


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


class SpoilS3(Spoiler, QuickS3):
    """A quick S3 server. Verbs are HTTP's, and ``LIST``."""

    def serve_one(self, connection: socket.socket, reader: Reader, request: Request) -> bool:
        verb = _verb(request)
        rule = self._rule_for(verb, request.head)
        fault = rule.fault if rule is not None else ""
        if rule is not None and fault == "hook":
            rule.hook()
        if fault in ("reset", "stall") and verb != "GET":
            return self._end(fault, connection)
        request = reader.read_body(request, self.values.buffer(request.nbytes))
        if rule is not None and fault == "error":
            connection.sendall(_refusal(rule.error))
            return False
        if request.method == "PUT" and fault == "truncate":
            return self._end("reset", connection)
        if request.method == "PUT" and fault == "flip":
            request.body[:] = flipped(bytes(request.body))
        answer = self.values.answer(request)
        head, value = head_of(answer), b"".join(answer.body)
        answer.done()
        if rule is not None and fault == "lag":
            self._ended.wait(rule.lag_s)
        if fault == "unanswered":
            return self._end("reset", connection)
        if verb == "GET" and answer.status in (200, 206):
            if fault in ("reset", "stall"):
                connection.sendall(head + value[: len(value) // 2])
                return self._end(fault, connection)
            if fault == "truncate":
                value = value[: len(value) // 2]
                head = head_of(replace(answer, body=(memoryview(value),)))
            elif fault == "flip":
                value = flipped(value)
            elif fault == "another":
                value = self._of_another(request, value)
        elif fault in ("reset", "stall"):
            return self._end(fault, connection)
        connection.sendall(head if request.method == "HEAD" else head + value)
        return True

    def _of_another(self, request: Request, value: bytes) -> bytes:
        """As many bytes of another value's at the same place."""
        start = int(request.headers.get("range", "=0-").partition("=")[2].partition("-")[0])
        for key, body in self.values.newest():
            found = bytes(body[start : start + len(value)])
            is_payload = key.endswith(".safetensors") and key != request.key
            if is_payload and len(found) == len(value) and found != value:
                return found
        raise AssertionError(f"nothing as long as {request.target} was put into this server")


def _verb(request: Request) -> str:
    """The method; ``LIST`` for what asks for a listing."""
    is_list = "list-type=" in request.target or "/" not in request.key.strip("/")
    return "LIST" if request.method == "GET" and is_list else request.method


def _refusal(error: str) -> bytes:
    """``error`` is a status and S3's code, as in ``503 SlowDown``."""
    status, _, code = error.partition(" ")
    answer = failure(int(status), code)
    closes = replace(answer, headers=answer.headers | {"Connection": "close"})
    return head_of(closes) + b"".join(answer.body)


class SpoilRedis(Spoiler):
    """A proxy of RESP 2, one command and its answer at a time: what a client sends in one go is
    answered in order. Verbs are commands, in capitals. It knows no ``unanswered``, ``stall`` nor
    ``hook``, and no subscriptions."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        """May be replaced at any time: of connections that are made from then on."""
        self._kept: OrderedDict[tuple[str, bytes], bytes] = OrderedDict()
        super().__init__()
        self.url = f"redis://127.0.0.1:{self.address[1]}/0"

    def serve(self, connection: socket.socket) -> None:
        try:
            with (
                socket.create_connection(self.target) as server,
                connection.makefile("rb") as client,
                server.makefile("rb") as answers,
            ):
                server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while self._serve_one(connection, client, server, answers):
                    pass
        except OSError:  # the server is gone: so are we
            reset(connection)

    def _serve_one(
        self, connection: socket.socket, client: BinaryIO, server: socket.socket, answers: BinaryIO
    ) -> bool:
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
            return self._end(fault, connection)
        server.sendall(raw)
        answer = _read_resp(answers)
        if rule is not None and fault == "lag":
            self._ended.wait(rule.lag_s)
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
