"""Payloads that are fetched before a request needs them, and where a prompt's payloads are.

A router that knows the next request has its payloads fetched meanwhile. A prefetch holds a lease of
each payload until it has arrived, so that it is not given up as unwanted; after that the payload is
evicted like any other. Prefetches are bounded in bytes, and unused ones are counted.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

from objkv.agent.core import Core, Urgency
from objkv.agent.fill import Wanted
from objkv.agent.residents import MissReason, Resident
from objkv.codec.payload import Claim
from objkv.errors import ConfigError, NotStored
from objkv.index.base import ReadIndex, Record
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import identity_path
from objkv.keys.prefix import prefix_hashes
from objkv.keys.topology import Shard
from objkv.stores.base import ReadStore

_SHARE = 4
"""Divisor: prefetches in flight take at most this fraction of the arena."""
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
    """Tokens of the stored chunks."""


@dataclass(frozen=True, slots=True)
class Prefetched:
    """The outcome of a request to prefetch, in payloads."""

    started: int
    resident: int
    """Already in memory, or on their way."""
    refused: int
    """Beyond the limit of bytes, or without room."""


class Prefetches:
    """Thread-safe. ``match`` and ``start`` take one round trip to the index."""

    def __init__(self, core: Core, index: ReadIndex, documents: ReadStore) -> None:
        self._core, self._index, self._documents = core, index, documents
        self._lock = Lock()
        self._open: dict[Resident, int] = {}
        """Payloads under way, with their sizes."""

    def hashes_of(self, namespace: str, tokens: Sequence[int]) -> list[bytes]:
        """Return the prefix hashes of a prompt. Raises ``NotStored`` for an unknown namespace."""
        path = identity_path(namespace)
        document = self._documents.get_range(path, 0, _DOCUMENT_BYTES_MAX)
        if document is None:
            raise NotStored(f"no namespace {namespace}: objkv ls shows those that exist")
        try:
            chunk_tokens = int(json.loads(document)["chunk_tokens"])
        except (ValueError, KeyError, TypeError) as exc:
            raise ConfigError(f"{path} is not an identity document") from exc
        return prefix_hashes(namespace, tokens, chunk_tokens)

    def match(self, namespace: str, hashes: Sequence[bytes]) -> Matched:
        """Return how much of a prompt is stored."""
        records = self._stored(namespace, hashes)
        resident = 0
        for record in records:
            if not all(
                self._core.residents.holds([w.claim.key.path() for w in _wanted(namespace, record)])
            ):
                break
            resident += 1
        tokens = records[-1].token_end if records else 0
        return Matched(len(hashes), len(records), resident, tokens)

    def start(self, namespace: str, hashes: Sequence[bytes], *, deadline_s: float) -> Prefetched:
        """Fetch all payloads of the leading stored chunks, of all shards, in order."""
        wanted = [
            one for record in self._stored(namespace, hashes) for one in _wanted(namespace, record)
        ]
        held = self._core.residents.holds([one.claim.key.path() for one in wanted])
        missing = [one for one, is_held in zip(wanted, held, strict=True) if not is_held]
        with self._lock:
            room = self._core.residents.total_bytes // _SHARE - sum(self._open.values())
        taken = []
        for one in missing:
            room -= one.record.raw_bytes
            if room < 0:
                break
            taken.append(one)
        opened = self._core.open(self, taken, deadline_s=deadline_s, urgency=Urgency.PREFETCH)
        refused = len(missing) - len(taken)
        with self._lock:
            for one, lease in zip(taken, opened, strict=True):
                if isinstance(lease, MissReason):
                    refused += 1
                else:
                    self._open[lease] = one.record.raw_bytes
        self.wake()
        started = len(missing) - refused
        return Prefetched(started, len(wanted) - len(missing), refused)

    def wake(self) -> None:
        """End the leases of payloads that have arrived or failed. See ``Waiter``."""
        residents = self._core.residents
        with self._lock:
            ended = [one for one in self._open if not residents.is_filling(one)]
            for one in ended:
                del self._open[one]
        for one in ended:
            residents.release(one)

    def _stored(self, namespace: str, hashes: Sequence[bytes]) -> list[Record]:
        """Return the records of the leading chunks that are stored, or held back on this node."""
        found: list[Record] = []
        records = self._index.lookup(namespace, hashes)
        for record in self._core.residents.unsaved.lookup(namespace, hashes, records):
            if record is None:
                break
            found.append(record)
        return found


def _wanted(namespace: str, record: Record) -> list[Wanted]:
    """Return all payloads of a chunk. A shard whose name this version cannot read has none."""
    wanted = []
    for field, shard in record.shards.items():
        group, _, name = field.partition(".")
        try:
            key = ChunkKey(namespace, record.prefix_hash, int(group), Shard.parse(name))
        except ValueError:
            continue
        claim = Claim(key, record.parent_hash, record.token_start, record.token_end)
        wanted.append(Wanted(claim, shard))
    return wanted
