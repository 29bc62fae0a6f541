"""objkv's numbers in vLLM's statistics: logged per interval, and as Prometheus metrics.

Counters are named ``vllm:objkv_<name>_total``, gauges ``vllm:objkv_<name>``; durations are kept
as ``_seconds`` sums and counts.
"""

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from objkv.codec.payload import CODECS
from objkv.connector.breaker_metrics import BREAKER_COUNTERS, BREAKER_GAUGES
from objkv.telemetry import added

if TYPE_CHECKING:
    from vllm.config import VllmConfig

COUNTERS = {
    "hit_tokens": "Tokens that vLLM was told to load instead of computing.",
    "admission_refused": "Matches not loaded, because computing them was measured to be sooner.",
    "admission_cut": "Matches of which a tail was not loaded, for the same reason.",
    "admission_refused_tokens": "Tokens computed for that reason although they were stored.",
    "loads": "Load plans that ended, one per request and worker.",
    "load_bytes": "Payload bytes brought in and verified.",
    "load_failures": "Load plans of which something had to be recomputed.",
    "load_failed_blocks": "Blocks recomputed after a failed load.",
    "load_ghosts": "Payloads that were indexed but gone.",
    "load_corrupt": "Payloads refused: length, claim or checksum.",
    "load_errors": "Loads that failed for another reason: store, deadline, no slab.",
    "load_given_up": "Payloads not read to their end, because nobody waited for them any more.",
    "load_refused": "Chunks not loaded because the queue was full.",
    "load_seconds_sum": "Seconds from plan to last byte, summed.",
    "load_seconds_count": "Load plans timed.",
    "lookup_errors": "Lookups that the index failed to answer.",
    "lookup_deadlines": "Lookups that took too long.",
    "lookup_refused": "Lookups not made because the queue was full.",
    "lookup_seconds_sum": "Seconds of lookups, summed.",
    "lookup_seconds_count": "Lookups answered.",
    "adapters_unknown": "Requests not shared because their adapter cannot be told.",
    "saves": "Payloads saved.",
    "save_bytes": "Payload bytes saved.",
    "save_drops": "Chunks not saved: no slab, queue full, too late.",
    "save_drop_bytes": "Bytes of those chunks, uncompressed.",
    "save_errors": "Chunks not saved because a store failed.",
    "saves_shed": "Chunks not saved because the store was left alone, or asked too much.",
    "save_over_quota": "Chunks not saved because the quota is used up.",
    "quota_errors": "Readings of how much of the quota is used that a store failed.",
    "sweeps": "Sweeps of this machine's own folder, because it was full.",
    "sweep_errors": "Such sweeps that failed.",
    "save_repeats": "Chunks that this worker was saving, or had just saved, for another request.",
    "save_existed": "Chunks that were stored already.",
    "save_leased_elsewhere": "Chunks that another replica was saving.",
    "save_seconds_sum": "Seconds of saves, summed.",
    "save_seconds_count": "Saves timed.",
    "publish_errors": "Payloads saved but not announced.",
    "hot_hits": "Payloads read from the hot store.",
    "hot_misses": "Payloads promised hot that were read from bulk.",
    "hot_errors": "Calls to the hot store that failed: bulk was asked instead, or no copy made.",
    "lease_errors": "Leases that the index failed to give or take back: saved without.",
    "forget_errors": "Records of payloads found missing or corrupt that could not be removed.",
    "background_errors": "Marks that a record was used, and the like, that failed.",
    "hot_promotions": "Payloads copied to the hot store because they were loaded often.",
    "hot_promoted_bytes": "Payload bytes copied so.",
    "hot_promote_drops": "Such copies not made because the queue was full.",
    "hot_promote_errors": "Such copies not made because of a store or a bad payload.",
    **{f"save_codec_{codec}": f"Payloads saved whose frames are all {codec}." for codec in CODECS},
    "save_codec_mixed": "Payloads saved with frames of a codec and frames that gained too little.",
    **BREAKER_COUNTERS,
}
GAUGES = BREAKER_GAUGES


class ObjKVStats(KVConnectorStats):
    """Flat numbers since the last report; sums add up over workers and steps; of ``_max`` and
    levels the largest counts."""

    data: dict[str, float]

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "ObjKVStats":
        """Add another worker's, or another step's, numbers to these."""
        # Into a dict of its own: vLLM hands the same report to all of its loggers, each of which
        # adds the next ones to it. Source: vLLM 0.32, ``KVConnectorLogging`` in
        # ``distributed/kv_transfer/kv_connector/v1/metrics.py``.
        self.data = added(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM logs for an interval."""
        known = COUNTERS.keys() | GAUGES.keys()
        shown = {k: v for k, v in self.data.items() if k in known and not k.endswith("_count")}
        return {name: round(value, 3) for name, value in sorted(shown.items())}

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data


class ObjKVPromMetrics(KVConnectorPromMetrics):
    """``ObjKVStats`` as Prometheus counters and gauges, per engine."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(
                name=f"vllm:objkv_{name}", documentation=text, labelnames=labelnames
            )
            for name, text in COUNTERS.items()
        }
        self._gauges = {
            name: self._gauge_cls(
                name=f"vllm:objkv_{name}",
                documentation=text,
                labelnames=labelnames,
                multiprocess_mode="mostrecent",
            )
            for name, text in GAUGES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if counter := self._counters.get(name):
                counter.labels(*labels).inc(value)
            elif gauge := self._gauges.get(name):
                gauge.labels(*labels).set(value)
