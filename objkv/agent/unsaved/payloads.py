"""Payloads that are only in this node's memory, because nothing has needed them a second time yet.

Most payloads are never read again, so putting each of them to a bucket costs more than it saves. A
held-back payload is found and read on its node like any other. It is saved when it is read or
made again, here or on another node, and lost when the arena evicts it before that, or the agent
ends.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from time import monotonic
from typing import Final

from objkv.cache.chunks import shard_record
from objkv.codec.payload import Claim, Header
from objkv.index.base import Record, ShardRecord, Shards
from objkv.telemetry import Recorder

_MARK: Final = "unsaved:"
"""Begins the checksum in the record of a held-back payload. No index has such a record."""
_RETRY_S: Final = 5.0
"""After a save that failed, the payload is not due again for this time."""
Find = Callable[[Sequence[bytes]], list[Shards | None]]


def is_unsaved(record: ShardRecord) -> bool:
    """Whether the record is one that an agent made for a payload in its memory. A replica may keep
    it for a while, so the payload may have been saved, in another form, or evicted since."""
    return record.header_checksum.startswith(_MARK)


def unsaved_record(header: Header) -> ShardRecord:
    """Return the record of a payload in an arena, which is neither compressed nor sealed."""
    record = shard_record(header)
    return replace(record, header_checksum=_MARK + record.header_checksum)


@dataclass(slots=True, eq=False)
class _Unsaved:
    claim: Claim
    record: ShardRecord
    is_due: bool = False
    retry_at: float = -math.inf


class UnsavedPayloads:
    """The held-back payloads of one arena. Thread-safe. Never waits, and holds its lock while it
    calls nothing, so callers may hold theirs."""

    def __init__(self, recorder: Recorder, *, clock: Callable[[], float] = monotonic) -> None:
        self.on_due: Callable[[], None] = lambda: None
        """Called after payloads became due. Must not wait."""
        self._recorder, self._clock = recorder, clock
        self._lock = Lock()
        self._by_path: dict[str, _Unsaved] = {}
        self._by_chunk: dict[tuple[str, bytes], dict[str, _Unsaved]] = {}
        self._due: deque[Claim] = deque()
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._by_path)

    def __contains__(self, path: str) -> bool:
        return path in self._by_path

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self._nbytes

    @property
    def paths(self) -> Iterable[str]:
        """The paths that they would have in the bulk store."""
        return list(self._by_path)

    def add(self, claim: Claim, record: ShardRecord) -> None:
        """Hold a payload back. ``record``: of ``unsaved_record``."""
        key, one = claim.key, _Unsaved(claim, record)
        with self._lock:
            self._remove(key.path())
            self._by_path[key.path()] = one
            self._by_chunk.setdefault((key.namespace, key.prefix_hash), {})[key.field] = one
            self._nbytes += record.nbytes

    def seen_again(self, path: str) -> None:
        """A held-back payload was read or made again: it and those before it in its prompt become
        due, since no other node finds the end of a prompt without its beginning."""
        if path not in self._by_path:
            return
        due: list[Claim] = []
        now = self._clock()
        with self._lock:
            one = self._by_path.get(path)
            while one is not None and not one.is_due and one.retry_at <= now:
                one.is_due = True
                due.append(one.claim)
                before = replace(one.claim.key, prefix_hash=one.claim.parent_hash)
                one = self._by_path.get(before.path())
            self._due.extend(reversed(due))
        if due:
            self._recorder.count("agent_unsaved_due", len(due))
            self.on_due()

    @property
    def has_due(self) -> bool:
        """Whether payloads are due, and nothing saves them yet."""
        return bool(self._due)

    def take_due(self) -> Claim | None:
        """Return the next payload that is due, beginnings of prompts first."""
        with self._lock:
            return self._due.popleft() if self._due else None

    def not_saved(self, path: str) -> None:
        """The save of a due payload failed: it is held back until it is seen once more."""
        with self._lock:
            if (one := self._by_path.get(path)) is not None:
                one.is_due, one.retry_at = False, self._clock() + _RETRY_S

    def saved(self, path: str) -> None:
        """A payload is stored and published."""
        with self._lock:
            self._remove(path)

    def dropped(self, path: str) -> None:
        """The payload has left the arena."""
        if path not in self._by_path:
            return
        with self._lock:
            one = self._remove(path)
        if one is not None:
            self._recorder.count("agent_unsaved_dropped")
            self._recorder.count("agent_unsaved_dropped_bytes", one.record.nbytes)

    def find(
        self, namespace: str, hashes: Sequence[bytes], fields: Sequence[str], find: Find
    ) -> list[Shards | None]:
        """Return what ``find`` does for chunks of ``namespace``, and held-back payloads.

        Chunks are looked up by ``find`` in one call, apart from those that are held back in part.
        A lookup that has met a missing chunk may report all later ones of its call as missing.
        """
        if not self._by_path:
            return find(hashes)
        own = [self._shards(namespace, one, fields) for one in hashes]
        absent = [place for place, shards in enumerate(own) if not shards]
        partial = [place for place, shards in enumerate(own) if 0 < len(shards) < len(fields)]
        found: list[Shards | None] = [shards or None for shards in own]
        for places in (absent, partial):
            if places:
                stored = find([hashes[place] for place in places])
                for place, shards in zip(places, stored, strict=True):
                    if shards is not None:
                        found[place] = own[place] | dict(shards) if own[place] else shards
        return found

    def lookup(
        self, namespace: str, hashes: Sequence[bytes], records: Sequence[Record | None]
    ) -> list[Record | None]:
        """Add held-back payloads to the ``records`` of chunks."""
        if not self._by_path:
            return list(records)
        return [
            self._record(namespace, prefix_hash, record)
            for prefix_hash, record in zip(hashes, records, strict=True)
        ]

    def __repr__(self) -> str:
        return f"<UnsavedPayloads {len(self._by_path)} payloads, {self._nbytes} B>"

    def _shards(
        self, namespace: str, prefix_hash: bytes, fields: Sequence[str]
    ) -> dict[str, ShardRecord]:
        if (namespace, prefix_hash) not in self._by_chunk:  # most are not
            return {}
        with self._lock:
            chunk = self._by_chunk.get((namespace, prefix_hash), {})
            return {name: chunk[name].record for name in fields if name in chunk}

    def _record(self, namespace: str, prefix_hash: bytes, record: Record | None) -> Record | None:
        with self._lock:
            chunk = dict(self._by_chunk.get((namespace, prefix_hash), {}))
        if not chunk:
            return record
        shards = {name: one.record for name, one in chunk.items()}
        if record is not None:
            return replace(record, shards=shards | dict(record.shards))
        claim = next(iter(chunk.values())).claim
        return Record(prefix_hash, claim.parent_hash, claim.token_start, claim.token_end, shards)

    def _remove(self, path: str) -> _Unsaved | None:
        one = self._by_path.pop(path, None)
        if one is not None:
            key = one.claim.key
            chunk = self._by_chunk[key.namespace, key.prefix_hash]
            del chunk[key.field]
            if not chunk:
                del self._by_chunk[key.namespace, key.prefix_hash]
            self._nbytes -= one.record.nbytes
        return one
