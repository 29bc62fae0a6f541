"""Payloads that are fetched before a request needs them, and where a prompt's payloads are.

A router that knows the next request has its payloads fetched meanwhile. A prefetch holds a lease of
each payload until it has arrived, so that it is not given up as unwanted. Payloads under way take
at most a quarter of the arena, and so do unread ones.
"""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock

from objkv.agent.arena_cache import CachedPayload
from objkv.agent.core import Core
from objkv.agent.fill import PayloadRequest
from objkv.agent.memory.arena import CellState
from objkv.agent.messages import Claims, MissReason, PrefetchOrder, Urgency, is_held_back
from objkv.codec.values import Claim
from objkv.errors import ConfigError, NotStored
from objkv.index.base import ReadIndex, Record
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import identity_path
from objkv.stores.base import ReadStore

_NAMESPACES_MAX = 64
_DOCUMENT_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Matched:
    """How much of a prompt is stored, and how much of that is in this node's memory."""

    chunks: int
    """Whole chunks of the prompt."""
    stored: int
    """Leading chunks that a replica of this node finds."""
    resident: int
    """Leading ones of those whose payloads can all be read from memory now."""
    tokens: int
    """Of the stored chunks, as all that follows."""
    payloads: int
    """Of all groups and shards."""
    payload_bytes: int
    """Their size in memory."""
    resident_payloads: int
    """Those that can be read from memory now."""
    resident_bytes: int
    loading_payloads: int
    """Those that are being fetched now."""


@dataclass(frozen=True, slots=True)
class Prefetched:
    """The outcome of a request to prefetch, in payloads except for the first two."""

    chunks: int
    """Whole chunks of the prompt."""
    stored: int
    """Leading chunks with a record."""
    started: int
    resident: int
    """Already in memory, or on their way."""
    refused: int
    """Beyond a limit of bytes, or without room."""
    started_bytes: int
    resident_bytes: int
    refused_bytes: int


@dataclass(frozen=True, slots=True)
class NamespaceFacts:
    """The part of an identity document that requests need."""

    namespace: str
    model: str
    tenant: str
    chunk_tokens: int


