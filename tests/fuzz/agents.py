"""Targets: the messages between a node agent and its clients, and a server that receives them."""

import atexit
import functools
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from objkv.agent import messages as m
from objkv.agent.client import AgentConnection
from objkv.agent.memory.answers import AnswerBoard, LookupScope
from objkv.agent.memory.arena import CellState
from objkv.agent.messages import MissReason, Urgency
from objkv.agent.outbox import Outbox
from objkv.codec.join import PartPosition
from objkv.codec.payload import Claim, LayerSpec, Provenance, encode
from objkv.errors import StoreUnavailable, TransferError
from objkv.index.base import ShardRecords
from objkv.index.fields import WrittenShards, written_rows
from objkv.keys.chunk import ChunkKey
from objkv.keys.prefix import PREFIX_HASH_BYTES
from tests.agent.consistency import is_consistent, threads_of
from tests.agent.world import RIGHT, Node, ended, pages_at
from tests.contracts.index_contract import shard
from tests.crash.clients import verified
from tests.fuzz.mutation import spoiled
from tests.fuzz.target import Target, outcome, require
from tests.support.samples import NAMESPACE
from tests.support.steps import complete

_PATIENCE_S = 60.0
_LOOK_EVERY = 50
"""Conversations after which the agent's leases, threads and descriptors are counted."""


def _wanted() -> list[Any]:
    node = Node()
    try:
        return [one.claim for one in node.save()]
    finally:
        node.close()


WANTED = _wanted()
HASHES = [one.key.prefix_hash for one in WANTED]
FIELDS = (WANTED[0].key.field, "1.L0-2_H0-2")


_JOINED = ChunkKey(NAMESPACE, bytes(20), 0)


def _part(column: int) -> bytes:
    """What one of two ranks has of a payload."""
    layers = [LayerSpec(f"l.{n}@H{column}-{column + 1}", "U8", (1, 1, 8, 64)) for n in range(2)]
    pages = [bytes([column]) * layer.nbytes for layer in layers]
    claim, provenance = Claim(_JOINED, bytes(20), 0, 16), Provenance("0" * 64, "fuzz", 1)
    return bytes(encode(claim, layers, pages, codec="none", provenance=provenance))


PARTS = [_part(column) for column in range(2)]
_BYTES = len(PARTS[0])


def _handed_over(column: int) -> bytes:
    place = PartPosition(parts=2, frames=4, first=column, step=2, skipped=0, nbytes=2048)
    return m.pack_commits([m.Commit(column * _BYTES, _BYTES, part=m.SavedPart(3, place))])


CALLS = (
    f'{{"verb": "lookup", "namespace": "{NAMESPACE}", "hashes": ["{"00" * 20}"]}}',
    f'{{"verb": "touch", "namespace": "{NAMESPACE}", "hashes": ["{"00" * 20}"], "ttl_s": 9}}',
    f'{{"verb": "credit", "savings": {{"namespace": "{NAMESPACE}", "month": "2026-11"}}}}',
    f'{{"verb": "get", "path": "{NAMESPACE}/identity.json"}}',
    '{"verb": "put", "path": "switch.json", "document": "e30=", "replace": true}',
    f'{{"verb": "forget", "namespace": "{NAMESPACE}", "hashes": ["{"00" * 20}"], "field": "x"}}',
)
REQUESTS = [
    m.pack_open_request(m.OpenRequest(Urgency.IN_STEP, 1000, m.Claims.of(WANTED))),
    m.pack_open_request(m.OpenRequest(Urgency.PREFETCH, 1, m.Claims.of(WANTED[:1]))),
    m.pack_open_request(
        m.OpenRequest(Urgency.IN_STEP, 0, m.Claims.of(WANTED[1:2])), m.MessageKind.REJECT
    ),
    m.pack_release([1, 2]),
    m.pack_release([1]),
    m.pack_find(NAMESPACE, HASHES, FIELDS[:1]),
    m.pack_find(NAMESPACE, HASHES, FIELDS),
    m.pack_commits([m.Commit(0, _BYTES, puts=True)]),
    *map(_handed_over, range(2)),
    m.pack_drop(m.Drop(3, 2, _JOINED.path())),
    *(m.pack_text(m.MessageKind.CALL, text) for text in CALLS),
]
HELLO = m.pack_hello(
    m.Hello(m.VERSION, wants_arena=False, has_outbox=True, replica=bytes(range(16)))
)
_SHARDS: list[Any] = [{FIELDS[0]: shard()}, None, {FIELDS[0]: shard(), FIELDS[1]: shard()}]


def _answer(shards: Sequence[ShardRecords | None], fields: tuple[str, ...]) -> bytes:
    return m.pack_found([b"\n".join(written_rows(shards, fields))])


