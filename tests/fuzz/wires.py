"""Targets: answers of servers, cut into pieces anywhere."""

import select
from collections.abc import Sequence
from itertools import accumulate, pairwise
from random import Random
from typing import Any

from redis import exceptions

from objkv.index.fields import encode_shard
from objkv.index.redis.find import _Question, _RefusedError
from objkv.net.redis_errors import CLIENT_ERRORS
from objkv.net.resp import RespConnection
from objkv.stores.redis import _received
from objkv.stores.s3.http import ConnectionFailed, HttpResponse
from tests.contracts.index_contract import shard
from tests.fuzz.mutation import NUMBERS, cut, spoiled
from tests.fuzz.target import Finding, Target, outcome, require

_VALUE = encode_shard(shard())
FIELDS = ("0.L0-2_H0-4", "1.L0-2_H0-4")
_ROUNDS_MAX = 10_000


class Wire:
    """In place of a ``RespConnection``: takes what is sent, and hands out prepared pieces."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.tls = self.clean = False
        self.sent = bytearray()
        self._pieces = pieces
        self._rounds = 0

    def answer(self, more: bytes, cuts: Sequence[int]) -> None:
        """Hand out all that is left, and ``more``, in pieces of these lengths and a last one."""
        rest = b"".join(self._pieces) + more
        edges = [*accumulate(cuts, initial=0), len(rest)]
        self._pieces[:] = [piece for a, b in pairwise(edges) if (piece := rest[a : max(a, b)])]

    def offer(self, data: memoryview) -> int:
        self.sent += data
        return len(data)

    def wait_to_receive(self) -> bool:
        return True

    def receive(self, nbytes: int = 65536) -> bytes:
        """The next piece; then the connection is lost."""
        self._rounds += 1
        if self._rounds > _ROUNDS_MAX:
            raise Finding("reads for ever")
        if not self._pieces:
            raise exceptions.ConnectionError("lost")
        return self._pieces.pop(0)

    def recv_into(self, buffer: memoryview) -> int:
        if not self._pieces:
            return 0
        piece = self._pieces.pop(0)
        taken = min(len(piece), len(buffer))
        buffer[:taken] = piece[:taken]
        if taken < len(piece):
            self._pieces.insert(0, piece[taken:])
        return taken

    def recv(self, nbytes: int) -> bytes:
        buffer = bytearray(nbytes)
        return bytes(buffer[: self.recv_into(memoryview(buffer))])


ANSWERS = [
    b"$%d\r\n%b\r\n" % (len(_VALUE), _VALUE),
    b"$-1\r\n",
    b"-WRONGTYPE Operation against a key\r\n",
    b"-ERR no\r\n",
    b"*2\r\n",
    b"*-1\r\n",
    b"$3\r\nabc\r\n",
    b"$0\r\n\r\n",
    b"$x\r\n",
    b"$99999999999999999999\r\n",
    b"$" + b"9" * 5000 + b"\r\n",
    b"$-2\r\n",
    b":1\r\n",
    b"+OK\r\n",
    b"_\r\n",
    b"%1\r\n",
]


def _some_find(random: Random) -> tuple[int, tuple[str, ...], list[bytes], bool]:
    """(hashes, fields, answers, whether the right end follows)."""
    fields = random.choice([FIELDS[:1], FIELDS])
    count = random.randint(1, 5)
    row = b"*%d\r\n" % len(fields) if len(fields) > 1 else b""
    kinds = ANSWERS[:2] * 8 + ANSWERS
    text = b"".join(row + b"".join(random.choices(kinds, k=len(fields))) for _ in range(count))
    if random.random() < 0.7:
        text = spoiled(random, [text])
    if not random.randrange(20):
        text += b"*1\r\n" * 20_000
    return count, fields, cut(random, text), random.random() < 0.9


@outcome((*CLIENT_ERRORS, _RefusedError))
def check_find(example: tuple[int, tuple[str, ...], list[bytes], bool]) -> str:
    """Whole answers to all questions, or an error that the client knows what to do about."""
    count, fields, pieces, ends = example
    pieces = list(pieces)
    wire = Wire(pieces)
    question = _Question(wire, "p:", [bytes([n]) * 20 for n in range(count)], fields)  # type: ignore[arg-type]
    question.push()
    if ends:  # by what the last command, a PING, is answered
        pieces.append(bytes(wire.sent[-len(b"$16\r\n0123456789abcdef\r\n") :]))
    found = question.answers()
    require(wire.clean, "a connection of nobody knows what state")
    require(len(found) == count, "another number of answers")
    for shards in found:
        if shards is not None:
            require(dict(shards), "no shards where some are promised")
            require(set(shards) <= set(fields), "fields that nobody asked for")
    return "read"


class _NoSocketLine(RespConnection):
    """A line on a wire that is no socket."""

    def __init__(self, wire: Wire) -> None:
        self.clean = True
        self.tls = False
        self.sock = wire  # type: ignore[assignment]
        self._rest = b""
        self._timeout_s = None
        self._poll = select.poll()


def _some_value(random: Random) -> tuple[int, list[bytes]]:
    value = random.randbytes(random.randrange(200))
    answer = spoiled(random, [b"$%d\r\n%b\r\n" % (len(value), value)], near=6)
    if not random.randrange(4):
        answer = random.choice([*(b"$%d\r\n" % n for n in (*NUMBERS, -1, -2)), *ANSWERS])
    return random.randrange(256), cut(random, answer)


@outcome(CLIENT_ERRORS)
def _value(example: tuple[int, list[bytes]]) -> str:
    """Nothing is written beyond the buffer, and no more is received than the value."""
    room, pieces = example
    answer = b"".join(pieces)
    line = _NoSocketLine(Wire(list(pieces)))
    buffer = memoryview(bytearray(room) + b"\xa5" * 64)
    head = line.read_line(len(b"$%d\r\n" % room))
    nbytes = _received(line, head, buffer[:room])
    require(buffer[room:] == b"\xa5" * 64, "written beyond the buffer")
    if nbytes > room:
        return "too long"
    require(answer.startswith(head + b"\r\n" + bytes(buffer[:nbytes]) + b"\r\n"), "other bytes")
    return "read"


_HEADS = [
    b'HTTP/1.1 200 OK\r\nContent-Length: 5\r\nETag: "ab"\r\n\r\nhello',
    b"HTTP/1.1 206 Partial Content\r\ncontent-length:3\r\ncontent-range: bytes 2-4/9\r\n\r\nabc",
    b"HTTP/1.0 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
    b"HTTP/1.1 206 x\r\nContent-Length: 1\r\nContent-Range: bytes 0-0/" + b"9" * 5000 + b"\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1\r\n\r\n",
    b"\r\n\r\n",
]


@outcome((ValueError, ConnectionFailed, ConnectionError))
def _answer(raw: bytes) -> str:
    """A head is understood or refused; no more is read than it announces, and where more has come
    the connection is not used again."""
    if b"\r\n\r\n" not in raw:
        return "refused"
    line: Any = _S3Line()
    answer = HttpResponse(line, raw)
    body = raw.partition(b"\r\n\r\n")[2]
    announced = len(body) if "transfer-encoding" in answer.headers else answer.left
    require(announced >= len(body) or answer.status >= 300, "more than was announced")
    require(isinstance(answer.etag, str), "no tag")
    answer.starts_at(0)
    if answer.status in (200, 206):
        require(isinstance(answer.total, int), "no length")
    into = memoryview(bytearray(min(answer.left, 64)) + b"\xa5" * 16)
    room = len(into) - 16
    try:
        with answer:
            answer.fill(into[:room])
    finally:
        require(into[room:] == b"\xa5" * 16, "written beyond the buffer")
        require(not line.is_clean or announced >= len(body), "kept with bytes that nobody read")
    return "read"


class _S3Line:
    """The connection is lost after what came with the head."""

    is_clean = False

    def release(self, *, is_clean: bool = False) -> None:
        """As a connection does."""
        self.is_clean = is_clean

    def receive_into(self, into: memoryview) -> int:
        return 0

    def receive(self) -> bytes:
        raise ConnectionError


TARGETS = (
    Target("Redis: shards of many chunks", _some_find, check_find),
    Target("Redis: a value", _some_value, _value),
    Target("S3: the head of an answer", lambda random: spoiled(random, _HEADS), _answer),
)
