"""Writes ``examples/monitoring/objkv-dashboard.json``: every panel is a few lines here.

python scripts/write_dashboard.py; ``tests/monitoring`` fails when the file is stale, when a query
does not parse, or names a metric that nobody tells.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "examples" / "monitoring" / "objkv-dashboard.json"
REPLICA = '{model_name=~"$model",instance=~"$instance"}'
SOURCE = {"type": "prometheus", "uid": "$datasource"}
WIDTH = 24
Query = tuple[str, str]
"""Legend and PromQL."""


@dataclass(frozen=True)
class Panel:
    """One picture."""

    title: str
    text: str
    queries: Sequence[Query]
    unit: str = "short"
    kind: str = "timeseries"
    stack: bool = False
    width: int = 8
    height: int = 8
    most: float | None = None


def rate(name: str) -> str:
    """Per second, over all replicas shown."""
    return f"sum(rate(vllm:objkv_{name}_total{REPLICA}[$__rate_interval]))"


def share(part: str, whole: str) -> str:
    """Of what was asked lately; nothing where nothing was."""
    return f"({part}) / (({whole}) > 0)"


def quantiles(name: str) -> list[Query]:
    """How long half, and how long 99 of 100, take at most."""
    buckets = f"sum by (le) (rate(vllm:{name}_bucket{REPLICA}[$__rate_interval]))"
    return [(f"p{q * 100:g}", f"histogram_quantile({q}, {buckets})") for q in (0.5, 0.99)]


LOCAL, HIT, ASKED = rate("local_hit_tokens"), rate("hit_tokens"), rate("query_tokens")
OF_THE_STORE = "max by (namespace, tenant, model)"

ROWS: dict[str, list[Panel]] = {
    "What it is good for": [
        Panel(
            "Tokens not computed",
            "Of the tokens of all requests, those that the replica had itself or objkv brought.",
            [("", share(f"{LOCAL} + {HIT}", ASKED))],
            unit="percentunit",
            kind="stat",
            width=4,
            height=4,
            most=1,
        ),
        Panel(
            "objkv's hit rate",
            "Of the tokens that replicas did not have themselves, those that objkv brought.",
            [("", share(HIT, f"{ASKED} - {LOCAL}"))],
            unit="percentunit",
            kind="stat",
            width=4,
            height=4,
            most=1,
        ),
        Panel(
            "Loaded",
            "Verified payload bytes a second, over all replicas.",
            [("", rate("load_bytes"))],
            unit="Bps",
            kind="stat",
            width=4,
            height=4,
        ),
        Panel(
            "Stored",
            "Payload bytes that the index knows of.",
            [("", f"sum({OF_THE_STORE} (objkv_stored_bytes))")],
            unit="bytes",
            kind="stat",
            width=4,
            height=4,
        ),
        Panel(
            "Replicas",
            "Replicas whose metrics Prometheus has.",
            [("", f"count(count by (instance) (vllm:objkv_queries_total{REPLICA}))")],
            kind="stat",
            width=4,
            height=4,
        ),
        Panel(
            "Ends that answer",
            "Bulk store, index and hot store, as the exporter sees them. Less than 1: see below.",
            [("", "avg(max by (end) (objkv_up))")],
            unit="percentunit",
            kind="stat",
            width=4,
            height=4,
            most=1,
        ),
        Panel(
            "Where tokens come from",
            "Computed, in the replica's own cache, or loaded: as the index promised it.",
            [
                ("computed", f"clamp_min({ASKED} - {LOCAL} - {HIT}, 0)"),
                ("replica's own", LOCAL),
                ("objkv, hot", rate("hit_hot_tokens")),
                ("objkv, bulk", rate("hit_bulk_tokens")),
            ],
            unit="cps",
            stack=True,
            width=12,
        ),
        Panel(
            "Bytes moved",
            "Loads by where they came from in the end; saves as positive numbers, too.",
            [
                ("loaded, hot", rate("hot_load_bytes")),
                ("loaded, bulk", rate("bulk_load_bytes")),
                ("saved", rate("save_bytes")),
                ("promoted to hot", rate("hot_promoted_bytes")),
            ],
            unit="Bps",
            width=12,
        ),
    ],
    "How fast": [
        Panel("Loads take", "From plan to last byte.", quantiles("objkv_load_seconds"), unit="s"),
        Panel(
            "Lookups take", "Until the index answered.", quantiles("objkv_lookup_seconds"), unit="s"
        ),
        Panel("Saves take", "In the background.", quantiles("objkv_save_seconds"), unit="s"),
        Panel(
            "Time to first token",
            "What users feel, by vLLM.",
            quantiles("time_to_first_token_seconds"),
            unit="s",
        ),
        Panel(
            "Not loaded on purpose",
            "Stored tokens that were measured to be sooner computed than loaded.",
            [("refused", rate("admission_refused_tokens"))],
            unit="cps",
        ),
        Panel(
            "Hot copies that were there",
            "Of the payloads that the index promised in the hot store.",
            [("", share(rate("hot_hits"), f"{rate('hot_hits')} + {rate('hot_misses')}"))],
            unit="percentunit",
            most=1,
        ),
    ],
    "What goes wrong": [
        Panel(
            "Loads that became misses",
            "Per second, by reason. All of them are computed instead.",
            [
                ("gone", rate("load_ghosts")),
                ("corrupt", rate("load_corrupt")),
                ("store or deadline", rate("load_errors")),
                ("queue full", rate("load_refused")),
                ("lookup late", rate("lookup_deadlines")),
                ("lookup failed", rate("lookup_errors")),
            ],
            unit="cps",
        ),
        Panel(
            "Saves that were dropped",
            "Per second, by reason. Somebody will compute these chunks once more.",
            [
                ("queue, slab or deadline", rate("save_drops")),
                ("store failed", rate("save_errors")),
                ("store left alone", rate("saves_shed")),
                ("quota", rate("save_over_quota")),
                ("not announced", rate("publish_errors")),
            ],
            unit="cps",
        ),
        Panel(
            "Breakers that are open",
            "1 while a replica leaves an end alone because it kept failing.",
            [
                (
                    "{{__name__}} {{instance}}",
                    "max by (__name__, instance) "
                    f'({{__name__=~"vllm:objkv_breaker_open_.+",{REPLICA[1:]})',
                )
            ],
            most=1,
        ),
        Panel(
            "Calls that failed",
            "Per second, by end, as replicas see them.",
            [
                ("bulk, reads", rate("bulk_read_errors")),
                ("bulk, writes", rate("bulk_write_errors")),
                ("hot, reads", rate("hot_read_errors")),
                ("hot, writes", rate("hot_write_errors")),
                ("index", rate("index_errors")),
            ],
            unit="cps",
        ),
        Panel(
            "Ends that answer the exporter",
            "1 for yes.",
            [("{{end}}", "min by (end) (objkv_up)")],
            most=1,
        ),
        Panel(
            "How long ends take to answer",
            "One cheap question, from where the exporter runs.",
            [("{{end}}", "max by (end) (objkv_answer_seconds)")],
            unit="s",
        ),
    ],
    "What is stored": [
        Panel(
            "By model and tenant",
            "Payload bytes that the index knows of.",
            [
                (
                    "{{model}} {{tenant}}",
                    f"sum by (model, tenant) ({OF_THE_STORE} (objkv_stored_bytes))",
                )
            ],
            unit="bytes",
            stack=True,
        ),
        Panel(
            "Quota in use",
            "Of each tenant; empty without a quota. Saves stop at quota_high_percent.",
            [
                (
                    "{{tenant}}",
                    "max by (tenant) (objkv_tenant_stored_bytes) / "
                    "(max by (tenant) (objkv_tenant_quota_bytes) > 0)",
                )
            ],
            unit="percentunit",
        ),
        Panel(
            "Memory of the index's server",
            "Empty where the index is no server.",
            [
                ("in use", "max(objkv_index_memory_bytes)"),
                ("maxmemory", "max(objkv_index_memory_max_bytes)"),
            ],
            unit="bytes",
        ),
        Panel(
            "Calls to the stores",
            "Per second, over all replicas: what a bucket charges for, and more.",
            [
                ("bulk, reads", rate("bulk_reads")),
                ("bulk, writes", rate("bulk_writes")),
                ("hot, reads", rate("hot_reads")),
                ("hot, writes", rate("hot_writes")),
                ("index", rate("index_calls")),
            ],
            unit="cps",
        ),
        Panel(
            "In the bulk store",
            "By the last scan: all payloads, and those without a record. With --scan-every only.",
            [
                ("payloads", f"sum({OF_THE_STORE} (objkv_scan_bytes))"),
                ("without a record", f"sum({OF_THE_STORE} (objkv_scan_orphan_bytes))"),
            ],
            unit="bytes",
        ),
        Panel(
            "Saved by codec",
            "Payloads a second. none: compressing did not gain enough.",
            [
                (codec, rate(f"save_codec_{codec}"))
                for codec in ("none", "lz4", "zstd", "blosc", "blosclz4", "mixed")
            ],
            unit="cps",
        ),
    ],
}


def variable(name: str, label: str) -> dict[str, Any]:
    """A choice above the panels."""
    return {
        "name": name,
        "label": name,
        "type": "query",
        "datasource": SOURCE,
        "query": f"label_values(vllm:objkv_queries_total, {label})",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def options(panel: Panel) -> dict[str, Any]:
    """What Grafana wants beside the queries."""
    if panel.kind == "stat":
        return {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "none"}
    return {
        "legend": {"displayMode": "list", "placement": "bottom"},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def drawn(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    """One panel as Grafana reads it."""
    limits = {"min": 0} | ({} if panel.most is None else {"max": panel.most})
    custom: dict[str, Any] = {"fillOpacity": 40 if panel.stack else 8, "showPoints": "never"}
    if panel.stack:
        custom["stacking"] = {"mode": "normal"}
    defaults = {"unit": panel.unit, **limits}
    if panel.kind == "timeseries":
        defaults["custom"] = custom
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options(panel),
        "targets": [
            {"refId": chr(65 + i), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
            for i, (legend, expr) in enumerate(panel.queries)
        ],
    }


def panels() -> list[dict[str, Any]]:
    """All rows, one below the other."""
    made: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        place = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        made.append(
            {"id": len(made) + 1, "type": "row", "title": title, "gridPos": place, "panels": []}
        )
        x, y, height = 0, y + 1, 0
        for panel in row:
            if x + panel.width > WIDTH:
                x, y, height = 0, y + height, 0
            made.append(drawn(panel, len(made) + 1, x, y))
            x, height = x + panel.width, max(height, panel.height)
        y += height
    return made


def dashboard() -> dict[str, Any]:
    """The whole document."""
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "source"}
    return {
        "uid": "objkv",
        "title": "objkv",
        "tags": ["objkv", "vllm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [source, variable("model", "model_name"), variable("instance", "instance")]
        },
        "panels": panels(),
    }


def page() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(page())
