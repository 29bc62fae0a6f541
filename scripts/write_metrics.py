"""Writes ``docs/metrics.md`` from the tables of names themselves, so that it cannot drift.

python scripts/write_metrics.py; ``tests/test_metrics_page.py`` fails when the page is stale.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from objkv.connector.counters import BUCKETS_S, COUNTERS, ENCODER_COUNTERS, GAUGES, HISTOGRAMS
from objkv.connector.tier.metrics import COUNTERS as TIER_COUNTERS
from objkv.connector.tier.metrics import GAUGES as TIER_GAUGES
from objkv.ops.exporter.metrics import METRICS

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
HEAD = Path(__file__).with_name("metrics_page.txt")

Row = tuple[str, str, str]
"""Name, kind, meaning."""


def counters(names: Mapping[str, str], prefix: str) -> Iterator[Row]:
    """Counters as Prometheus shows them."""
    return ((f"{prefix}{name}_total", "counter", text) for name, text in names.items())


def gauges(names: Mapping[str, str], prefix: str) -> Iterator[Row]:
    """Levels."""
    return ((f"{prefix}{name}", "gauge", text) for name, text in names.items())


def histograms() -> Iterator[Row]:
    """Durations; Prometheus shows each as ``_bucket``, ``_sum`` and ``_count``."""
    return ((f"vllm:objkv_{name}", "histogram", text) for name, text in HISTOGRAMS.items())


def exporter() -> Iterator[Row]:
    """What the exporter tells, with its labels."""
    for name, metric in METRICS.items():
        labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
        yield name + labels, metric.kind, metric.text


def table(rows: Iterable[Row]) -> str:
    """One table, in the order given."""
    lines = ["| Name | Kind | Meaning |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {kind} | {text} |" for name, kind, text in rows)])


def page() -> str:
    """The whole page."""
    kv = "vllm:objkv_"
    parts = {
        "kv": [*counters(COUNTERS, kv), *gauges(GAUGES, kv), *histograms()],
        "encoder": [
            *counters(ENCODER_COUNTERS, "vllm:objkv_encoder_"),
            *gauges(GAUGES, "vllm:objkv_encoder_"),
        ],
        "tier": [*counters(TIER_COUNTERS, kv), *gauges(TIER_GAUGES, kv)],
        "exporter": exporter(),
    }
    text = HEAD.read_text()
    for name, rows in parts.items():
        text = text.replace(f"<!-- table: {name} -->", table(rows))
    return text.replace("<!-- buckets -->", ", ".join(f"{bound:g}" for bound in BUCKETS_S))


if __name__ == "__main__":
    PAGE.write_text(page())
