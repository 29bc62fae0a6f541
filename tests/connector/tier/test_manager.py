"""objkv as a secondary tier, under vLLM's own tiering manager."""

from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult

from tests.connector.tier.world import ROWS, offload_key, row

HIT, MISS = LookupResult.HIT, LookupResult.MISS


def test_what_one_replica_computed_another_loads(engines: Any) -> None:
    writer, reader = engines(), engines()
    content = {offload_key(i): row(i) for i in range(5)}
    writer.compute(writer.begin(), content)
    writer.settle()
    request = reader.begin()
    assert reader.find(request, list(content)) == [HIT] * 5
    assert {key: reader.read(request, key) for key in content} == content
    reader.end(request)


def test_a_tier_with_the_rights_of_a_reader_loads_and_stores_nothing(
    engines: Any, tmp_path: Path
) -> None:
    writer, reader = engines(), engines({"role": "reader"})
    content = {offload_key(i): row(i) for i in range(3)}
    writer.compute(writer.begin(), content)
    writer.settle()
    stored = sorted(tmp_path.rglob("*.*"))
    request = reader.begin()
    assert reader.find(request, list(content)) == [HIT] * 3
    assert {key: reader.read(request, key) for key in content} == content
    reader.end(request)
    own = {offload_key(100 + i): row(100 + i) for i in range(2)}
    reader.compute(reader.begin(), own)
    reader.settle()
    assert sorted(tmp_path.rglob("*.*")) == stored
    assert writer.find(writer.begin(), list(own)) == [MISS] * 2


def test_what_vllm_evicts_comes_back(engines: Any) -> None:
    engine = engines()
    first = {offload_key(i): row(i) for i in range(ROWS)}
    engine.compute(engine.begin(), first)
    engine.settle()
    others = {offload_key(100 + i): row(100 + i) for i in range(ROWS)}
    engine.compute(engine.begin(), others)
    engine.settle()
    request = engine.begin()
    assert engine.find(request, list(first)) == [HIT] * ROWS
    assert [engine.read(request, key) for key in first] == list(first.values())


def test_groups_are_told_apart(engines: Any) -> None:
    writer, reader = engines(), engines()
    writer.compute(writer.begin(), {offload_key(1, group=0): row(1), offload_key(1, 2): row(2)})
    writer.settle()
    request = reader.begin()
    keys = [offload_key(1, 0), offload_key(1, 1), offload_key(1, 2)]
    assert reader.find(request, keys) == [HIT, MISS, HIT]
    assert reader.read(request, keys[0]) == row(1)
    assert reader.read(request, keys[2]) == row(2)


def test_what_is_stored_is_not_stored_again(engines: Any) -> None:
    first, second = engines(), engines()
    for engine in (first, second):
        engine.compute(engine.begin(), {offload_key(1): row(1)})
        engine.settle()
    numbers = second.tier._recorder.drain()
    assert numbers["tier_save_existed"] == 1
    assert "tier_saves" not in numbers


def test_numbers_reach_vllms_statistics(engines: Any) -> None:
    engine = engines()
    definitions = engine.spec.build_metric_definitions(engine.spec.extra_config)
    engine.compute(engine.begin(), {offload_key(1): row(1)})
    engine.settle()
    told = engine.manager.get_stats().reduce()
    assert told["vllm:objkv_tier_saves"] == 1
    assert set(told) & set(definitions) >= {"vllm:objkv_tier_saves", "vllm:objkv_tier_save_bytes"}


def test_events_are_told_where_they_are_asked_for(engines: Any) -> None:
    engine = engines({"enable_kv_events": True, "locality": "REMOTE"}, enable_kv_cache_events=True)
    engine.compute(engine.begin(), {offload_key(1): row(1)})
    engine.settle()
    (event,) = [e for e in engine.manager.take_events() if e.medium.value == "STORAGE"]
    assert (list(event.keys), event.removed) == ([offload_key(1)], False)
    assert event.locality.value == "REMOTE"
    assert not [e for e in engine.manager.take_events() if e.medium.value == "STORAGE"]


def test_a_reset_leaves_the_namespace_and_distrusts_requests_under_way(engines: Any) -> None:
    engine, other = engines(), engines()
    before = engine.begin()
    engine.compute(before, {offload_key(1): row(1)})
    engine.settle()
    engine.manager.reset_cache()
    assert engine.find(engine.begin(), [offload_key(1)]) == [MISS]
    engine.compute(before, {offload_key(2): row(2)})
    engine.settle()
    assert engine.find(before, [offload_key(3)]) == [MISS]
    after = engine.begin()
    engine.compute(after, {offload_key(4): row(4)})
    engine.settle()
    engine.manager.reset_cache()
    request = other.begin()
    keys = [offload_key(i) for i in (1, 2, 4)]
    assert other.find(request, keys) == [HIT, MISS, MISS]


def test_before_vllm_chose_its_first_hash_nothing_is_shared(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core import kv_cache_utils

    engine = engines()
    monkeypatch.delattr(kv_cache_utils, "NONE_HASH")
    request = engine.begin()
    assert engine.find(request, [offload_key(1)]) == [MISS]
    engine.compute(request, {offload_key(1): row(1)})
    engine.settle()
    assert engine.tier._recorder.drain()["tier_save_refused"] == 1
