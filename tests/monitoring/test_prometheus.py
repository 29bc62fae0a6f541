"""The dashboard's queries and the alerts: by what objkv tells, by promtool, and in a real
Prometheus that scrapes a real exporter."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from types import SimpleNamespace
from typing import Any, cast

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from objkv.agent.http.metrics import LEVELS, PREFIX, TOTALS, metrics_page
from objkv.connector.counters import COUNTERS, ENCODER_METRICS, HISTOGRAMS, KV_METRICS, TIER_METRICS
from objkv.connector.metrics import ObjKVPromMetrics
from objkv.index.redis.index import RedisIndex
from objkv.ops.exporter.metrics import METRICS
from objkv.stores.local import LocalStore
from scripts.checks.docs import anchors
from tests.monitoring.prometheus import EXAMPLE, Prometheus, need_prometheus, prometheus, serving
from tests.support.samples import IDENTITY, NAMESPACE, save, save_identity
from tests.support.servers.redis import valkey_server
from tests.support.waiting import wait_for_server

pytestmark = pytest.mark.slow
ANSWERS_S = 180.0
DASHBOARD = EXAMPLE / "objkv-dashboard.json"
ALERTS = EXAMPLE / "alerts.yml"
VARIABLES = {"$model": ".*", "$instance": ".*", "$__rate_interval": "5m"}
"""As Grafana fills them in."""


def dashboard_queries() -> Iterator[tuple[str, str]]:
    """What each query of the dashboard is for, and its PromQL."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):  # a row has none
            expression = target["expr"]
            for name, value in VARIABLES.items():
                expression = expression.replace(name, value)
            yield f"{panel['title']}: {target['legendFormat'] or target['refId']}", expression


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def selectors(expression: str) -> list[tuple[str | None, str | None, set[str]]]:
    """The metrics that an expression reads: name, or pattern of the name, and labels compared."""
    found: list[tuple[str | None, str | None, set[str]]] = []

    def visit(node: Any) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            matchers = {m.name: m.value for m in node.matchers.matchers}
            pattern = matchers.pop("__name__", None)
            found.append((node.name, pattern, set(matchers)))
        return True

    promql_parser.walk(promql_parser.parse(expression), visit, None)
    assert found, expression
    return found


def test_every_alert_links_to_a_section_of_the_runbook() -> None:
    known_anchors = anchors(ROOT / "docs" / "operations" / "runbook.md")
    for rule in alerts():
        url, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert url.endswith("/docs/operations/runbook.md")
        assert anchor in known_anchors | {""}, rule["alert"]


def pages_of_a_replica() -> list[str]:
    """A page on which nothing has happened yet, and one after everything happened."""
    registry = CollectorRegistry()

    def kept(metric: Any) -> Any:
        return lambda **given: metric(**given, registry=registry)

    types = {cls: kept(cls) for cls in (Counter, Gauge, Histogram)}
    config = cast("Any", SimpleNamespace(kv_transfer_config=None))
    labels = ["model_name", "engine"]
    metrics = ObjKVPromMetrics(config, types, labels, {0: ["acme/tiny", "0"]})
    idle = generate_latest(registry).decode()
    busy: dict[str, Any] = dict.fromkeys(COUNTERS, 1.0)
    busy |= {name: [0.02, 0.3, 4.0] for name in HISTOGRAMS}
    metrics.observe(busy | {"query_tokens": 1000.0, "hit_tokens": 600.0}, 0)
    return [idle, generate_latest(registry).decode()]


