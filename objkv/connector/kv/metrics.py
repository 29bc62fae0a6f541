"""objkv's numbers in vLLM's statistics: logged per interval, and as Prometheus metrics.

Counters are named ``vllm:objkv_<name>_total``, gauges and histograms ``vllm:objkv_<name>``.
"""

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from objkv.connector.counters import BUCKETS_S, COUNTERS, GAUGES, HISTOGRAMS
from objkv.telemetry import added

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class ObjKVStats(KVConnectorStats):
    """Numbers since the last report; sums add up over workers and steps; of ``_max`` and levels
    the largest counts. What is shown as a histogram is a list of single observations."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "ObjKVStats":
        """Add another worker's, or another step's, numbers to these."""
        # Into a dict of its own: vLLM hands the same report to all of its loggers, each of which
        # adds the next ones to it. Source: vLLM 0.32, ``KVConnectorLogging`` in
        # ``distributed/kv_transfer/kv_connector/v1/metrics.py``.
        samples = {
            name: [*self.data.get(name, ()), *other.data.get(name, ())]
            for name in HISTOGRAMS
            if name in self.data or name in other.data
        }
        self.data = added(_numbers(self.data), _numbers(other.data)) | samples
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM logs for an interval."""
        known = COUNTERS.keys() | GAUGES.keys()
        shown = {name: value for name, value in self.data.items() if name in known}
        for name in HISTOGRAMS:
            if count := self.data.get(f"{name}_count"):
                shown[f"{name}_mean"] = self.data[f"{name}_sum"] / count
        return {name: round(value, 3) for name, value in sorted(shown.items())}

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data


def _numbers(data: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in data.items() if name not in HISTOGRAMS}


class ObjKVPromMetrics(KVConnectorPromMetrics):
    """``ObjKVStats`` as Prometheus metrics, per engine."""

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
        self._histograms = {
            name: self._histogram_cls(
                name=f"vllm:objkv_{name}",
                documentation=text,
                labelnames=labelnames,
                buckets=list(BUCKETS_S),
            )
            for name, text in HISTOGRAMS.items()
        }

        # From the start, at 0: of a series that begins at 1, Prometheus sees no increase.
        for labels in per_engine_labelvalues.values():
            for named in (self._counters, self._gauges, self._histograms):
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
            elif histogram := self._histograms.get(name):
                for one in value:
                    histogram.labels(*labels).observe(one)