class Prefetches:
    """Thread-safe. ``match`` and ``start`` take one round trip to the index."""

    def __init__(self, core: Core, index: ReadIndex, documents: ReadStore) -> None:
        self._core, self._index, self._documents = core, index, documents
        self._lock = Lock()
        self._open: dict[CachedPayload, list[int]] = {}
        """Payloads under way, with their size once for each lease."""
        self._open_bytes = 0
        """Sum of those, and of payloads that are about to be opened."""
        self._facts: dict[str, NamespaceFacts] = {}

    def facts(self, namespace: str) -> NamespaceFacts:
        """Return the facts of a namespace. Raises ``NotStored`` for an unknown one."""
        if (found := self._facts.get(namespace)) is not None:
            return found  # such a document never changes: the namespace is its digest
        path = identity_path(namespace)
        document = self._documents.get(path, 0, _DOCUMENT_BYTES_MAX)
        if document is None:
            raise NotStored(f"no namespace {namespace}: objkv ls shows those that exist")
        found = _facts(namespace, path, document)
        if len(self._facts) >= _NAMESPACES_MAX:
            self._facts.clear()
        self._facts[namespace] = found
        return found

    def namespaces(self) -> list[NamespaceFacts]:
        """Return the namespaces with chunks, at most ``_NAMESPACES_MAX``."""
        found = []
        for name in self._index.namespaces()[:_NAMESPACES_MAX]:
            with suppress(NotStored, ConfigError):  # of another kind, or half deleted
                found.append(self.facts(name))
        return found

    def match(self, namespace: str, hashes: Sequence[bytes]) -> Matched:
        """Return how much of a prompt is stored."""
        records = self._stored(namespace, hashes)
        chunks = [_wanted(namespace, record) for record in records]
        ready: list[PayloadRequest] = []
        payloads = loading = resident = 0
        for chunk in chunks:
            seen = self._seen(chunk)
            here = [o for o, s in zip(chunk, seen, strict=True) if s is CellState.READY]
            resident += len(here) == len(chunk) and payloads == len(ready)
            payloads += len(chunk)
            ready += here
            loading += seen.count(CellState.FILLING)
        return Matched(
            chunks=len(hashes),
            stored=len(records),
            resident=resident,
            tokens=records[-1].token_end if records else 0,
            payloads=payloads,
            payload_bytes=_raw_bytes(one for chunk in chunks for one in chunk),
            resident_payloads=len(ready),
            resident_bytes=_raw_bytes(ready),
            loading_payloads=loading,
        )

    def start(self, namespace: str, hashes: Sequence[bytes], order: PrefetchOrder) -> Prefetched:
        """Fetch all payloads of the leading stored chunks; if ``puts``, only those held back."""
        records = self._stored(namespace, hashes)
        wanted = [one for record in records for one in _wanted(namespace, record)]
        if order.puts:
            wanted = [one for one in wanted if is_held_back(one.record)]
            for one in wanted:
                self._core.arena_cache.held_back.put(one.claim.key.path())
        missing = [o for o, s in zip(wanted, self._seen(wanted), strict=True) if s is None]
        taken = self._reserve(wanted, missing, order)
        started = list[PayloadRequest]()
        if taken:
            opened = self._core.open(
                self,
                Claims.of([one.claim for one in taken]),
                deadline_s=order.deadline_s,
                urgency=Urgency.PREFETCH,
                priority=order.priority,
            )
            started = self._remember(taken, opened)
        self.wake()
        whole, lacking = _raw_bytes(wanted), _raw_bytes(missing)
        return Prefetched(
            chunks=len(hashes),
            stored=len(records),
            started=len(started),
            resident=len(wanted) - len(missing),
            refused=len(missing) - len(started),
            started_bytes=_raw_bytes(started),
            resident_bytes=whole - lacking,
            refused_bytes=lacking - _raw_bytes(started),
        )

    def wake(self) -> None:
        """End the leases of payloads that have arrived or failed. See ``Waiter``."""
        arena_cache = self._core.arena_cache
        with self._lock:
            ended = [one for one in self._open if one.state is not CellState.FILLING]
            sizes = [self._open.pop(one) for one in ended]
            self._open_bytes -= sum(map(sum, sizes))
        for one, leases in zip(ended, sizes, strict=True):
            for _ in leases:
                arena_cache.release(one)

    def _reserve(
        self,
        wanted: Sequence[PayloadRequest],
        missing: Sequence[PayloadRequest],
        order: PrefetchOrder,
    ) -> list[PayloadRequest]:
        """Return the leading ones of ``missing`` that the limits allow. Unread payloads of
        this prompt count too: later ones would only displace the earlier ones."""
        arena_cache = self._core.arena_cache
        unread = sum(
            one.nbytes
            for one in arena_cache.peek(one.claim.key.path() for one in wanted)
            if one is not None and one.is_unused and one.state is CellState.READY
        )
        taken: list[PayloadRequest] = []
        with self._lock:
            room = arena_cache.ahead_bytes_max - self._open_bytes - unread
            if order.bytes_max is not None:
                room = min(room, order.bytes_max)
            for one in missing:
                room -= one.record.raw_bytes
                if room < 0:
                    break
                taken.append(one)
            self._open_bytes += _raw_bytes(taken)
        return taken

    def _remember(
        self, taken: Sequence[PayloadRequest], opened: Sequence[CachedPayload | MissReason]
    ) -> list[PayloadRequest]:
        """Keep the leases until their payloads have arrived. Returns those not refused at once."""
        started = []
        with self._lock:
            for one, lease in zip(taken, opened, strict=True):
                if isinstance(lease, MissReason):
                    self._open_bytes -= one.record.raw_bytes
                    continue
                self._open.setdefault(lease, []).append(one.record.raw_bytes)
                if lease.reason is not MissReason.NO_ROOM:
                    started.append(one)
        return started

    def _seen(self, wanted: Sequence[PayloadRequest]) -> list[CellState | None]:
        seen = self._core.arena_cache.peek(one.claim.key.path() for one in wanted)
        return [None if one is None else one.state for one in seen]

    def _stored(self, namespace: str, hashes: Sequence[bytes]) -> list[Record]:
        """Return the records of the leading chunks that are stored, or held back on this node."""
        found: list[Record] = []
        records = self._index.lookup(namespace, hashes)
        for record in self._core.arena_cache.held_back.lookup(namespace, hashes, records):
            if record is None:
                break
            found.append(record)
        shards = ((record.prefix_hash, record.shards) for record in found)
        self._core.found.add(namespace, shards)
        return found


def _facts(namespace: str, path: str, document: bytes) -> NamespaceFacts:
    try:
        values = json.loads(document)
        size = values["chunk_tokens"]
        if type(size) is not int or size <= 0:
            raise ValueError("chunk_tokens")
        return NamespaceFacts(namespace, str(values["model"]), str(values["tenant"]), size)
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise ConfigError(f"{path} is not an identity document") from exc


def _raw_bytes(wanted: Iterable[PayloadRequest]) -> int:
    return sum(one.record.raw_bytes for one in wanted)


def _wanted(namespace: str, record: Record) -> list[PayloadRequest]:
    """Return all payloads of a chunk. A shard whose name this version cannot read has none."""
    wanted = []
    for field, shard in record.shards.items():
        try:
            key = ChunkKey.of(namespace, record.prefix_hash, field)
        except ValueError:
            continue
        claim = Claim(key, record.parent_hash, record.token_start, record.token_end)
        wanted.append(PayloadRequest(claim, shard))
    return wanted
