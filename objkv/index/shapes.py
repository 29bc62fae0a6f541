"""The shards that a namespace's replicas write, so that a reader also finds chunks of other shapes.

A reader queries an index by shard field instead of reading whole records, because one query covers
thousands of chunks. Replicas with another TP or PP size write other fields, which a reader cannot
guess. So each replica announces its own fields in one special record per namespace. Its hash is
``SHAPES_HASH``, and its fields are the ones in use, with empty shard records. A reader that finds
chunks of another shape keeps its fields alive, just as hits keep chunks alive. Fields that no
replica writes or finds expire. In a fleet with one shape this costs an occasional round trip in the
background.
"""

import hashlib
import time
from collections.abc import Callable, Collection, Sequence
from typing import Final

from objkv.background import Steps, in_steps
from objkv.errors import StoreError
from objkv.index.base import ChunkEntry, Record, ShardRecord, Shards, WriteIndex

SHAPES_HASH: Final = hashlib.sha256(b"objkv-shapes-1").digest()[:20]
FIELDS_MAX: Final = 512
"""Maximum number of fields of all shapes together; more would slow down every lookup."""
_REFRESH_S = 30.0
"""How long replicas may be unaware of a shape that is new to the fleet."""
_RETRY_S = 2.0


def shape_path(namespace: str, field: str) -> str:
    """Return the path at which a bulk store that is its own index marks a shard as in use."""
    return f"{namespace}/shapes/{field}"


def is_shapes(record: Record) -> bool:
    """Whether the record lists the shards in use instead of describing a chunk."""
    return record.prefix_hash == SHAPES_HASH


class ShapesIndex:
    """Queries ``inner`` for the fields of all shapes in use, whatever fields the caller requests.

    ``find`` is for one background thread, which may have begun several. It may make one more query.
    """

    def __init__(
        self,
        inner: WriteIndex,
        own: Collection[str],
        *,
        readable: Callable[[str], bool],
        writes: bool,
        ttl_s: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Args:
        own: the fields that this replica writes.
        readable: whether another replica's field can belong to this model at all.
        writes: whether to announce ``own``.
        """
        self._inner = inner
        self._own = tuple(sorted(own))
        self._readable = readable
        self._writes = writes
        self._ttl_s = ttl_s
        self._clock = clock
        self._namespace: str | None = None
        self._known = self._asking = False
        self._fields = self._own
        self._found: set[str] = set()
        """Fields of other replicas that lookups found recently."""
        self._due_s = 0.0
        self.mixed = False
        """Whether other shapes have been seen. Until then, everything found belongs to this
        replica's shape."""

    def find(
        self, namespace: str, prefix_hashes: Sequence[bytes], fields: Sequence[str]
    ) -> Steps[list[Shards | None]]:
        """Find the shards of all fields in use."""
        in_use = yield from self._in_use(namespace)
        found = yield from in_steps(self._inner.find(namespace, prefix_hashes, in_use))
        if self.mixed and found and found[0]:
            self._found.update(found[0])
        return found

    def __repr__(self) -> str:
        return f"<ShapesIndex {len(self._fields)} fields, of {self._inner!r}>"

    def _in_use(self, namespace: str) -> Steps[tuple[str, ...]]:
        is_known = self._known and namespace == self._namespace
        if is_known and (self._asking or self._is_early()):
            return self._fields
        # Until anything is known, all lookups that begin ask: the result decides about all hits.
        self._known, self._namespace, self._asking = is_known, namespace, True
        wait_s = _RETRY_S
        try:
            fields = yield from self._ask(namespace)
            if namespace == self._namespace:
                wait_s = _REFRESH_S
                self._take(fields)
        except StoreError:  # continue as before; the next query reports the error to its caller
            pass
        finally:
            self._asking, self._known = False, True
            self._due_s = self._clock() + wait_s
        return self._fields

    def _is_early(self) -> bool:
        now = self._clock()
        # A due time beyond the maximum means that the clock was set back meanwhile.
        return now < self._due_s <= now + _REFRESH_S

    def _take(self, fields: tuple[str, ...]) -> None:
        if fields != self._fields:
            self.mixed |= len(fields) > len(self._own)  # before any of their chunks are found
            self._fields = fields

    def _ask(self, namespace: str) -> Steps[tuple[str, ...]]:
        """Return the fields in use. Announce this replica's fields, and those it found, when they
        get old."""
        (record,) = yield from in_steps(self._inner.lookup(namespace, [SHAPES_HASH]))
        now_s = int(self._clock())
        ages = {f: now_s - s.created_s for f, s in (record.shards if record else {}).items()}
        used, self._found = self._found.difference(self._own), set()
        if self._writes:
            used |= set(self._own)
        if stale := [f for f in used if ages.get(f, self._ttl_s) >= self._ttl_s // 4]:
            empty = ShardRecord(0, 0, "none", False, "", now_s)
            entry = ChunkEntry(namespace, SHAPES_HASH, SHAPES_HASH, 0, 1)
            publish = self._inner.publish
            yield from in_steps(publish(entry, dict.fromkeys(stale, empty), ttl_s=self._ttl_s))
        ages |= dict.fromkeys(stale, 0)
        others = [f for f in ages if f not in self._own and self._readable(f)]
        alive = sorted(f for f in others if ages[f] < self._ttl_s)
        # If there are too many, keep those that were written or found last.
        youngest = sorted(alive, key=lambda f: ages[f])[:FIELDS_MAX]
        return (*self._own, *sorted(youngest))
