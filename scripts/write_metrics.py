"""The tables in ``docs/metrics.md``, from those of metrics."""

from collections.abc import Iterable, Iterator
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

Row = tuple[str, str]
"""Name and meaning."""


def connector(metrics: MetricTable) -> Iterator[Row]:
    """Yield a connector's metrics as Prometheus shows them. A histogram also has the suffixes
    ``_bucket``, ``_sum`` and ``_count``."""
    for name, text in metrics.counters.items():
        yield f"{metrics.prefix}{name}_total", text
    for name, text in (metrics.gauges | metrics.histograms).items():
        yield f"{metrics.prefix}{name}", text


def exporter() -> Iterator[Row]:
    """Yield the exporter's metrics with their labels."""
    for name, metric in METRICS.items():
        labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
        yield name + labels, metric.text


def agent() -> Iterator[Row]:
    """Yield a node agent's own metrics."""
    for name, text in LEVELS.items():
        yield PREFIX + name, text
    for name, text in TOTALS.items():
        yield f"{PREFIX}{name}_total", text
    for name, text in DECISIONS.items():
        yield f"{PREFIX}{name}{{namespace}}", text


def table(rows: Iterable[Row]) -> str:
    """One table, in the order given."""
    lines = ["| Name | Meaning |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {text} |" for name, text in rows)])


def blocks() -> dict[str, str]:
    """The tables, and the buckets."""
    tables = {
        "kv": connector(KV_METRICS),
        "encoder": connector(ENCODER_METRICS),
        "tier": connector(TIER_METRICS),
        "exporter": exporter(),
        "agent": agent(),
    }
    buckets = ", ".join(f"{bound:g}" for bound in BUCKETS_S)
    return {"buckets": buckets} | {f"table: {name}": table(rows) for name, rows in tables.items()}
