"""What breakers tell, as vLLM's Prometheus metrics: a level is set, not added up."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from objkv.connector.encoder.metrics import ObjKVECPromMetrics
from objkv.connector.kv.metrics import ObjKVPromMetrics, ObjKVStats
from objkv.connector.tier.metrics import tier_metric_definitions, tier_stats
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

NAME = "breaker_open_bulk_write"


@pytest.mark.parametrize(
    ("kind", "prefix"),
    [(ObjKVPromMetrics, "vllm:objkv_"), (ObjKVECPromMetrics, "vllm:objkv_encoder_")],
)
def test_gauges_follow_the_state_and_counters_add_up(
    kind: type[KVConnectorPromMetrics], prefix: str
) -> None:
    registry = CollectorRegistry()

    def kept(metric: Any) -> Any:
        return lambda **given: metric(**given, registry=registry)

    types = {cls: kept(cls) for cls in (Counter, Gauge, Histogram)}
    config = cast("Any", SimpleNamespace(kv_transfer_config=None, ec_transfer_config=None))
    shown = kind(config, types, ["engine"], {0: ["0"]})
    for level in (1.0, 1.0, 0.0, 1.0):
        shown.observe({NAME: level, "breaker_refused_bulk_write": 2.0}, 0)
    assert registry.get_sample_value(prefix + NAME, {"engine": "0"}) == 1
    refused = f"{prefix}breaker_refused_bulk_write_total"
    assert registry.get_sample_value(refused, {"engine": "0"}) == 8
    assert NAME not in {metric.name for metric in REGISTRY.collect()}


def test_of_several_ranks_one_that_is_open_counts() -> None:
    stats = ObjKVStats(data=cast("Any", {NAME: 1.0, "saves": 1.0}))
    stats.aggregate(ObjKVStats(data=cast("Any", {NAME: 0.0, "saves": 2.0})))
    stats.aggregate(ObjKVStats(data=cast("Any", {NAME: 1.0})))
    assert stats.data == {NAME: 1.0, "saves": 3.0}
    assert stats.reduce() == {NAME: 1.0, "saves": 3.0}


def test_a_tier_has_names_of_its_own() -> None:
    assert f"vllm:objkv_tier_{NAME}" in tier_metric_definitions()
    stats = tier_stats({NAME: 1.0, "breaker_refused_bulk_read": 3.0})
    assert stats is not None
    assert f"vllm:objkv_tier_{NAME}" in str(stats.to_dict())
