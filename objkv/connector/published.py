"""Which shards a worker announced, for whoever tells routers what is stored.

Heard at the index, where a save ends: what was put but could not be announced nobody will find, and
what another replica had put before is announced all the same.
"""

from collections.abc import Mapping
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING

from objkv.assembly.backends import Backends
from objkv.connector.metadata import StepReport, StoredShard
from objkv.index.base import ChunkEntry, PruneIndex, ShardRecord, Usage
from objkv.index.wrapped import WrappedIndex

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SHARDS_MAX = 65_536
"""Kept until the next report; more are not told of."""


class PublishedIndex(WrappedIndex):
    """Keeps which shards this process announced, until ``take``. Safe from many threads."""

    def __init__(self, inner: PruneIndex) -> None:
        super().__init__(inner)
        self._place = inner
        self._lock = Lock()
        self._published: set[StoredShard] = set()

    def publish(self, chunk: ChunkEntry, shards: Mapping[str, ShardRecord], *, ttl_s: int) -> None:
        """As the inner index; kept only if it worked."""
        super().publish(chunk, shards, ttl_s=ttl_s)
        names = {(chunk.namespace, chunk.prefix_hash, name) for name in shards}
        with self._lock:
            if len(self._published) < _SHARDS_MAX:
                self._published |= names

    def take(self) -> set[StoredShard]:
        """What was announced since the last call."""
        with self._lock:
            published, self._published = self._published, set()
        return published

    def pin(self, namespace: str, prefix_hash: bytes, *, until_s: int, ttl_s: int) -> bool:
        """As the inner index."""
        return self._place.pin(namespace, prefix_hash, until_s=until_s, ttl_s=ttl_s)

    def drop(self, namespace: str, prefix_hash: bytes) -> bool:
        """As the inner index."""
        return self._place.drop(namespace, prefix_hash)

    def set_usage(self, usage: Usage) -> None:
        """As the inner index."""
        self._place.set_usage(usage)


def watch_saves(
    backends: Backends, vllm_config: "VllmConfig"
) -> tuple[Backends, PublishedIndex | None]:
    """The backends, and what hears of all that is announced with them, if vLLM wants events."""
    if not tells_events(vllm_config):
        return backends, None
    index = PublishedIndex(backends.index)
    return replace(backends, index=index), index


def with_stored(report: StepReport | None, published: PublishedIndex | None) -> StepReport | None:
    """A worker's report, with what it announced since the last."""
    if published is not None and (stored := published.take()):
        report = report or StepReport()
        report.stored |= stored
    return report


def tells_events(vllm_config: "VllmConfig") -> bool:
    """Whether vLLM has KV events enabled."""
    events = getattr(vllm_config, "kv_events_config", None)
    return events is not None and bool(events.enable_kv_cache_events)
