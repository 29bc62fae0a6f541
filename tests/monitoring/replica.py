"""The part of a replica's page that objkv tells, and an agent's page, made by what makes them
there, before and after some work; the whole page of a real server is looked at in
``tests/engine``."""

from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from objkv.agent.http.metrics import LEVELS, TOTALS, metrics_page
from objkv.connector.counters import COUNTERS, HISTOGRAMS
from objkv.connector.metrics import ObjKVPromMetrics


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
