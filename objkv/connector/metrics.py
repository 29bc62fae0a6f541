"""The connectors' numbers in vLLM's statistics: logged per interval, and as Prometheus metrics.

vLLM requires its own classes from each connector. They share the implementation here and differ in
their ``MetricTable``.
"""

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Self

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from objkv.connector.counters import BUCKETS_S, KV_METRICS, MetricTable
from objkv.telemetry import added

if TYPE_CHECKING:
    from vllm.config import VllmConfig

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
        sampled = self.table.histograms
        samples = {
            name: [*self.data.get(name, ()), *other.data.get(name, ())]
            for name in sampled
            if name in self.data or name in other.data
        }
        numbers = (
            {name: value for name, value in data.items() if name not in sampled}
            for data in (self.data, other.data)
        )
        self.data = added(*numbers) | samples
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
    """A table's Prometheus metrics per engine. A mix-in for vLLM's classes, whose constructor sets
    these attributes."""

    table: ClassVar[MetricTable]
    per_engine_labelvalues: dict[int, list[object]]
    _counter_cls: Any
    _gauge_cls: Any
    _histogram_cls: Any

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)  # type: ignore[call-arg]

        table = self.table

        def metrics(kind: Any, texts: Mapping[str, str], **more: Any) -> dict[str, Any]:
            more["labelnames"] = labelnames
            return {
                name: kind(name=table.prefix + name, documentation=text, **more)
                for name, text in texts.items()
            }

        self._counters = metrics(self._counter_cls, table.counters)
        self._gauges = metrics(self._gauge_cls, table.gauges, multiprocess_mode=_LATEST)
        self._histograms = metrics(self._histogram_cls, table.histograms, buckets=list(BUCKETS_S))
        for labels in per_engine_labelvalues.values():
            for metric in chain(
                *map(dict.values, (self._counters, self._gauges, self._histograms))
            ):
                metric.labels(*labels)  # start at 0, otherwise Prometheus misses the first increase

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


class ObjKVStats(TableStats, KVConnectorStats):
    """Statistics of the KV connector."""

    table = KV_METRICS


class ObjKVPromMetrics(TableMetrics, KVConnectorPromMetrics):
    """Prometheus metrics of the KV connector."""

    table = KV_METRICS
