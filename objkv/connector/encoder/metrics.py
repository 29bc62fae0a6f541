"""The encoder cache's numbers in vLLM's statistics: logged per interval, and as Prometheus metrics.

Counters are named ``vllm:objkv_encoder_<name>_total``, so that they can stand beside the KV
connector's.
"""

from typing import TYPE_CHECKING, Any

from vllm.distributed.ec_transfer.ec_connector.metrics import (
    ECConnectorPromMetrics,
    ECConnectorStats,
)

from objkv.connector.counters import BREAKER_GAUGES, ENCODER_COUNTERS
from objkv.telemetry import added

if TYPE_CHECKING:
    from vllm.config import VllmConfig

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

        # From the start, at 0: of a series that begins at 1, Prometheus sees no increase.
        for labels in per_engine_labelvalues.values():
            for named in (self._counters, self._gauges):
                for metric in named.values():
                    metric.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if counter := self._counters.get(name):
                counter.labels(*labels).inc(value)
            elif gauge := self._gauges.get(name):
                gauge.labels(*labels).set(value)
