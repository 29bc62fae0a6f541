"""The queries of the dashboard and of the alert rules, and what they ask for."""

import json
import re
from collections.abc import Iterator
from typing import Any

import promql_parser
import yaml

from tests.monitoring.prometheus import EXAMPLE

DASHBOARD = EXAMPLE / "objkv-dashboard.json"
ALERTS = EXAMPLE / "alerts.yml"
VARIABLES = {"$model": ".*", "$instance": ".*", "$__rate_interval": "5m"}
"""As Grafana fills them in."""


def panels() -> list[dict[str, Any]]:
    found = json.loads(DASHBOARD.read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def dashboard_queries() -> Iterator[tuple[str, str]]:
    """What each query of the dashboard is for, and its PromQL."""
    for panel in panels():
        for target in panel["targets"]:
            expression = target["expr"]
            for name, value in VARIABLES.items():
                expression = expression.replace(name, value)
            yield f"{panel['title']}: {target['legendFormat'] or target['refId']}", expression


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alert_queries() -> Iterator[tuple[str, str]]:
    for rule in alerts():
        yield rule["alert"], rule["expr"]


def selectors(expression: str) -> list[tuple[str | None, str | None, set[str]]]:
    """The metrics that an expression reads: name, or pattern of the name, and labels compared.

    Raises ``ValueError`` for what is no PromQL.
    """
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


def matching(pattern: str, names: set[str]) -> set[str]:
    """The names that a pattern means, anchored as Prometheus anchors it."""
    return {name for name in names if re.fullmatch(pattern, name)}
