"""``warm --promote``: copies what is stored in bulk to the hot store as well, without an engine.

As replicas do with payloads that they load often, under the same leases and checks, but at once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice

from objkv.cache.promotion import HotLimits, Promoter
from objkv.codec.payload import Claim
from objkv.codec.seal import Seal
from objkv.index.base import Record
from objkv.index.shapes import is_shapes
from objkv.keys.chunk import ChunkKey
from objkv.ops.backends_view import BackendsView, record_keys, recorded
from objkv.telemetry import MemoryRecorder

_BATCH = 48
"""Fewer than a promoter's queue has room for."""
_DRAIN_S = 120.0


@dataclass(slots=True)
class PromoteReport:
    """What became of the payloads that were to be hot."""

    payloads: int = 0
    hot_before: int = 0
    promoted: int = 0
    promoted_bytes: int = 0
    too_large: int = 0
    """Larger than ``hot_payload_bytes_max``: no replica keeps such payloads hot either."""
    over_budget: int = 0
    """Beyond what was allowed."""
    failed: int = 0

    @property
    def done(self) -> int:
        """Payloads that were looked at."""
        return self.hot_before + self.promoted + self.too_large + self.over_budget + self.failed


@dataclass(frozen=True, slots=True)
class PromotionItem:
    """A payload that is to be hot."""

    claim: Claim
    nbytes: int
    is_hot: bool
    """As its record says."""


def wanted_of(namespace: str, records: Iterable[Record]) -> Iterator[PromotionItem]:
    """The payloads that these records promise."""
    for record in records:
        if is_shapes(record):  # says which shapes are in use, and promises nothing
            continue
        for key in record_keys(namespace, record):
            claim = Claim(key, record.parent_hash, record.token_start, record.token_end)
            shard = record.shards[key.field]
            yield PromotionItem(claim, shard.nbytes, shard.hot)


class Promotion:
    """Copies payloads, many at a time. One thread uses it."""

    def __init__(
        self, view: BackendsView, limits: HotLimits, *, seal: Seal | None = None, workers: int = 8
    ) -> None:
        assert view.hot is not None
        self._view = view
        self._limits = limits
        self.report = PromoteReport()
        self.failures: list[tuple[str, str]] = []
        at_once = replace(limits, promote_loads=1, promote_bytes_max=1 << 62)
        self._promoters = [
            Promoter(
                view.bulk,
                view.hot,
                view.index,
                at_once,
                ttl_s=view.ttl_s,
                lease_ms=view.lease_ms,
                recorder=MemoryRecorder(),
                seal=seal,
            )
            for _ in range(workers)
        ]

    def run(
        self,
        wanted: Iterable[PromotionItem],
        *,
        bytes_max: int | None = None,
        on_progress: Callable[[PromoteReport], None] = lambda report: None,
    ) -> None:
        """Have them hot, in order, ``bytes_max`` at most. Raises ``StoreError``."""
        every = self._chosen(wanted, bytes_max)
        while batch := list(islice(every, _BATCH * len(self._promoters))):
            parts = [batch[n :: len(self._promoters)] for n in range(len(self._promoters))]
            pool = ThreadPoolExecutor(len(self._promoters))
            try:
                list(pool.map(_copy, self._promoters, parts))
                heads = list(pool.map(self._is_hot, batch))
            except BaseException:  # an interruption, say: who drains waits for what is queued
                self._drop()
                raise
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
            for one, is_hot in zip(batch, heads, strict=True):
                if is_hot:
                    self.report.promoted += 1
                    self.report.promoted_bytes += one.nbytes
                else:
                    self.report.failed += 1
                    why = "is not hot: it is gone, damaged, or being changed right now"
                    self.failures.append((one.claim.key.path(), why))
            on_progress(self.report)

    def close(self) -> None:
        """Drop what waits, and end the threads. Idempotent."""
        self._drop()
        for promoter in self._promoters:
            promoter.close(_DRAIN_S)

    def _drop(self) -> None:
        for promoter in self._promoters:
            promoter.close(0)

    def _chosen(
        self, wanted: Iterable[PromotionItem], bytes_max: int | None
    ) -> Iterator[PromotionItem]:
        report, left = self.report, bytes_max
        for one in wanted:
            report.payloads += 1
            if one.nbytes > self._limits.payload_bytes_max:
                report.too_large += 1
            elif one.is_hot and self._has_copy(one.claim.key):
                report.hot_before += 1
            elif left is not None and one.nbytes > left:
                report.over_budget += 1
            else:
                left = None if left is None else left - one.nbytes
                yield one

    def _has_copy(self, key: ChunkKey) -> bool:
        assert self._view.hot is not None
        return self._view.hot.head(key.path()) is not None

    def _is_hot(self, one: PromotionItem) -> bool:
        """Whether a reader would find it hot now: by its record, and there."""
        key = one.claim.key
        _, shard = recorded(self._view.index, key)
        return shard is not None and shard.hot and self._has_copy(key)


def _copy(promoter: Promoter, part: Sequence[PromotionItem]) -> None:
    for one in part:
        promoter.loaded(one.claim, one.nbytes)
    promoter.drain(_DRAIN_S)


def by_use(records: Iterable[Record]) -> Sequence[Record]:
    """Those that are hit most first, and a chunk before those that continue it."""
    return sorted(records, key=lambda record: (-record.hits, record.token_start))
