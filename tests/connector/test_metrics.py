"""The connectors' numbers as Prometheus metrics."""

import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

import objkv
from objkv.agent.http.metrics import TOTALS
from objkv.connector.counters import COUNTERS, HISTOGRAMS, KV_METRICS
from objkv.connector.metrics import ObjKVPromMetrics, ObjKVStats
from objkv.telemetry import MemoryRecorder

LABELS = {"engine": "0"}
_LITERAL = re.compile(r"""\.(?:count|observe|level)\(\s*"(\w+)\"""")


ENGINE = {"admission.py", "lookup.py", "switch.py"}
"""Of the modules in ``objkv/cache``. The agent uses the others."""


def counted(*folders: str) -> set[str]:
    root = Path(objkv.__file__).parent
    files = [file for folder in folders for file in (root / folder).rglob("*.py")]
    return {
        name
        for file in files
        if file.parent.name != "cache" or (file.name in ENGINE) is ("transfer" in folders)
        for name in _LITERAL.findall(file.read_text())
    }


def test_every_number_that_a_worker_counts_is_a_metric() -> None:
    """A name that the table lacks would be dropped silently."""
    found = counted("transfer", "connector/kv", "cache")
    assert len(found) > 25
    known = KV_METRICS.counters.keys() | KV_METRICS.gauges.keys() | set(KV_METRICS.histograms)
    assert found - known == set()
    among_several = {"admission_cut", "load_ghosts"}
    among_several |= {"save_errors", "save_over_quota", "saves_accepted", "save_accepted_bytes"}
    among_several |= {"save_existed", "saves_shed", "save_drops", "save_drop_bytes"}
    assert known - found == among_several


def test_every_number_that_an_agent_counts_is_on_its_page_from_the_start() -> None:
    found = {name.removeprefix("agent_") for name in counted("agent", "cache")}
    assert len(found) > 40
    assert found - TOTALS.keys() == {"save_seconds"}


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
    names += [f"vllm:objkv_{name}" for name in KV_METRICS.gauges]
    names += [f"vllm:objkv_{name}_count" for name in HISTOGRAMS]
    assert {registry.get_sample_value(name, LABELS) for name in names} == {0.0}


NAME = "admission_switched"


def test_gauges_follow_the_state_and_counters_add_up() -> None:
    prefix, (prom, registry) = "vllm:objkv_", shown()
    for level in (1.0, 1.0, 0.0, 1.0):
        prom.observe({NAME: level, "save_errors": 2.0}, 0)
    assert registry.get_sample_value(prefix + NAME, LABELS) == 1
    assert registry.get_sample_value(f"{prefix}save_errors_total", LABELS) == 8
    assert NAME not in {metric.name for metric in REGISTRY.collect()}


def test_of_several_ranks_one_whose_level_is_set_counts() -> None:
    stats = ObjKVStats(data=cast("Any", {NAME: 1.0, "loads": 1.0}))
    stats.aggregate(ObjKVStats(data=cast("Any", {NAME: 0.0, "loads": 2.0})))
    stats.aggregate(ObjKVStats(data=cast("Any", {NAME: 1.0})))
    assert stats.data == {NAME: 1.0, "loads": 3.0}
    assert stats.reduce() == {NAME: 1.0, "loads": 3.0}
