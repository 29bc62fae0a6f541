"""A replica's index and documents, by way of the agent: it needs no credentials for either.

Lookups have a message of their own, and a board of answers that all replicas read. All other calls
are rare, and are JSON: a verb and its arguments, with hashes as hex and records as an index writes
them. ``answering`` is the agent's side.
"""

import base64
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from threading import Event
from time import monotonic
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from objkv import errors
from objkv.agent.client import AgentConnection
from objkv.agent.messages import (
    MessageKind,
    PrefetchOrder,
    ProtocolError,
    kind_of,
    pack_text,
    unpack_text,
)
from objkv.background import ClosedError, Steps
from objkv.errors import ObjkvError, StoreError, StoreUnavailable, TransferError
from objkv.index.base import Record, Savings, Shards
from objkv.index.fields import decode_shard, encode_shard
from objkv.keys.prefix import PREFIX_HASH_BYTES
from objkv.stores.base import Buffer
from objkv.telemetry import Trouble

logger = logging.getLogger(__name__)
DOCUMENT_BYTES_MAX: Final = 32_768
"""Of a document, in an answer."""
_CHUNKS_MAX = 1024
"""Chunks in a call, which fit into a message."""
RETRY_S = 1.0
_FAILURES = ("StoreUnavailable", "StoreDenied", "StoreBusy", "StoreFull", "LeftAlone")
Arguments = Mapping[str, Any]
P = ParamSpec("P")
T = TypeVar("T")


class AgentCalls:
    """The parts of a ``WriteIndex`` and a ``WriteStore`` that replicas use, in steps of one thread.
    Lookups have a connection of their own, so none waits for another call."""

    def __init__(
        self, connect: Callable[[], AgentConnection], *, clock: Callable[[], float] = monotonic
    ) -> None:
        """``connect``: returns a new connection, or raises ``ObjkvError``."""
        self._connect, self._clock = connect, clock
        self._agents: dict[Callable[..., object], AgentConnection] = {}
        self._retry_at = -1.0
        self._closed = Event()
        self._trouble = Trouble(logger, "lookups and records by the agent")

    def run(self, verb: str, **arguments: Any) -> Steps[Any]:
        """Run a call in the agent. Raises ``StoreError`` as the agent's store or index does."""
        try:
            message = pack_text(MessageKind.CALL, json.dumps({"verb": verb} | arguments))
        except ProtocolError as exc:
            raise StoreError(f"{verb}: {exc}") from exc
        answer = yield from self._use(AgentConnection.call, message)
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

    def find(
        self, namespace: str, prefix_hashes: Sequence[bytes], fields: Sequence[str]
    ) -> Steps[list[Shards | None]]:
        """See ``ReadIndex``."""
        if not prefix_hashes or not fields:
            return [None] * len(prefix_hashes)
        find = AgentConnection.find
        return (yield from self._use(find, namespace, prefix_hashes, tuple(fields)))

    def lookup(self, namespace: str, prefix_hashes: Sequence[bytes]) -> Steps[list[Record | None]]:
        """See ``ReadIndex``."""
        found = yield from self.run("lookup", namespace=namespace, hashes=_hex(prefix_hashes))
        return [None if one is None else _read_record(one) for one in found]

    def touch(self, namespace: str, prefix_hashes: Sequence[bytes], *, ttl_s: int) -> Steps[None]:
        """See ``WriteIndex``."""
        for first in range(0, len(prefix_hashes), _CHUNKS_MAX):
            hashes = _hex(prefix_hashes[first : first + _CHUNKS_MAX])
            touch = self.run("touch", namespace=namespace, hashes=hashes, ttl_s=ttl_s)
            yield from touch

    def credit(self, savings: Savings) -> Steps[None]:
        """See ``WriteIndex``."""
        yield from self.run("credit", savings=asdict(savings))

    def get_range(self, key: str, start: int, end: int) -> Steps[bytes | None]:
        """See ``ReadStore``. A long document is read in parts, which may be of two versions."""
        document = b""
        while start + len(document) < end:
            at = start + len(document)
            found = yield from self.run("get", path=key, start=at)
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
        return bool((yield from self.run("put", path=key, document=document)))

    def close(self) -> None:
        """Close all connections. Idempotent. The thread must have ended."""
        self._closed.set()
        while self._agents:
            self._agents.popitem()[1].close()

    def _use(
        self,
        work: Callable[Concatenate[AgentConnection, P], Steps[T]],
        *args: P.args,
        **named: P.kwargs,
    ) -> Steps[T]:
        try:
            found = yield from work(self._reach(work), *args, **named)
        except (TransferError, TimeoutError) as exc:
            if not self._closed.is_set() and not isinstance(exc, ClosedError):
                self._trouble.failed(exc)
            raise StoreUnavailable(str(exc)) from exc
        self._trouble.worked()
        return found

    def _reach(self, work: Callable[..., object]) -> AgentConnection:
        """Return the connection for questions of a kind."""
        agent = self._agents.get(work)
        if agent is not None and not agent.has_ended():
            return agent
        if self._closed.is_set() or self._clock() < self._retry_at:
            raise TransferError("no agent")
        if agent is not None:
            del self._agents[work]
            agent.leave()
        try:
            agent = self._agents[work] = self._connect()
        except ObjkvError:
            self._retry_at = self._clock() + RETRY_S
            raise
        if self._closed.is_set():  # while it was made
            agent.close()
        return agent


def _hex(hashes: Sequence[bytes]) -> list[str]:
    return [one.hex() for one in hashes]


def read_hashes(call: Arguments) -> list[bytes]:
    """Return the hashes of a call. Raises one of its errors for invalid ones, as the others do."""
    hashes = [bytes.fromhex(text) for text in call["hashes"]]
    if any(len(one) != PREFIX_HASH_BYTES for one in hashes):
        raise ValueError("a hash of another length")
    return hashes


def record_text(record: Record) -> dict[str, Any]:
    """Return a record as a result has it."""
    return {
        "hashes": _hex((record.prefix_hash, record.parent_hash)),
        "tokens": [record.token_start, record.token_end],
        "shards": {name: encode_shard(one).decode() for name, one in record.shards.items()},
        "counts": [record.hits, record.touched_s, record.pinned_until_s],
    }


def _read_record(text: Arguments) -> Record:
    prefix_hash, parent_hash = read_hashes(text)
    (start, end), (hits, touched_s, pinned_until_s) = text["tokens"], text["counts"]
    found = {name: decode_shard(one.encode("ascii")) for name, one in text["shards"].items()}
    shards = {name: one for name, one in found.items() if one is not None}
    return Record(prefix_hash, parent_hash, start, end, shards, hits, touched_s, pinned_until_s)
