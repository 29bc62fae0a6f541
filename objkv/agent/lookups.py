"""Lookups of all replicas of a node, with one near cache for each model and set of shards."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

from objkv.index.base import Shards, WriteIndex
from objkv.index.fields import WrittenShards, encode_shard
from objkv.index.guarded import GuardedIndex
from objkv.index.near import NearIndex

_CACHES_MAX = 32


@dataclass(frozen=True, slots=True)
class NearLimits:
    """Bounds of each near cache, see ``NearIndex``."""

    records_max: int
    ttl_s: float
    miss_ttl_s: float


class _WrittenIndex(GuardedIndex):
    """Returns encoded shards, so that they are encoded once and not for each client."""

    def find(
        self, namespace: str, prefix_hashes: Sequence[bytes], fields: Sequence[str]
    ) -> list[Shards | None]:
        """See ``ReadIndex.find``."""
        names = tuple(fields)
        return [
            None if shards is None else _written(names, shards)
            for shards in super().find(namespace, prefix_hashes, fields)
        ]


def _written(fields: tuple[str, ...], shards: Shards) -> WrittenShards:
    if isinstance(shards, WrittenShards):
        return shards
    texts = [encode_shard(shards[name]) if name in shards else b"" for name in fields]
    return WrittenShards(fields, texts)


class NodeLookups:
    """Answers ``find`` from near caches of ``index``. Thread-safe."""

    def __init__(self, index: WriteIndex, limits: NearLimits) -> None:
        self._index, self._limits = _WrittenIndex(index), limits
        self._lock = Lock()
        self._caches: OrderedDict[tuple[str, tuple[str, ...]], NearIndex] = OrderedDict()

    def find(
        self, namespace: str, prefix_hashes: Sequence[bytes], fields: tuple[str, ...]
    ) -> list[Shards | None]:
        """See ``ReadIndex.find``."""
        with self._lock:
            cache = self._caches.get((namespace, fields))
            if cache is None:
                cache = self._caches[namespace, fields] = self._open(fields)
                if len(self._caches) > _CACHES_MAX:
                    self._caches.popitem(last=False)
            else:
                self._caches.move_to_end((namespace, fields))
        return cache.find(namespace, prefix_hashes, fields)

    def invalidate(self, namespace: str, prefix_hash: bytes) -> None:
        """Discard the kept records of a chunk."""
        with self._lock:
            caches = [cache for (name, _), cache in self._caches.items() if name == namespace]
        for cache in caches:
            cache.invalidate(namespace, prefix_hash)

    def _open(self, fields: tuple[str, ...]) -> NearIndex:
        limits = self._limits
        return NearIndex(
            self._index,
            records_max=limits.records_max,
            ttl_s=limits.ttl_s,
            fields=fields,
            miss_ttl_s=limits.miss_ttl_s,
        )
