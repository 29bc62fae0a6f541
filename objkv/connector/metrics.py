"""The connectors' numbers in vLLM's statistics: logged per interval, and as Prometheus metrics.
vLLM requires classes of its own from each connector, which differ in their ``MetricTable``."""

from typing import Any, ClassVar, Self

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from objkv.connector.counters import BUCKETS_S, KV_METRICS, MetricTable
from objkv.telemetry import added

_LATEST = "mostrecent"
"""How gauges of several processes are combined."""


class TableStats:
    """Numbers since the last report. Sums are added over workers and steps; for ``_max`` and levels
    the largest value is kept. Histograms are lists of single observations."""

    table: ClassVar[MetricTable]
    logged_prefix: ClassVar = ""
    data: dict[str, Any]

    def reset(self) -> None:
        """Clear all numbers."""
        self.data = {}

    def aggregate(self, other: Any) -> Self:
        """Add the numbers of another worker or step."""
        # Use a new dict: vLLM passes the same report to all of its loggers, and each of them adds
        # later reports to it. Source: vLLM 0.32, ``KVConnectorLogging`` in
        # ``distributed/kv_transfer/kv_connector/v1/metrics.py``.
        both = self.data, other.data
        samples = {
            name: [one for data in both for one in data.get(name, ())]
            for name in self.table.histograms
        }
        numbers = ({n: value for n, value in data.items() if n not in samples} for data in both)
        self.data = added(*numbers) | {name: found for name, found in samples.items() if found}
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the numbers that vLLM logs for an interval."""
        known = self.table.counters.keys() | self.table.gauges.keys()
        shown = {
            name: value
            for name, value in self.data.items()
            if name in known and not name.endswith("_count")
        }
        for name in self.table.histograms:
            if count := self.data.get(f"{name}_count"):
                shown[f"{name}_mean"] = self.data[f"{name}_sum"] / count
        return {f"{self.logged_prefix}{name}": round(shown[name], 3) for name in sorted(shown)}

    def is_empty(self) -> bool:
        """Whether nothing was recorded."""
        return not self.data


class TableMetrics:
    """A table's Prometheus metrics. A mix-in for vLLM's classes, which set its attributes."""

    table: ClassVar[MetricTable]
    per_engine_labelvalues: dict[int, list[object]]
    _labelnames: list[str]
    _counter_cls: Any
    _gauge_cls: Any
    _histogram_cls: Any

    def __init__(self, *args: Any) -> None:
        """See vLLM's class."""
        super().__init__(*args)
        table = self.table
        kinds: tuple[tuple[Any, dict[str, str], dict[str, Any]], ...] = (
            (self._counter_cls, table.counters, {}),
            (self._gauge_cls, table.gauges, {"multiprocess_mode": _LATEST}),
            (self._histogram_cls, table.histograms, {"buckets": list(BUCKETS_S)}),
        )
        self._metrics: dict[str, Any] = {}
        for kind, texts, more in kinds:
            for name, text in texts.items():
                more |= {"documentation": text, "labelnames": self._labelnames}
                metric = self._metrics[name] = kind(name=table.prefix + name, **more)
                for labels in self.per_engine_labelvalues.values():
                    metric.labels(*labels)  # 0, otherwise Prometheus misses the first increase

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name in transfer_stats_data.keys() & self._metrics.keys():
            metric, value = self._metrics[name].labels(*labels), transfer_stats_data[name]
            if name in self.table.counters:
                metric.inc(value)
            elif name in self.table.gauges:
                metric.set(value)
            else:
                for one in value:
                    metric.observe(one)


class ObjKVStats(TableStats, KVConnectorStats):
    """Statistics of the KV connector."""

    table = KV_METRICS


class ObjKVPromMetrics(TableMetrics, KVConnectorPromMetrics):
    """Prometheus metrics of the KV connector."""

    table = KV_METRICS
