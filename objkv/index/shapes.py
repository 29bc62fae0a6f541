"""Which shards a namespace's replicas write: so that one asks for what others of other shapes save.

A reader asks an index for the shard fields it knows, never for whole records: it finds thousands of
chunks with one request. Replicas of another TP or PP size write other fields, which nobody could
guess. So each replica announces its own, in one record per namespace that is no chunk's: its hash
is ``SHAPES_HASH``, its fields are those that are in use, with empty shard records. In a fleet of
one shape that costs a round trip now and then, in the background, and nothing else.
"""

import hashlib
import time
from collections.abc import Callable, Collection, Sequence
from threading import Lock
from typing import Final

from objkv.errors import StoreError
from objkv.index.base import ChunkEntry, Record, ShardRecord, Shards
from objkv.index.near import NearIndex
from objkv.index.wrapped import WrappedIndex

SHAPES_HASH: Final = hashlib.sha256(b"objkv-shapes-1").digest()[:20]
FIELDS_MAX: Final = 512
"""Of all shapes together; more than that would make every lookup slow."""
_REFRESH_S = 30.0
"""For so long replicas may not know of a shape that is new to the fleet."""
_RETRY_S = 2.0


def shape_path(namespace: str, field: str) -> str:
    """Where a bulk store that is its own index says that a shard is in use."""
    return f"{namespace}/shapes/{field}"


def is_shapes(record: Record) -> bool:
    """Whether the record is no chunk's but says which shards are in use."""
    return record.prefix_hash == SHAPES_HASH


class ShapesIndex(WrappedIndex):
    """Asks ``near`` for the fields of all shapes in use, whichever it is asked for itself.

    Thread-safe; ``find`` is for background threads, and may ask the index once more.
    """

    def __init__(
        self,
        near: NearIndex,
        own: Collection[str],
        *,
        readable: Callable[[str], bool],
        complete: Callable[[Shards], bool],
        writes: bool,
        ttl_s: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            own: the fields that this replica writes.
            readable: whether a field of others can be one of this model at all.
            complete: whether some shards of a chunk are all that this replica needs.
            writes: whether to announce ``own``.
        """
        super().__init__(near)
        self._near = near
        self._own = tuple(sorted(own))
        self._readable = readable
        self._complete = complete
        self._writes = writes
        self._ttl_s = ttl_s
        self._clock = clock
        self._lock = Lock()
        self._namespace = ""
        self._fields = self._own
        self._due_s = 0.0
        self.mixed = False
        """Whether other shapes have been seen: until then all that is found is this replica's."""

    def find(
        self, namespace: str, prefix_hashes: Sequence[bytes], fields: Sequence[str]
    ) -> list[Shards | None]:
        """As the inner index, of the fields in use."""
        return self._near.find(namespace, prefix_hashes, self._in_use(namespace))

    def __repr__(self) -> str:
        return f"<ShapesIndex {len(self._fields)} fields, of {self._near!r}>"

    def _in_use(self, namespace: str) -> tuple[str, ...]:
        with self._lock:  # whoever comes first asks, and others wait: the answer decides on hits
            now = self._clock()
            if namespace != self._namespace:
                self._namespace, self._due_s = namespace, 0.0
            # Of what is due later than it can be, the clock has been set back meanwhile.
            elif now < self._due_s <= now + _REFRESH_S:
                return self._fields
            self._due_s = now + _REFRESH_S
            try:
                self._refresh(namespace, int(now))
            except StoreError:  # then as before; what is asked next will tell who cares
                self._due_s = now + _RETRY_S
            return self._fields

    def _refresh(self, namespace: str, now_s: int) -> None:
        (record,) = self._near.lookup(namespace, [SHAPES_HASH])
        shards = {} if record is None else record.shards
        others = sorted(f for f in shards if f not in self._own and self._readable(f))
        fields = (*self._own, *others[:FIELDS_MAX])
        if fields != self._fields:
            self.mixed |= bool(others)  # before anything of theirs is found
            self._fields = fields
            self._near.keep_only(fields, self._complete)
        if self._writes and not all(self._is_fresh(shards.get(f), now_s) for f in self._own):
            empty = ShardRecord(0, 0, "none", False, "", now_s)
            entry = ChunkEntry(namespace, SHAPES_HASH, SHAPES_HASH, 0, 1)
            self._near.publish(entry, dict.fromkeys(self._own, empty), ttl_s=self._ttl_s)

    def _is_fresh(self, announced: ShardRecord | None, now_s: int) -> bool:
        return announced is not None and now_s - announced.created_s < self._ttl_s // 4
