"""The tables in ``docs/metrics.md``, from those of metrics."""

from collections.abc import Iterator
from pathlib import Path

from objkv.agent.http.metrics import DECISIONS, LEVELS, PREFIX, TOTALS
from objkv.connector.counters import (
    BUCKETS_S,
    ENCODER_METRICS,
    KV_METRICS,
    TIER_METRICS,
    MetricTable,
)
from objkv.ops.exporter.metrics import METRICS

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"


def connector(metrics: MetricTable) -> Iterator[tuple[str, str]]:
    """A connector's metrics as Prometheus shows them. A histogram also has the suffixes
    ``_bucket``, ``_sum`` and ``_count``."""
    for name, text in metrics.counters.items():
        yield f"{metrics.prefix}{name}_total", text
    for name, text in (metrics.gauges | metrics.histograms).items():
        yield f"{metrics.prefix}{name}", text


def exporter() -> Iterator[tuple[str, str]]:
    """The exporter's metrics with their labels."""
    for name, metric in METRICS.items():
        yield name + (f"{{{','.join(metric.labels)}}}" if metric.labels else ""), metric.text


def agent() -> Iterator[tuple[str, str]]:
    """A node agent's own metrics."""
    for metrics, suffix in ((LEVELS, ""), (TOTALS, "_total"), (DECISIONS, "{namespace}")):
        for name, text in metrics.items():
            yield f"{PREFIX}{name}{suffix}", text


def blocks() -> dict[str, str]:
    """The tables, and the buckets."""
    found = {"buckets": ", ".join(f"{bound:g}" for bound in BUCKETS_S)}
    tables = {
        "kv": connector(KV_METRICS),
        "encoder": connector(ENCODER_METRICS),
        "tier": connector(TIER_METRICS),
        "exporter": exporter(),
        "agent": agent(),
    }
    for title, rows in tables.items():
        lines = ("| Name | Meaning |", "|---|---|", *(f"| `{n}` | {text} |" for n, text in rows))
        found[f"table: {title}"] = "\n".join(lines)
    return found
