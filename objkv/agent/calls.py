"""A replica's index and documents, by way of the agent: it needs no credentials for either.

Lookups have a message of their own, and a board of answers that all replicas read. All other calls
are rare, and are JSON: a verb and its arguments, with hashes as hex and records as an index writes
them. Replicas read the identities of namespaces and the operators' switch, and write identities
that do not exist yet. They get no other file, and no payload.
"""

import base64
import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, replace
from time import monotonic
from typing import Any, Final, TypeVar

from objkv import errors
from objkv.agent.client import AgentConnection
from objkv.agent.memory.answers import AnswerBoard, Draft, Scope
from objkv.agent.messages import MessageKind, ProtocolError, kind_of, pack_call, unpack_text
from objkv.agent.prefetch import Prefetches, PrefetchOrder
from objkv.agent.unsaved import UnsavedPayloads
from objkv.background import ClosedError, Steps
from objkv.cache.switch import SWITCH_PATH
from objkv.cache.worth import PutPolicy
from objkv.errors import ObjkvError, StoreDenied, StoreError, StoreUnavailable, TransferError
from objkv.index.base import ChunkEntry, Record, Savings, ShardRecord, Shards, WriteIndex
from objkv.index.fields import decode_shard, encode_shard, written_rows
from objkv.keys.prefix import PREFIX_HASH_BYTES
from objkv.stores.base import Buffer, WriteStore
from objkv.telemetry import Trouble

logger = logging.getLogger(__name__)
DOCUMENT_BYTES_MAX: Final = 32_768
"""Of a document, in an answer."""
_CHUNKS_MAX = 1024
"""Chunks in a call, which fit into a message."""
_IDENTITY = re.compile(r"[0-9a-f]{32}/identity\.json")
RETRY_S = 1.0
_FAILURES = ("StoreUnavailable", "StoreDenied", "StoreBusy", "LeftAlone")
_INVALID = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
_NAMESPACE = re.compile(r"[0-9a-f]{32}")
Arguments = Mapping[str, Any]
T = TypeVar("T")
_MISSING_S: Final = 0.5
"""For how long it is remembered that a chunk is missing. Saves of this node end that at once."""


