"""Payloads that are only on this node: they are being saved, or nothing has needed them again yet.

They are read on their node like any other. Most payloads are never read again, so putting each of
them to a bucket costs more than it saves. One that is held back is saved when it is read or made
again, here or on another node, and lost when arena and disk evict it before, or the agent ends.
"""

import json
import math
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from time import monotonic
from typing import Final

from objkv.agent.disk import Disk
from objkv.agent.messages import HELD_BACK_MARK, MALFORMED, is_held_back
from objkv.cache.chunks import shard_record
from objkv.codec.values import Claim, Header
from objkv.errors import PayloadError
from objkv.index.base import Record, ShardRecord, ShardRecords
from objkv.index.fields import WrittenShards, decode_shard, encode_shard
from objkv.keys.chunk import ChunkKey
from objkv.telemetry import Recorder

_RETRY_S: Final = 5.0
"""After a save that failed, the payload is not due again for this time."""
Find = Callable[[Sequence[bytes]], list[ShardRecords | None]]


def held_back_record(header: Header) -> ShardRecord:
    """Return the record of a payload in an arena, which is neither compressed nor sealed."""
    record = shard_record(header)
    return replace(record, header_checksum=HELD_BACK_MARK + record.header_checksum)


def parse_held_back(line: bytes) -> tuple[Claim, ShardRecord]:
    """Read a line of ``HeldBackPayloads.written``. Raises ``PayloadError``."""
    try:
        path, parent_hash, start, end, text = json.loads(line)
        key = ChunkKey.parse(path)
        record = decode_shard(text.encode("ascii"))
        claim = Claim(key, bytes.fromhex(parent_hash), int(start), int(end))
    except MALFORMED as exc:
        raise PayloadError(f"an invalid line: {exc!r}"[:200]) from exc
    if record is None or not is_held_back(record):
        raise PayloadError("an invalid record")
    return claim, record


@dataclass(slots=True, eq=False)
class _Held:
    claim: Claim
    text: bytes
    """Its record, as answers carry it."""
    nbytes: int
    is_due: bool = False
    is_wanted: bool = False
    """Whether it is to be saved as soon as it is in the arena."""
    is_leased: bool = False
    """Whether another process was saving it at the last try: then it is not lost."""
    retry_at: float = -math.inf

    @property
    def record(self) -> ShardRecord:
        """Return its record. It is not kept, since there may be hundreds of thousands."""
        record = decode_shard(self.text)
        assert record is not None
        return record


