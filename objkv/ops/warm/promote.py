"""``warm --promote``: copies payloads from the bulk store to the hot store, without an engine.

Uses the same leases and checks as replicas that promote often loaded payloads, but immediately.
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
"""Fewer than the capacity of a promoter's queue."""
_DRAIN_S = 120.0


@dataclass(slots=True)
class PromoteReport:
    """The outcome for the selected payloads."""

    payloads: int = 0
    hot_before: int = 0
    promoted: int = 0
    promoted_bytes: int = 0
    too_large: int = 0
    """Larger than ``hot_payload_bytes_max``: no replica keeps such payloads hot either."""
    over_budget: int = 0
    """Not copied because of the byte limit."""
    failed: int = 0

    @property
    def done(self) -> int:
        """Payloads processed so far."""
        return self.hot_before + self.promoted + self.too_large + self.over_budget + self.failed


@dataclass(frozen=True, slots=True)
class PromotionItem:
    """A payload to promote."""

    claim: Claim
    nbytes: int
    is_hot: bool
    """The ``hot`` flag of its record."""


def wanted_of(namespace: str, records: Iterable[Record]) -> Iterator[PromotionItem]:
    """Yield the payloads of these records."""
    for record in records:
        if is_shapes(record):  # lists the shapes in use, and has no payloads
            continue
        for key in record_keys(namespace, record):
            claim = Claim(key, record.parent_hash, record.token_start, record.token_end)
            shard = record.shards[key.field]
            yield PromotionItem(claim, shard.nbytes, shard.hot)


class Promotion:
    """Copies payloads with several workers. For one calling thread."""

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
        """Promote the payloads in order, at most ``bytes_max``. Raises ``StoreError``."""
        every = self._chosen(wanted, bytes_max)
        while batch := list(islice(every, _BATCH * len(self._promoters))):
            parts = [batch[n :: len(self._promoters)] for n in range(len(self._promoters))]
            pool = ThreadPoolExecutor(len(self._promoters))
            try:
                list(pool.map(_copy, self._promoters, parts))
                heads = list(pool.map(self._is_hot, batch))
            except BaseException:  # such as an interrupt: draining would wait for queued copies
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
                    why = "not hot: it was deleted, is damaged, or is being changed"
                    self.failures.append((one.claim.key.path(), why))
            on_progress(self.report)

    def close(self) -> None:
        """Drop queued copies and end the threads. Idempotent."""
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
        """Whether the record's flag is set and the hot store has a copy."""
        key = one.claim.key
        _, shard = recorded(self._view.index, key)
        return shard is not None and shard.hot and self._has_copy(key)


def _copy(promoter: Promoter, part: Sequence[PromotionItem]) -> None:
    for one in part:
        promoter.loaded(one.claim, one.nbytes)
    promoter.drain(_DRAIN_S)


def by_use(records: Iterable[Record]) -> Sequence[Record]:
    """Sort records by hits, highest first, and by position in the prompt."""
    return sorted(records, key=lambda record: (-record.hits, record.token_start))
