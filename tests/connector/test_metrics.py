"""The connectors' numbers as Prometheus metrics."""

import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

import objkv
from objkv.connector.counters import (
    BREAKER_GAUGES,
    COUNTERS,
    HISTOGRAMS,
    KV_METRICS,
)
from objkv.connector.metrics import (
    ObjKVPromMetrics,
    ObjKVStats,
    tier_metric_definitions,
    tier_stats,
)
from objkv.telemetry import MemoryRecorder

LABELS = {"engine": "0"}
_LITERAL = re.compile(r"""\.(?:count|observe|level)\(\s*"(\w+)\"""")


def test_every_number_that_a_worker_counts_is_a_metric() -> None:
    """A name that the table lacks would be dropped silently."""
    root = Path(objkv.__file__).parent
    counted = {
        name
        for folder in ("transfer", "connector/kv", "cache")
        for file in (root / folder).rglob("*.py")
        for name in _LITERAL.findall(file.read_text())
    }
    assert len(counted) > 40
    known = KV_METRICS.counters.keys() | KV_METRICS.gauges.keys() | set(KV_METRICS.histograms)
    assert {name for name in counted - known if not name.startswith("agent_")} == set()


def shown() -> tuple[KVConnectorPromMetrics, CollectorRegistry]:
    registry = CollectorRegistry()

    def kept(metric: Any) -> Any:
        return lambda **given: metric(**given, registry=registry)

    types = {cls: kept(cls) for cls in (Counter, Gauge, Histogram)}
    config = cast("Any", SimpleNamespace(kv_transfer_config=None, ec_transfer_config=None))
    return ObjKVPromMetrics(config, types, ["engine"], {0: ["0"]}), registry


def stats(*seconds: float) -> ObjKVStats:
    recorder = MemoryRecorder(sampled=HISTOGRAMS)
    for one in seconds:
        recorder.observe("load_seconds", one)
    return ObjKVStats(data=cast("Any", recorder.drain() | recorder.samples()))


def test_what_several_workers_observed_is_one_histogram() -> None:
    first = stats(0.003, 0.2)
    told = first.data
    both = pickle.loads(pickle.dumps(first.aggregate(stats(7.0))))
    assert told["load_seconds"] == [0.003, 0.2], "what was told is not changed for others"
    prom, registry = shown()
    prom.observe(both.to_dict(), 0)
    prom.observe(stats(0.003).to_dict(), 0)

    def at_most(bound: str) -> float | None:
        return registry.get_sample_value("vllm:objkv_load_seconds_bucket", LABELS | {"le": bound})

    assert (at_most("0.0025"), at_most("0.005"), at_most("0.25")) == (0, 2, 3)
    assert (at_most("5.0"), at_most("10.0"), at_most("+Inf")) == (3, 4, 4)
    assert registry.get_sample_value("vllm:objkv_load_seconds_count", LABELS) == 4
    assert registry.get_sample_value("vllm:objkv_load_seconds_sum", LABELS) == 7.206


def test_what_never_happened_is_told_as_0() -> None:
    _, registry = shown()
    names = [f"vllm:objkv_{name}_total" for name in COUNTERS]
    names += [f"vllm:objkv_{name}" for name in BREAKER_GAUGES]
    names += [f"vllm:objkv_{name}_count" for name in HISTOGRAMS]
    assert {registry.get_sample_value(name, LABELS) for name in names} == {0.0}


NAME = "breaker_open_bulk_write"


def test_gauges_follow_the_state_and_counters_add_up() -> None:
    prefix, (prom, registry) = "vllm:objkv_", shown()
    for level in (1.0, 1.0, 0.0, 1.0):
        prom.observe({NAME: level, "breaker_refused_bulk_write": 2.0}, 0)
    assert registry.get_sample_value(prefix + NAME, LABELS) == 1
    refused = f"{prefix}breaker_refused_bulk_write_total"
    assert registry.get_sample_value(refused, LABELS) == 8
    labels = LABELS | {"store": "bulk", "direction": "write"}
    assert registry.get_sample_value(f"{prefix}breaker_open", labels) == 1
    assert registry.get_sample_value(f"{prefix}breaker_refused_total", labels) == 8
    others = labels | {"store": "index"}
    assert registry.get_sample_value(f"{prefix}breaker_open", others) == 0
    assert NAME not in {metric.name for metric in REGISTRY.collect()}


def test_of_several_ranks_one_that_is_open_counts() -> None:
    stats = ObjKVStats(data=cast("Any", {NAME: 1.0, "saves": 1.0}))
    stats.aggregate(ObjKVStats(data=cast("Any", {NAME: 0.0, "saves": 2.0})))
    stats.aggregate(ObjKVStats(data=cast("Any", {NAME: 1.0})))
    assert stats.data == {NAME: 1.0, "saves": 3.0}
    assert stats.reduce() == {NAME: 1.0, "saves": 3.0}


def test_a_tier_has_names_of_its_own() -> None:
    assert "vllm:objkv_tier_admission_switched" in tier_metric_definitions()
    stats = tier_stats({"admission_switched": 1.0, "tier_loads": 3.0})
    assert stats is not None
    assert "vllm:objkv_tier_admission_switched" in str(stats.to_dict())