class HeldBackPayloads:
    """The unsaved payloads of one arena. Thread-safe. Never waits, and holds its lock while it
    calls nothing, so callers may hold theirs."""

    def __init__(
        self,
        recorder: Recorder,
        changed: Callable[[bytes], object] = lambda prefix_hash: None,
        came_due: Callable[[], object] = lambda: None,
        disk: Disk | None = None,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``changed``: called after a chunk's payload came or went. ``came_due``: called after some
        became due. Neither may wait. ``disk``: it may have payloads that left the arena."""
        self._recorder, self._disk, self._clock = recorder, disk, clock
        self._changed, self._came_due = changed, came_due
        self._lock = Lock()
        self._by_path: dict[str, _Held] = {}
        self._by_chunk: dict[str, dict[bytes, dict[str, _Held]]] = {}
        """By namespace, prefix hash and field."""
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

    def add(self, claim: Claim, record: ShardRecord, *, is_due: bool) -> None:
        """Add a payload, and its ``held_back_record``. ``is_due``: if it is being saved."""
        key, one = claim.key, _Held(claim, encode_shard(record), record.nbytes, is_due)
        path = key.path()
        with self._lock:
            if path in self._by_path:
                self._remove(path)
            self._by_path[path] = one
            chunks = self._by_chunk.setdefault(key.namespace, {})
            chunks.setdefault(key.prefix_hash, {})[sys.intern(key.field)] = one
            self._nbytes += record.nbytes
        self._changed(key.prefix_hash)

    def record_of(self, path: str) -> ShardRecord | None:
        """Return the record of a payload that no store has yet."""
        one = self._by_path.get(path)
        return None if one is None else one.record

    def written(self) -> dict[str, bytes]:
        """Return those that the disk has, by path, each as a line for ``parse_held_back``."""
        assert self._disk is not None
        with self._lock:
            found = list(self._by_path.items())
        return {path: _line(one) for path, one in found if self._disk.size_of(path) is not None}

    def seen_again(self, path: str) -> bool:
        """A held-back payload was read or made again: it becomes due, and those before it in its
        prompt, without which no other node finds it. Returns whether it is due: not soon after a
        failed save."""
        if path not in self._by_path:
            return False
        due: list[Claim] = []
        now = self._clock()
        with self._lock:
            one = seen = self._by_path.get(path)
            chunks = self._by_chunk.get(one.claim.key.namespace, {}) if one else {}
            while one is not None and not one.is_due and one.retry_at <= now:
                one.is_due, one.is_leased = True, False
                due.append(one.claim)
                one = chunks.get(one.claim.parent_hash, {}).get(one.claim.key.field)
            self._due.extend(reversed(due))
            is_due = seen is not None and seen.is_due
        if due:
            self._recorder.count("agent_unsaved_due", len(due))
            self._came_due()
        return is_due

    def put(self, path: str) -> bool:
        """A payload is to be saved, at once if it is in the arena. Returns whether it is due."""
        with self._lock:
            if (one := self._by_path.get(path)) is not None:
                one.is_wanted = True
        return self.seen_again(path)

    def arrived(self, path: str) -> None:
        """A payload is complete in the arena."""
        if self._disk is not None:
            self._disk.unmark_only_copy(path)
        one = self._by_path.get(path)
        if one is not None and one.is_wanted:
            self.seen_again(path)

    @property
    def has_due(self) -> bool:
        """Whether payloads are due, and nothing saves them yet."""
        return bool(self._due)

    def pop_due(self) -> Claim | None:
        """Return the next payload that is due, beginnings of prompts first."""
        with self._lock:
            return self._due.popleft() if self._due else None

    def not_saved(self, path: str, *, is_leased: bool = False, is_absent: bool = False) -> None:
        """A due payload was not saved: it is held back until it is seen once more, after a pause
        unless another process saves it (``is_leased``), or it left the arena (``is_absent``)."""
        pause_s = 0.0 if is_leased or is_absent else _RETRY_S
        with self._lock:
            if (one := self._by_path.get(path)) is not None:
                one.is_due, one.is_leased = False, is_leased
                one.retry_at = self._clock() + pause_s

    def saved(self, path: str) -> None:
        """A payload is stored and published, or the next agent's."""
        self._end(path)

    def keep_on_disk(self, path: str) -> bool:
        """Whether the disk has a payload. Until that is in the arena, its loss is reported."""
        return self._disk is not None and self._disk.mark_only_copy(path)

    def left_arena(self, path: str) -> None:
        """The payload is not in the arena any more."""
        if path in self._by_path and not self.keep_on_disk(path):
            self.dropped(path)

    def dropped(self, path: str) -> None:
        """The payload is lost."""
        if path not in self._by_path:  # without the lock: most payloads are not held back
            return
        if (one := self._end(path)) is not None and not one.is_leased:
            self._recorder.count("agent_unsaved_dropped")
            self._recorder.count("agent_unsaved_dropped_bytes", one.nbytes)

    def find(
        self, namespace: str, hashes: Sequence[bytes], fields: tuple[str, ...], find: Find
    ) -> list[ShardRecords | None]:
        """Return what ``find`` does, and held-back payloads. Chunks that are held back in part have
        a call of their own: after a missing chunk ``find`` may report all later ones as missing."""
        chunks = self._by_chunk.get(namespace)
        if not chunks or chunks.keys().isdisjoint(hashes):  # most lookups: 3 us for 128 chunks
            return find(hashes)
        with self._lock:
            found = [_written(chunks.get(one), fields) for one in hashes]
        absent = [place for place, own in enumerate(found) if own is None]
        partial = [place for place, own in enumerate(found) if own and len(own) < len(fields)]
        for places in (absent, partial):
            if places:
                stored = find([hashes[place] for place in places])
                for place, shards in zip(places, stored, strict=True):
                    if shards is not None:
                        own = found[place]
                        found[place] = shards if own is None else {**own, **shards}
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

    def _record(self, namespace: str, prefix_hash: bytes, record: Record | None) -> Record | None:
        with self._lock:
            chunk = dict(self._by_chunk.get(namespace, {}).get(prefix_hash, {}))
        if not chunk:
            return record
        shards = {name: one.record for name, one in chunk.items()}
        if record is not None:
            return replace(record, shards=shards | dict(record.shards))
        claim = next(iter(chunk.values())).claim
        return Record(prefix_hash, claim.parent_hash, claim.token_start, claim.token_end, shards)

    def _end(self, path: str) -> _Held | None:
        with self._lock:
            one = self._remove(path)
        if one is not None:
            self._changed(one.claim.key.prefix_hash)
        return one

    def _remove(self, path: str) -> _Held | None:
        one = self._by_path.pop(path, None)
        if one is not None:
            key = one.claim.key
            chunks = self._by_chunk[key.namespace]
            del chunks[key.prefix_hash][key.field]
            if not chunks[key.prefix_hash]:
                del chunks[key.prefix_hash]
            if not chunks:
                del self._by_chunk[key.namespace]
            self._nbytes -= one.nbytes
        return one


def _line(one: _Held) -> bytes:
    claim = one.claim
    places = [claim.key.path(), claim.parent_hash.hex(), claim.token_start, claim.token_end]
    return json.dumps([*places, one.text.decode()]).encode() + b"\n"


def _written(chunk: Mapping[str, _Held] | None, fields: tuple[str, ...]) -> ShardRecords | None:
    if chunk is None:
        return None
    texts = [chunk[name].text if name in chunk else b"" for name in fields]
    return WrittenShards(fields, texts) if any(texts) else None
