"""Writes ``examples/monitoring/objkv-dashboard.json``: every panel is a few lines here.

python scripts/write_dashboard.py; ``tests/monitoring`` fails when the file is stale, when a query
does not parse, or names a metric that does not exist.
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
    """A panel of the dashboard."""

    title: str
    text: str
    queries: Sequence[Query]
    unit: str = "short"
    kind: str = "timeseries"
    stack: bool = False
    width: int = 8
    height: int = 8
    most: float | None = None


def rate(name: str, by: str = "") -> str:
    """Return the rate per second, over all selected replicas; one for each value of ``by``."""
    whole = f"sum by ({by})" if by else "sum"
    return f"{whole}(rate(vllm:objkv_{name}_total{REPLICA}[$__rate_interval]))"


def share(part: str, whole: str) -> str:
    """Return a ratio that is empty while ``whole`` is 0."""
    return f"({part}) / (({whole}) > 0)"


def quantiles(name: str) -> list[Query]:
    """Return the queries for the median and the 99th percentile."""
    buckets = f"sum by (le) (rate(vllm:{name}_bucket{REPLICA}[$__rate_interval]))"
    return [(f"p{q * 100:g}", f"histogram_quantile({q}, {buckets})") for q in (0.5, 0.99)]


LOCAL, HIT, ASKED = rate("local_hit_tokens"), rate("hit_tokens"), rate("query_tokens")
OF_THE_STORE = "max by (namespace, tenant, model)"

AGENT = "objkv_agent_"


def agent_rate(name: str) -> str:
    """Return the rate per second over all node agents."""
    return f"sum(rate({AGENT}{name}_total[$__rate_interval]))"


OF_AN_AGENT, LEASED = "max by (instance)", ("leased", "arena")
AGENT_HITS, AGENT_FILLS = agent_rate("hits"), agent_rate("fills")

ROWS: dict[str, list[Panel]] = {
    "Benefit": [
        Panel(
            "Tokens not computed",
            "Share of all prompt tokens from the replica's own cache or objkv.",
            [("", share(f"{LOCAL} + {HIT}", ASKED))],
            unit="percentunit",
            kind="stat",
            width=4,
            height=4,
            most=1,
        ),
        Panel(
            "objkv's hit rate",
            "Share of the tokens missing in replicas that objkv provided.",
            [("", share(HIT, f"{ASKED} - {LOCAL}"))],
            unit="percentunit",
            kind="stat",
            width=4,
            height=4,
            most=1,
        ),
        Panel(
            "Loaded",
            "Verified payload bytes per second, over all replicas.",
            [("", rate("load_bytes"))],
            unit="Bps",
            kind="stat",
            width=4,
            height=4,
        ),
        Panel(
            "Stored",
            "Payload bytes recorded in the index.",
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
            "Stores that answer",
            "Share of bulk store, index and hot store that answer the exporter. Details below.",
            [("", "avg(max by (end) (objkv_up))")],
            unit="percentunit",
            kind="stat",
            width=4,
            height=4,
            most=1,
        ),
        Panel(
            "Sources of tokens",
            "Computed, from the replica's own cache, or loaded as the index promised.",
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
            "Loads by their real source, and saves.",
            [
                ("loaded, hot", rate("hot_load_bytes")),
                ("loaded, agent", rate("arena_load_bytes")),
                ("loaded, bulk", rate("bulk_load_bytes")),
                ("saved", rate("save_bytes")),
                ("taken by the agent", rate("save_accepted_bytes")),
                ("promoted to hot", rate("hot_promoted_bytes")),
            ],
            unit="Bps",
            width=12,
        ),
    ],
    "Speed": [
        Panel("Load time", "From plan to last byte.", quantiles("objkv_load_seconds"), unit="s"),
        Panel(
            "Lookup time", "Until the index answered.", quantiles("objkv_lookup_seconds"), unit="s"
        ),
        Panel(
            "Save time", "Saves run in the background.", quantiles("objkv_save_seconds"), unit="s"
        ),
        Panel(
            "Time to first token",
            "Measured by vLLM.",
            quantiles("time_to_first_token_seconds"),
            unit="s",
        ),
        Panel(
            "Not loaded on purpose",
            "Stored tokens that were computed because that was measured to be faster.",
            [("refused", rate("admission_refused_tokens"))],
            unit="cps",
        ),
        Panel(
            "Hot copies found",
            "Share of the payloads that the index promised in the hot store.",
            [("", share(rate("hot_hits"), f"{rate('hot_hits')} + {rate('hot_misses')}"))],
            unit="percentunit",
            most=1,
        ),
    ],
    "Faults": [
        Panel(
            "Loads that became misses",
            "Per second, by reason. The model computes these tokens instead.",
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
            "Dropped saves",
            "Per second, by reason. A replica computes these chunks again.",
            [
                ("queue, slab or deadline", rate("save_drops")),
                ("store failed", rate("save_errors")),
                ("circuit open", rate("saves_shed")),
                ("quota", rate("save_over_quota")),
                ("not published", rate("publish_errors")),
            ],
            unit="cps",
        ),
        Panel(
            "Open circuit breakers",
            "1 while a replica skips a store or the index because its calls kept failing.",
            [
                (
                    "{{store}} {{direction}} {{instance}}",
                    f"max by (store, direction, instance) (vllm:objkv_breaker_open{REPLICA})",
                )
            ],
            most=1,
        ),
        Panel(
            "Failed calls",
            "Per second, by store or index, counted by replicas.",
            [
                ("{{store}} {{call}}", rate("store_errors", "store, call")),
                ("index", rate("index_errors")),
            ],
            unit="cps",
        ),
        Panel(
            "Answers to the exporter",
            "1 if the store or index answers.",
            [("{{end}}", "min by (end) (objkv_up)")],
            most=1,
        ),
        Panel(
            "Response time",
            "One cheap request from the exporter.",
            [("{{end}}", "max by (end) (objkv_answer_seconds)")],
            unit="s",
        ),
    ],
    "Stored": [
        Panel(
            "By model and tenant",
            "Payload bytes recorded in the index.",
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
            "Share of each tenant's quota; empty without one. Saves stop at quota_high_percent.",
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
            "Memory of the index server",
            "Empty if the index is not a server.",
            [
                ("in use", "max(objkv_index_memory_bytes)"),
                ("maxmemory", "max(objkv_index_memory_max_bytes)"),
            ],
            unit="bytes",
        ),
        Panel(
            "Calls to the stores",
            "Per second, over all replicas. A bucket charges for them.",
            [
                ("{{store}} {{call}}", rate("store_calls", "store, call")),
                ("index", rate("index_calls")),
            ],
            unit="cps",
        ),
        Panel(
            "In the bulk store",
            "All payloads and those without a record, by the last scan. Only with --scan-every.",
            [
                ("payloads", f"sum({OF_THE_STORE} (objkv_scan_bytes))"),
                ("without a record", f"sum({OF_THE_STORE} (objkv_scan_orphan_bytes))"),
            ],
            unit="bytes",
        ),
        Panel(
            "Saved by codec",
            "Payloads per second. none: compression did not gain enough.",
            [("{{codec}}", rate("save_codec", "codec"))],
            unit="cps",
        ),
    ],
    "Node agents": [
        Panel(
            "Agents",
            "Node agents whose metrics Prometheus has.",
            [("", f"count({AGENT}arena_bytes)")],
            kind="stat",
            width=4,
            height=4,
        ),
        Panel(
            "Served from memory",
            "Share of the payloads requested from agents that were in an arena.",
            [("", share(AGENT_HITS, f"{AGENT_HITS} + {AGENT_FILLS}"))],
            unit="percentunit",
            kind="stat",
            width=4,
            height=4,
            most=1,
        ),
        Panel(
            "Arenas in use",
            "Share of all arenas that payloads take. A full arena evicts what is used least.",
            [("", f"1 - sum({AGENT}arena_free_bytes) / sum({AGENT}arena_bytes)")],
            unit="percentunit",
            kind="stat",
            width=4,
            height=4,
            most=1,
        ),
        Panel(
            "Leased",
            "Share of each arena that is leased, and so cannot be evicted.",
            [("{{instance}}", " / ".join(f"{OF_AN_AGENT} ({AGENT}{one}_bytes)" for one in LEASED))],
            unit="percentunit",
            width=12,
            height=4,
            most=1,
        ),
        Panel(
            "Payloads by place",
            "Per second: in the arena, or fetched from the hot or bulk store.",
            [("arena", AGENT_HITS), ("store", AGENT_FILLS)],
            unit="cps",
            stack=True,
        ),
        Panel(
            "Bytes of agents",
            "Fetched from stores, saved, and evicted from arenas.",
            [
                ("fetched", agent_rate("load_bytes")),
                ("saved", agent_rate("save_bytes")),
                ("evicted", agent_rate("evicted_bytes")),
            ],
            unit="Bps",
        ),
        Panel(
            "Prefetched",
            "Payloads per second: fetched ahead of a request, read later, or evicted unread.",
            [
                ("prefetched", agent_rate("prefetches")),
                ("read", agent_rate("prefetch_used")),
                ("evicted unread", agent_rate("prefetch_unused")),
            ],
            unit="cps",
        ),
        Panel(
            "Misses of agents",
            "Per second, by reason. The model computes these tokens instead.",
            [
                ("arena full of leases", agent_rate("no_room")),
                ("store or deadline", agent_rate("load_errors")),
                ("corrupt", agent_rate("load_corrupt")),
                ("gone", agent_rate("load_ghosts")),
            ],
            unit="cps",
        ),
        Panel(
            "Saves not made by agents",
            "Per second, by reason.",
            [
                ("queue, room or deadline", agent_rate("save_drops")),
                ("store failed", agent_rate("save_errors")),
                ("circuit open", agent_rate("saves_shed")),
                ("quota", agent_rate("save_over_quota")),
            ],
            unit="cps",
        ),
        Panel(
            "Connections of replicas",
            "To each agent. A replica has several.",
            [("{{instance}}", f"{OF_AN_AGENT} ({AGENT}clients)")],
        ),
    ],
}


def variable(name: str, label: str) -> dict[str, Any]:
    """Return a selector above the panels."""
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
    """Return a panel's display options."""
    if panel.kind == "stat":
        return {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "none"}
    return {
        "legend": {"displayMode": "list", "placement": "bottom"},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def drawn(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    """Return one panel in Grafana's format."""
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
    """Return all rows, from top to bottom."""
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
    """Return the whole document."""
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
    """Return the file's text."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(page())
