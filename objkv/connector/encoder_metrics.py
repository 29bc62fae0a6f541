"""The encoder cache's numbers in vLLM's statistics: logged per interval, and as Prometheus metrics.

Counters are named ``vllm:objkv_encoder_<name>_total``, so that they can stand beside the KV
connector's.
"""

from typing import TYPE_CHECKING, Any

from vllm.distributed.ec_transfer.ec_connector.metrics import (
    ECConnectorPromMetrics,
    ECConnectorStats,
)

from objkv.connector.breaker_metrics import BREAKER_COUNTERS, BREAKER_GAUGES
from objkv.telemetry import added

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ENCODER_COUNTERS = {
    "hits": "Outputs that vLLM was told to take instead of encoding.",
    "loads": "Outputs brought in and verified.",
    "load_bytes": "Payload bytes of those.",
    "load_ghosts": "Outputs that were indexed but gone.",
    "load_corrupt": "Outputs refused: length, claim, dtype, shape or checksum.",
    "load_errors": "Outputs not brought in because a store failed.",
    "load_deadlines": "Outputs that took too long.",
    "load_refused": "Outputs not brought in: queue or memory full, stores stuck, another form.",
    "load_oversized": "Outputs too large to be brought in.",
    "load_seconds_sum": "Seconds of gets, summed.",
    "load_seconds_count": "Gets timed.",
    "lookup_errors": "Lookups that the index failed to answer.",
    "saves": "Outputs saved.",
    "save_bytes": "Payload bytes of those.",
    "save_drops": "Outputs not saved: queue or memory full, too late.",
    "save_errors": "Outputs not saved because a store failed.",
    "saves_shed": "Outputs not saved because a store was left alone, or asked too much.",
    "save_over_quota": "Outputs not saved because the quota is used up.",
    "quota_errors": "Readings of how much of the quota is used that a store failed.",
    "sweeps": "Sweeps of this machine's own folder, because it was full.",
    "sweep_errors": "Such sweeps that failed.",
    "save_existed": "Outputs that were stored already.",
    "save_repeats": "Outputs that this worker was saving, or had just saved.",
    "save_leased_elsewhere": "Outputs that another replica was saving.",
    "save_unsupported": "Outputs not saved: too large, or of a form that cannot be verified later.",
    "save_seconds_sum": "Seconds of saves, summed.",
    "save_seconds_count": "Saves timed.",
    "publish_errors": "Outputs saved but not announced.",
    "adapters_unknown": "Requests not shared because their adapter cannot be told.",
    "hot_hits": "Outputs read from the hot store.",
    "hot_misses": "Outputs promised hot that were read from bulk.",
    **BREAKER_COUNTERS,
}
_KNOWN = ENCODER_COUNTERS | BREAKER_GAUGES


class ObjKVECStats(ECConnectorStats):
    """Flat numbers since the last report; sums add up, ``_max`` and levels do not."""

    data: dict[str, float]

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: ECConnectorStats) -> "ObjKVECStats":
        """Add another's numbers to these."""
        self.data = added(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM logs for an interval."""
        shown = {name: value for name, value in self.data.items() if name in _KNOWN}
        return {
            f"objkv_encoder_{name}": round(value, 3)
            for name, value in sorted(shown.items())
            if not name.endswith("_count")
        }

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data


class ObjKVECPromMetrics(ECConnectorPromMetrics):
    """``ObjKVECStats`` as Prometheus counters and gauges, per engine."""

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
                name=f"vllm:objkv_encoder_{name}", documentation=text, labelnames=labelnames
            )
            for name, text in ENCODER_COUNTERS.items()
        }
        self._gauges = {
            name: self._gauge_cls(
                name=f"vllm:objkv_encoder_{name}",
                documentation=text,
                labelnames=labelnames,
                multiprocess_mode="mostrecent",
            )
            for name, text in BREAKER_GAUGES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if counter := self._counters.get(name):
                counter.labels(*labels).inc(value)
            elif gauge := self._gauges.get(name):
                gauge.labels(*labels).set(value)