ANSWERS = [
    m.pack_opened([m.OpenAnswer(CellState.READY, MissReason.NONE, 3, 1, 0, 4096, 512)] * 2),
    m.pack_opened([m.OpenAnswer(CellState.FAILED, MissReason.LATE)] * 2),
    _answer(_SHARDS[:2], FIELDS[:1]),
    _answer(_SHARDS[1:], FIELDS),
    m.pack_committed([m.CommitStatus.ACCEPTED, m.CommitStatus.DROPPED]),
    m.pack_text(m.MessageKind.RESULT, "[]"),
    m.pack_text(m.MessageKind.REFUSED, "no"),
    HELLO,
]


def _again(message: bytes) -> None:
    """What is read can be written, and is read again as the same."""
    kind = m.kind_of(message)
    if kind in (m.MessageKind.OPEN, m.MessageKind.REJECT):
        opening = m.unpack_open_request(message)
        require(m.pack_open_request(opening, kind) == message, "another opening")
        for row in opening.wanted:
            require(opening.wanted.claim(row).key.field in opening.wanted.fields, "another field")
    elif kind is m.MessageKind.RELEASE:
        leases = m.unpack_release(message)
        if len(leases) <= m.RELEASE_MAX:
            require(m.pack_release(leases) == message, "other leases")
    elif kind is m.MessageKind.FIND:
        question = namespace, hashes, fields = m.unpack_find(message)
        step = PREFIX_HASH_BYTES
        parts = [hashes[at : at + step] for at in range(0, len(hashes), step)]
        again = m.unpack_find(m.pack_find(namespace, parts, fields))
        require(again == question, "another question")
    elif kind is m.MessageKind.COMMIT:
        require(m.pack_commits(m.unpack_commits(message)) == message, "another commit")
    elif kind is m.MessageKind.DROP:
        require(m.pack_drop(m.unpack_drop(message)) == message, "another drop")
    elif kind is m.MessageKind.HELLO:
        hello = m.unpack_hello(message)
        require(m.unpack_hello(m.pack_hello(hello)) == hello, "another greeting")
    elif kind is m.MessageKind.COMMITTED:
        statuses = m.unpack_committed(message, 2)
        require(m.pack_committed(statuses) == message, "another status")
    elif kind is m.MessageKind.OPENED:
        opened = m.unpack_opened(message, 2)
        require(m.pack_opened(opened) == message, "other answers")
    elif kind is m.MessageKind.FOUND:
        _found(message)
    else:
        require(isinstance(m.unpack_text(message), str), "no text")


def _read(message: bytes, fields: tuple[str, ...]) -> tuple[ShardRecords | None, ...]:
    (text,) = m.unpack_found(message, 1)
    return m.read_block(text, 2, fields)


def _found(message: bytes) -> None:
    for fields in (FIELDS[:1], FIELDS):
        try:
            found = _read(message, fields)
        except m.ProtocolError:
            continue
        for shards in found:
            if shards is not None:
                require(isinstance(shards, WrittenShards), "no shards")
                require(set(shards) <= set(fields), "other fields")
        again = _read(_answer(found, fields), fields)
        rows = [written_rows(one, fields) for one in (found, again)]
        require(rows[0] == rows[1], "other records")


_check_message = outcome(m.ProtocolError)(lambda message: _again(message))


class _Agent:
    """One agent for all examples of a process, and a client that always gets right bytes."""

    def __init__(self) -> None:
        self.node = Node(memory=1 << 16).listen()
        self.node.save()
        self.client = self.node.connect()
        self.conversations = 0
        self._read()
        self.outbox = Outbox(2 * _BYTES)
        os.pwrite(self.outbox.fd, b"".join(PARTS), 0)
        self.threads, self.descriptors = self._counted()
        self.fetching = threads_of(self.node.core)

    def close(self) -> None:
        self.node.close()
        self.outbox.close()

    def _counted(self) -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    def talk(self, messages: list[bytes]) -> str:
        server = self.node.server
        require(server.is_accepting, "nobody accepts")
        self.node.cache.in_flight.forget(_JOINED.path())  # it is wanted again
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(_PATIENCE_S)
            sock.connect(str(self.node.path))
            said = self._say(sock, messages)
        self.conversations += 1
        if self.conversations % _LOOK_EVERY == 0:
            self.look()
        return said

    def _say(self, sock: socket.socket, messages: list[bytes]) -> str:
        for message in messages:
            try:
                descriptors = [self.outbox.fd] if message == HELLO else []
                socket.send_fds(sock, [message], descriptors)
                if message[:1] in _UNANSWERED:
                    continue
                answer = sock.recv(m.MESSAGE_BYTES_MAX + 1)
            except OSError:
                return "ended"
            if not answer:
                return "ended"
            kind = m.kind_of(answer)  # raises for nonsense
            require(kind in _ANSWERS_TO.get(message[0], ()), f"{kind.name} to {message[:1]!r}")
        return "answered"

    def _read(self) -> None:
        wanted = m.Claims.of(WANTED)
        leases = self.client.open(wanted, deadline_s=_PATIENCE_S, urgency=Urgency.IN_STEP)
        for lease in leases:
            progress = ended(self.client, lease)
            if progress.state is CellState.READY:  # others may have rejected or forgotten it
                require(pages_at(self.client.arena.view, progress) == RIGHT, "other bytes")
        self.client.release([lease.number for lease in leases if lease.number])

    def look(self) -> None:
        """All is well, and nothing is left of clients that have gone."""
        self._read()
        server = self.node.server
        _await(lambda: server.clients == 1, "clients that have gone are served")
        _await(lambda: not self.node.saves.joins, "a join is open")
        _await(lambda: self.node.arena_cache.leased() == 0, "a lease is lost")
        for entry in self.node.store.scan(f"{NAMESPACE}/"):
            verified(self.node.store.get(entry.key))
        require(is_consistent(self.node.arena_cache), "the arena is inconsistent")
        _await(self._has_no_more, "threads or descriptors are left")
        require(threads_of(self.node.core) == self.fetching, "a thread died")

    def _has_no_more(self) -> bool:
        threads, descriptors = self._counted()
        return threads <= self.threads and descriptors <= self.descriptors


