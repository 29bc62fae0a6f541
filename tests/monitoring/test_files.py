"""The dashboard and the alerts parse, and ask only for what somebody tells."""

import json
import re
import runpy
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import yaml

from objkv.connector.counters import ENCODER_METRICS, KV_METRICS, TIER_METRICS
from objkv.ops.exporter.metrics import METRICS
from tests.monitoring.prometheus import EXAMPLE, need_prometheus
from tests.monitoring.queries import (
    ALERTS,
    DASHBOARD,
    alert_queries,
    alerts,
    dashboard_queries,
    matching,
    panels,
    selectors,
)

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
QUERIES = [*dashboard_queries(), *alert_queries()]
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
    told = dict.fromkeys(names | of_vllm(), OF_A_REPLICA)
    return told | {name: {*one.labels, "instance", "job"} for name, one in METRICS.items()}


@pytest.mark.parametrize("query", [q for _, q in QUERIES], ids=[name for name, _ in QUERIES])
def test_a_query_asks_for_what_is_told(query: str) -> None:
    told = known()
    for name, pattern, labels in selectors(query):
        names = {name} if name else matching(pattern or "", set(told))
        assert names, pattern
        for one in names:
            assert one in told, one
            assert labels <= told[one], (one, labels)


def test_a_name_that_nobody_tells_would_be_found() -> None:
    (selector,) = selectors("rate(vllm:objkv_hit_token_total[5m])")
    assert selector[0] not in known()
    with pytest.raises(ValueError, match="unclosed left parenthesis"):
        selectors("sum(rate(x[5m])")


def test_the_dashboard_is_as_it_is_written() -> None:
    script = runpy.run_path(str(ROOT / "scripts/write_dashboard.py"))
    assert DASHBOARD.read_text() == script["page"](), "run make docs"


def test_panels_do_not_lie_on_each_other_and_say_what_they_show() -> None:
    document = json.loads(DASHBOARD.read_text())
    taken: set[tuple[int, int]] = set()
    for panel in document["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in document["panels"]}) == len(document["panels"])
    assert all(panel["description"] and panel["targets"] for panel in panels())
    variables = {one["name"] for one in document["templating"]["list"]}
    used = set(re.findall(r"\$(\w+)", json.dumps(document["panels"])))
    assert used == variables | {"__rate_interval"}


def test_every_alert_says_what_it_means_and_what_to_do() -> None:
    for rule in alerts():
        assert rule["labels"]["severity"] in ("info", "warning", "critical"), rule["alert"]
        assert rule["annotations"].keys() == {"summary", "description"}
        assert rule["annotations"]["summary"].startswith("objkv: ")


def test_every_alert_is_tested_while_it_fires_and_while_it_does_not() -> None:
    cases = yaml.safe_load((HERE / "alerts_test.yml").read_text())["tests"]
    seen: dict[str, set[bool]] = {rule["alert"]: set() for rule in alerts()}
    for case in cases:
        for one in case["alert_rule_test"]:
            seen[one["alertname"]].add(bool(one["exp_alerts"]))
    quiet_or_firing: Callable[[str], Any] = seen.__getitem__
    assert [name for name in seen if quiet_or_firing(name) != {True, False}] == []


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
    done = subprocess.run(
        [which("promtool") or "", *command],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout + done.stderr