class NodeLookups:
    """Answers ``find`` from ``index`` and the unsaved payloads of this node, and keeps blocks of
    answers on a board that replicas read. Thread-safe."""

    def __init__(
        self,
        index: WriteIndex,
        unsaved: UnsavedPayloads,
        board: AnswerBoard,
        *,
        ttl_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``board``: this object closes it. ``ttl_s``: how long an answer is valid."""
        self._index, self._unsaved, self.board = index, unsaved, board
        self._ttl_s, self._clock = ttl_s, clock

    def find(self, namespace: str, hashes: bytes, fields: tuple[str, ...]) -> list[bytes]:
        """Return the text of each block of the answer for these prefix hashes."""
        scope, now = Scope(namespace, fields), self._clock()
        blocks = scope.blocks(hashes)
        keys = list(map(scope.key, blocks))
        texts = [self._read(key, now) for key in keys]
        unknown = [number for number, text in enumerate(texts) if text is None]
        # Before they are looked up: what changes meanwhile must not be kept.
        drafts = [self.board.begin(keys[number], _divided(blocks[number])) for number in unknown]
        try:
            found = iter(self._ask(namespace, drafts, fields))
            for number, draft in zip(unknown, drafts, strict=True):
                shards = [next(found) for _ in draft.hashes]
                text = texts[number] = b"\n".join(written_rows(shards, fields))
                is_whole = all(one is not None and len(one) == len(fields) for one in shards)
                ttl_s = self._ttl_s if is_whole else min(_MISSING_S, self._ttl_s)
                if ttl_s:
                    self.board.write(draft, text, (now, now + ttl_s))
        finally:
            self.board.end(drafts)
        return [text for text in texts if text is not None]

    def close(self) -> None:
        """Close the board. Idempotent."""
        self.board.close()

    def _ask(
        self, namespace: str, drafts: Sequence[Draft], fields: tuple[str, ...]
    ) -> Sequence[Shards | None]:
        asked = [one for draft in drafts for one in draft.hashes]
        if not asked:
            return ()

        def look_up(some: Sequence[bytes]) -> list[Shards | None]:
            return self._index.find(namespace, some, fields)

        return self._unsaved.find(namespace, asked, fields, look_up)

    def _read(self, key: bytes, now: float) -> bytes | None:
        found = self.board.find(key, now)
        return None if found is None else self.board.read(key, found)


def _divided(hashes: bytes) -> list[bytes]:
    step = PREFIX_HASH_BYTES
    return [hashes[at : at + step] for at in range(0, len(hashes), step)]


class NodeCalls:
    """The agent's side: runs calls on its index and bulk store. Thread-safe."""

    def __init__(
        self,
        index: WriteIndex,
        bulk: WriteStore,
        prefetches: Prefetches | None = None,
        policy: PutPolicy | None = None,
        *,
        ttl_s: int,
        changed: Callable[[bytes], object] = lambda prefix_hash: None,
    ) -> None:
        """``ttl_s``: life of records that clients write or touch. Theirs does not count: those that
        were given only the socket do not know that of the store. ``changed``: called after a
        client has changed a chunk's record."""
        self._index, self._bulk, self._prefetches = index, bulk, prefetches
        self._policy, self._ttl_s, self._changed = policy, ttl_s, changed
        self._verbs: dict[str, Callable[[Arguments], Any]] = {
            "lookup": self._lookup,
            "publish": self._publish,
            "touch": self._touch,
            "credit": self._credit,
            "forget": self._forget,
            "get": self._get,
            "put": self._put,
            "prefetch": self._prefetch,
        }

    def run(self, text: str) -> str:
        """Run a call and return its result. Raises ``StoreError``, also for an invalid call."""
        try:
            call = json.loads(text)
            verb = self._verbs[call.pop("verb")]
            return json.dumps(verb(call))
        except _INVALID as exc:
            raise StoreDenied(f"an invalid call: {exc!r}"[:1000]) from exc

    def _lookup(self, call: Arguments) -> list[Any]:
        found = self._index.lookup(_namespace(call), _hashes(call))
        return [None if one is None else _record_text(one) for one in found]

    def _publish(self, call: Arguments) -> None:
        chunk = _entry(call)
        self._index.publish(chunk, _shards(call["shards"]), ttl_s=self._ttl_s)
        self._changed(chunk.prefix_hash)

    def _touch(self, call: Arguments) -> None:
        self._index.touch(_namespace(call), _hashes(call), ttl_s=self._ttl_s)

    def _credit(self, call: Arguments) -> None:
        savings = Savings(**call["savings"])
        _namespace(call["savings"])
        if not all(type(one) is int for one in astuple(savings)[2:]):
            raise ValueError("savings must be integers")
        if self._policy is not None:
            self._policy.credited(savings)
        self._index.credit(savings)

    def _forget(self, call: Arguments) -> bool:
        (expected,) = _shards({call["field"]: call["expected"]}).values()
        (prefix_hash,) = _hashes(call)
        forgot = self._index.forget(_namespace(call), prefix_hash, call["field"], expected)
        self._changed(prefix_hash)
        return forgot

    def _prefetch(self, call: Arguments) -> dict[str, int]:
        if self._prefetches is None:
            raise StoreDenied("this agent does not prefetch")
        order = PrefetchOrder(**call["order"])
        return asdict(self._prefetches.start(_namespace(call), _hashes(call), order))

    def _get(self, call: Arguments) -> str | None:
        path: str = call["path"]
        if path != SWITCH_PATH:
            _check_identity(path)
        start = int(call.get("start", 0))
        document = self._bulk.get_range(path, max(0, start), max(0, start) + DOCUMENT_BYTES_MAX)
        return None if document is None else base64.b64encode(document).decode()

    def _put(self, call: Arguments) -> bool:
        path: str = call["path"]
        _check_identity(path)
        return self._bulk.put_if_absent(path, base64.b64decode(call["document"]))


class AgentCalls:
    """A replica's side, in steps of one thread. Lookups have a connection of their own, so none
    waits for another call."""

    def __init__(
        self, connect: Callable[[], AgentConnection], *, clock: Callable[[], float] = monotonic
    ) -> None:
        """``connect``: returns a new connection, or raises ``ObjkvError``."""
        self._connect, self._clock = connect, clock
        self._agents: dict[MessageKind, AgentConnection] = {}
        self._retry_at = -1.0
        self._closed = False
        self._trouble = Trouble(logger, "lookups and records by the agent")

    def find(
        self, namespace: str, hashes: Sequence[bytes], fields: tuple[str, ...]
    ) -> Steps[list[Shards | None]]:
        """See ``ReadIndex.find``."""
        return self._use(MessageKind.FIND, lambda agent: agent.find(namespace, hashes, fields))

    def run(self, verb: str, **arguments: Any) -> Steps[Any]:
        """Run a call in the agent. Raises ``StoreError`` as the agent's store or index does."""
        try:
            message = pack_call(json.dumps({"verb": verb} | arguments))
        except ProtocolError as exc:
            raise StoreError(f"{verb}: {exc}") from exc
        answer = yield from self._use(MessageKind.CALL, lambda agent: agent.call(message))
        if kind_of(answer) is MessageKind.FAILED:
            name, _, text = unpack_text(answer).partition("\n")
            kind = getattr(errors, name) if name in _FAILURES else StoreError
            raise kind(text)
        try:
            return json.loads(unpack_text(answer))
        except ValueError as exc:
            raise StoreUnavailable("the agent's answer is not JSON") from exc

    def prefetch(self, namespace: str, hashes: Sequence[bytes], order: PrefetchOrder) -> Steps[int]:
        """Have the payloads of a prompt fetched. Returns how many that started. Raises
        ``StoreError``."""
        started, left = 0, order.bytes_max
        for first in range(0, len(hashes), _CHUNKS_MAX):
            part = hashes[first : first + _CHUNKS_MAX]
            found = yield from self.run(
                "prefetch",
                namespace=namespace,
                hashes=_hex(part),
                order=asdict(replace(order, bytes_max=left)),
            )
            started += found["started"]
            if found["refused"] or found["stored"] < found["chunks"]:
                break
            if left is not None:
                left = left - found["started_bytes"]
        return started

    def close(self) -> None:
        """Close all connections. Idempotent. The thread must have ended."""
        self._closed = True
        while self._agents:
            self._agents.popitem()[1].close()

    def _use(self, kind: MessageKind, work: Callable[[AgentConnection], Steps[T]]) -> Steps[T]:
        try:
            found = yield from work(self._reach(kind))
        except (TransferError, TimeoutError) as exc:
            if not self._closed and not isinstance(exc, ClosedError):
                self._trouble.failed(exc)
            raise StoreUnavailable(str(exc)) from exc
        self._trouble.worked()
        return found

    def _reach(self, kind: MessageKind) -> AgentConnection:
        """Return the connection for questions of a kind."""
        agent = self._agents.get(kind)
        if agent is not None and not agent.has_ended():
            return agent
        if self._closed or self._clock() < self._retry_at:
            raise TransferError("no agent")
        if agent is not None:
            del self._agents[kind]
            agent.leave()
        try:
            agent = self._agents[kind] = self._connect()
        except ObjkvError:
            self._retry_at = self._clock() + RETRY_S
            raise
        self._close_late(agent)
        return agent

    def _close_late(self, agent: AgentConnection) -> None:
        """Close a new connection if ``close`` was called while it was made."""
        if self._closed:
            agent.close()


class AgentIndex:
    """The part of a ``WriteIndex`` that replicas use, in steps."""

    def __init__(self, calls: AgentCalls) -> None:
        self._calls = calls

    def find(
        self, namespace: str, prefix_hashes: Sequence[bytes], fields: Sequence[str]
    ) -> Steps[list[Shards | None]]:
        """See ``ReadIndex``."""
        if not prefix_hashes or not fields:
            return [None] * len(prefix_hashes)
        return (yield from self._calls.find(namespace, prefix_hashes, tuple(fields)))

    def lookup(self, namespace: str, prefix_hashes: Sequence[bytes]) -> Steps[list[Record | None]]:
        """See ``ReadIndex``."""
        found = yield from self._calls.run(
            "lookup", namespace=namespace, hashes=_hex(prefix_hashes)
        )
        return [None if one is None else _read_record(one) for one in found]

    def publish(
        self, chunk: ChunkEntry, shards: Mapping[str, ShardRecord], *, ttl_s: int
    ) -> Steps[None]:
        """See ``WriteIndex``."""
        yield from self._calls.run(
            "publish",
            namespace=chunk.namespace,
            hashes=_hex((chunk.prefix_hash, chunk.parent_hash)),
            tokens=[chunk.token_start, chunk.token_end],
            shards={name: encode_shard(one).decode() for name, one in shards.items()},
            ttl_s=ttl_s,
        )

    def touch(self, namespace: str, prefix_hashes: Sequence[bytes], *, ttl_s: int) -> Steps[None]:
        """See ``WriteIndex``."""
        for first in range(0, len(prefix_hashes), _CHUNKS_MAX):
            hashes = _hex(prefix_hashes[first : first + _CHUNKS_MAX])
            touch = self._calls.run("touch", namespace=namespace, hashes=hashes, ttl_s=ttl_s)
            yield from touch

    def credit(self, savings: Savings) -> Steps[None]:
        """See ``WriteIndex``."""
        yield from self._calls.run("credit", savings=asdict(savings))

    def forget(
        self, namespace: str, prefix_hash: bytes, field: str, expected: ShardRecord
    ) -> Steps[bool]:
        """See ``WriteIndex``."""
        text, hashes = encode_shard(expected).decode(), _hex((prefix_hash,))
        forget = self._calls.run(
            "forget", namespace=namespace, hashes=hashes, field=field, expected=text
        )
        return bool((yield from forget))

    def check(self) -> None:
        """Do nothing: the agent checks its index."""

    def close(self) -> None:
        """Close the connections to the agent. Idempotent."""
        self._calls.close()


class AgentDocuments:
    """The part of a ``WriteStore`` that replicas use, in steps: for identities, and the switch to
    read."""

    def __init__(self, calls: AgentCalls) -> None:
        self._calls = calls

    def get_range(self, key: str, start: int, end: int) -> Steps[bytes | None]:
        """See ``ReadStore``. A long document is read in parts, which may be of two versions."""
        document = b""
        while start + len(document) < end:
            at = start + len(document)
            found = yield from self._calls.run("get", path=key, start=at)
            if found is None:
                return None
            part = base64.b64decode(found)
            document += part
            if len(part) < DOCUMENT_BYTES_MAX:
                break
        return document[: end - start]

    def put_if_absent(self, key: str, value: Buffer) -> Steps[bool]:
        """See ``WriteStore``."""
        document = base64.b64encode(value).decode()
        return bool((yield from self._calls.run("put", path=key, document=document)))

    def check(self) -> None:
        """Do nothing: the agent checks its store."""

    def close(self) -> None:
        """Close the connections to the agent. Idempotent."""
        self._calls.close()


def _hex(hashes: Sequence[bytes]) -> list[str]:
    return [one.hex() for one in hashes]


def _hashes(call: Arguments) -> list[bytes]:
    hashes = [bytes.fromhex(text) for text in call["hashes"]]
    if any(len(one) != PREFIX_HASH_BYTES for one in hashes):
        raise ValueError("a hash of another length")
    return hashes


def _namespace(call: Arguments) -> str:
    name: str = call["namespace"]
    if _NAMESPACE.fullmatch(name) is None:
        raise ValueError("an invalid namespace")
    return name


def _entry(call: Arguments) -> ChunkEntry:
    prefix_hash, parent_hash = _hashes(call)
    start, end = call["tokens"]
    return ChunkEntry(_namespace(call), prefix_hash, parent_hash, int(start), int(end))


def _shards(texts: Mapping[str, str]) -> dict[str, ShardRecord]:
    found = {name: decode_shard(text.encode("ascii")) for name, text in texts.items()}
    if None in found.values():
        raise ValueError("an invalid record")
    return {name: shard for name, shard in found.items() if shard is not None}


def _check_identity(path: str) -> None:
    if _IDENTITY.fullmatch(path) is None:
        raise StoreDenied(f"replicas have no access to {path[:100]!r}")


def _record_text(record: Record) -> dict[str, Any]:
    return {
        "hashes": _hex((record.prefix_hash, record.parent_hash)),
        "tokens": [record.token_start, record.token_end],
        "shards": {name: encode_shard(one).decode() for name, one in record.shards.items()},
        "counts": [record.hits, record.touched_s, record.pinned_until_s],
    }


def _read_record(text: Arguments) -> Record:
    prefix_hash, parent_hash = _hashes(text)
    (start, end), (hits, touched_s, pinned_until_s) = text["tokens"], text["counts"]
    shards = _shards(text["shards"])
    return Record(prefix_hash, parent_hash, start, end, shards, hits, touched_s, pinned_until_s)