def pages_of_an_agent() -> list[str]:
    """A page of an agent that has done nothing yet, and one after everything happened once."""
    levels = dict.fromkeys(LEVELS, 1.0)
    return [metrics_page(levels, {}), metrics_page(levels, dict.fromkeys(TOTALS, 1.0))]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    need_prometheus()
    folder = tmp_path_factory.mktemp("watched")
    with valkey_server(folder / "valkey", args=("--maxmemory", "64mb")) as valkey:
        store = LocalStore(folder / "chunks")
        save_identity(store)
        index = RedisIndex(valkey.client())
        save(store, index)
        index.close()  # tells its totals
        settings = {
            "OBJKV_BULK_URL": f"file://{folder}/chunks",
            "OBJKV_INDEX_URL": f"{valkey.url}/0",
            "OBJKV_QUOTA_BYTES": str(1 << 30),
        }
        own = {name: value for name, value in os.environ.items() if not name.startswith("OBJKV_")}
        command = [sys.executable, "-m", "objkv.cli", "exporter", "--port", "0", "--every", "1"]
        exporter = subprocess.Popen(
            [*command, "--scan-every", "60"],
            env=own | settings | {"XDG_CACHE_HOME": str(folder)},
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert exporter.stdout is not None
            line = exporter.stdout.readline()
            address = line.removeprefix("serving http://").removesuffix("/metrics\n")
            with serving(pages_of_a_replica()) as replica, serving(pages_of_an_agent()) as agent:
                targets = {"vllm": [replica], "objkv": [address], "objkv-agent": [agent]}
                with prometheus(folder / "prometheus", targets) as started:
                    wait_for_server(
                        lambda: all(started.scraped(job, 3) for job in targets),
                        "scrapes",
                        bound_s=ANSWERS_S,
                    )
                    wait_for_server(
                        lambda: bool(started.query("objkv_scan_payloads")),
                        "a scan",
                        bound_s=ANSWERS_S,
                    )
                    yield started
        finally:
            exporter.terminate()
            exporter.wait(60)


def test_all_are_scraped_without_a_complaint(server: Prometheus) -> None:
    assert sorted(server.targets()) == [(job, "up", "") for job in ("objkv", "objkv-agent", "vllm")]


def test_every_panel_has_something_to_show(server: Prometheus) -> None:
    wrong = []
    for name, query in dashboard_queries():
        # vLLM's own metrics are on the pages of real servers: tests/engine/test_servers_http.py
        if all("objkv" in (metric or pattern or "") for metric, pattern, _ in selectors(query)):
            found = server.query(query)
            if not found or any(one["value"][1] == "NaN" for one in found):
                wrong.append(name)
    assert wrong == []
    (found,) = server.query("objkv_stored_payloads")
    whose = {"namespace": NAMESPACE, "tenant": IDENTITY.tenant, "model": IDENTITY.model}
    assert whose.items() <= found["metric"].items()
    assert found["value"][1] == "3"


HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OF_A_REPLICA = {"model_name", "engine", "instance", "job", "le"}


def of_vllm() -> set[str]:
    """Histograms of vLLM itself, by its source: importing it takes seconds."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent / "v1" / "metrics" / "loggers.py"
    names = re.findall(r'name="(vllm:\w+_seconds)"', source.read_text())
    assert len(names) > 5
    return {f"{name}_bucket" for name in names}


def known() -> dict[str, set[str]]:
    """Every name that is told, with its labels beside those of the scrape."""
    names: set[str] = set()
    for table in (KV_METRICS, ENCODER_METRICS, TIER_METRICS):
        names |= {f"{table.prefix}{name}_total" for name in table.counters}
        names |= {table.prefix + name for name in table.gauges}
        names |= {f"{table.prefix}{name}_bucket" for name in table.histograms}
    found = dict.fromkeys(names | of_vllm(), OF_A_REPLICA)
    agent = {f"{PREFIX}{name}" for name in LEVELS} | {f"{PREFIX}{name}_total" for name in TOTALS}
    found |= {name: {"instance", "job"} for name in agent}
    return found | {name: {*one.labels, "instance", "job"} for name, one in METRICS.items()}


def test_every_query_asks_for_what_is_told() -> None:
    told = known()
    queries = [query for _, query in dashboard_queries()] + [rule["expr"] for rule in alerts()]
    for query in queries:
        for name, pattern, labels in selectors(query):
            # Patterns are anchored, as by Prometheus.
            names = [name] if name else [one for one in told if re.fullmatch(pattern or "", one)]
            assert names, pattern
            for one in names:
                assert labels <= told[one], (one, labels)


def test_every_alert_is_tested_while_it_fires_and_while_it_does_not() -> None:
    cases = yaml.safe_load((HERE / "alerts_test.yml").read_text())["tests"]
    seen: dict[str, set[bool]] = {rule["alert"]: set() for rule in alerts()}
    for case in cases:
        for one in case["alert_rule_test"]:
            seen[one["alertname"]].add(bool(one["exp_alerts"]))
    assert [name for name, quiet_or_firing in seen.items() if len(quiet_or_firing) < 2] == []


@pytest.mark.parametrize(
    "command",
    [
        ("check", "rules", str(ALERTS)),
        ("check", "config", str(EXAMPLE / "prometheus.yml")),
        ("test", "rules", str(HERE / "alerts_test.yml")),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_promtool_agrees(command: tuple[str, ...]) -> None:
    need_prometheus()
    promtool = which("promtool") or ""
    done = subprocess.run([promtool, *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout + done.stderr