_ANSWERS_TO = {
    m.MessageKind.HELLO: (m.MessageKind.WELCOME, m.MessageKind.REFUSED),
    m.MessageKind.OPEN: (m.MessageKind.OPENED, m.MessageKind.FAILED),
    m.MessageKind.FIND: (m.MessageKind.FOUND, m.MessageKind.FAILED),
    m.MessageKind.COMMIT: (m.MessageKind.COMMITTED,),
    m.MessageKind.CALL: (m.MessageKind.RESULT, m.MessageKind.FAILED),
}


_UNANSWERED = (b"\x06", b"\x0a", b"\x0f")


def _await(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + _PATIENCE_S
    while not condition():
        require(time.monotonic() < end, what)
        time.sleep(1e-3)


_the_agent = functools.cache(_Agent)


def _check_server(messages: list[bytes]) -> str:
    return _the_agent().talk(messages)


class _Liar:
    """An agent that answers everything with prepared bytes."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="objkv-", dir="/tmp")
        self.path = Path(self.folder.name) / "liar"
        self.answers: list[bytes] = []
        self.board = AnswerBoard.create()
        self.board.vouch(1e12)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self.path))
        self._listener.listen(8)
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.board.close()
        self.folder.cleanup()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # closed
                return
            with sock:
                sock.recv(1000)
                welcome = bytes((m.MessageKind.WELCOME,))
                socket.send_fds(sock, [welcome], [self.board.fd])
                for answer in list(self.answers):
                    if not sock.recv(m.MESSAGE_BYTES_MAX):
                        break
                    sock.send(answer)


_the_liar = functools.cache(_Liar)


@atexit.register
def close_agents() -> None:
    for made in (_the_agent, _the_liar):
        if made.cache_info().currsize:
            made().close()
            made.cache_clear()


@outcome((TransferError, StoreUnavailable))
def _check_client(answer: bytes) -> str | None:
    """A client understands an answer, or the connection is lost; never another exception."""
    liar = _the_liar()
    liar.answers = [answer or b"\xff"] * 3
    kind, scope = answer[:1], LookupScope(NAMESPACE, FIELDS[:1])
    liar.board.discard(HASHES[0])
    if kind == b"\x08" and len(answer) % 2:  # the same, in shared memory
        draft = liar.board.begin(scope.key(b"".join(HASHES[:2])), HASHES[:2])
        liar.board.write(draft, answer[1:], (0.0, 1e12))
    client = AgentConnection(liar.path, call_s=_PATIENCE_S)
    try:
        if kind in (b"\x08", b"\x09"):
            found = complete(client.find(NAMESPACE, HASHES[:2], FIELDS[:1]))
            require(len(found) == 2, "another number of answers")
        elif kind == b"\x0c":
            client.commit([m.Commit(0, 4096)] * 2)
        else:
            client.call(m.pack_text(m.MessageKind.CALL, "{}"))
    except TransferError:
        require(client.has_ended(), "a connection in an unknown state")
        raise
    finally:
        client.close()
    return "read"


def _conversation(random: Random) -> list[bytes]:
    hello = random.choice([HELLO] * 8 + [b"\x01\x01\0\0\1", b"\x02"])
    messages = [spoiled(random, REQUESTS, near=60) for _ in range(random.randrange(5))]
    messages += random.sample(REQUESTS, 2)
    random.shuffle(messages)
    return [hello, *messages]


TARGETS = (
    Target(
        "agent: messages", lambda random: spoiled(random, [*REQUESTS, *ANSWERS]), _check_message
    ),
    Target("agent: a server of many clients", _conversation, _check_server),
    Target("agent: answers to a client", lambda random: spoiled(random, ANSWERS), _check_client),
)
