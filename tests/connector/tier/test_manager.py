"""objkv as a secondary tier, under vLLM's own tiering manager."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult

from objkv.connector.tier.identity import TierAdapters
from tests.connector.encoder.engine import core
from tests.connector.tier.world import offload_key, row

HIT, MISS = LookupResult.HIT, LookupResult.MISS
pytestmark = pytest.mark.usefixtures("vllm_as_before")


def test_a_tier_with_the_rights_of_a_reader_loads_and_stores_nothing(
    engines: Any, tmp_path: Path
) -> None:
    writer, reader = engines(), engines({"role": "reader"})
    writer.save(0, 1, 2)
    stored = sorted(tmp_path.rglob("*.*"))
    assert reader.ask(0, 1, 2) == [HIT] * 3
    reader.save(100, 101)
    assert sorted(tmp_path.rglob("*.*")) == stored
    assert writer.ask(100, 101) == [MISS] * 2


def test_groups_are_told_apart(engines: Any) -> None:
    writer, reader = engines(), engines()
    writer.compute(writer.begin(), {offload_key(1, group=0): row(1), offload_key(1, 2): row(2)})
    writer.store()
    request = reader.begin()
    keys = [offload_key(1, 0), offload_key(1, 1), offload_key(1, 2)]
    assert reader.find(request, keys) == [HIT, MISS, HIT]
    assert reader.read(request, keys[0]) == row(1)
    assert reader.read(request, keys[2]) == row(2)


def test_numbers_reach_vllms_statistics(engines: Any) -> None:
    engine = engines()
    definitions = engine.spec.build_metric_definitions(engine.spec.extra_config)
    engine.save(1)
    again = engines()
    again.save(1)
    assert (again.counted("save_existed"), again.counted("saves")) == (1, 0)
    told = engine.manager.get_stats().reduce()
    assert told["vllm:objkv_tier_saves"] == 1
    switched = "vllm:objkv_tier_admission_switched"
    assert set(told) & set(definitions) >= {"vllm:objkv_tier_saves", "vllm:objkv_tier_save_bytes"}
    engine.tier._recorder.level("admission_switched", 1.0)
    assert engine.manager.get_stats().reduce()[switched] == 1
    assert switched in definitions


def test_events_are_told_where_they_are_asked_for(engines: Any) -> None:
    engine = engines({"enable_kv_events": True, "locality": "REMOTE"}, enable_kv_cache_events=True)
    engine.save(1)
    (event,) = [e for e in engine.manager.take_events() if e.medium.value == "STORAGE"]
    assert (list(event.keys), event.removed) == ([offload_key(1)], False)
    assert event.locality.value == "REMOTE"
    assert not [e for e in engine.manager.take_events() if e.medium.value == "STORAGE"]


def test_a_reset_leaves_the_namespace_and_distrusts_requests_under_way(engines: Any) -> None:
    engine, other = engines(), engines()
    before = engine.begin()
    engine.save(1, context=before)
    engine.manager.reset_cache()
    assert engine.ask(1) == [MISS]
    engine.save(2, context=before)
    assert engine.find(before, [offload_key(3)]) == [MISS]
    engine.save(4)
    engine.manager.reset_cache()
    assert other.ask(1, 2, 4) == [HIT, MISS, MISS]


def test_before_vllm_chose_its_first_hash_nothing_is_shared(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core import kv_cache_utils

    engine = engines()
    monkeypatch.delattr(kv_cache_utils, "NONE_HASH")
    request = engine.begin()
    assert engine.find(request, [offload_key(1)]) == [MISS]
    engine.save(1, context=request)
    assert engine.counted("save_refused") == 1


def test_of_a_window_the_end_may_be_missing_and_the_rest_found(engines: Any) -> None:
    """vLLM asks for a window's keys from the prompt's end backwards."""
    own_index = {"index_url": "bulk:"}
    writer, reader = engines(own_index), engines(own_index)
    writer.save(1, 2)
    assert reader.ask(99, 98, 2, 1) == [MISS, MISS, HIT, HIT]


# Weights and adapters that change with no cache being reset.


def test_until_vllm_drops_what_it_holds_nothing_is_loaded_or_saved(
    engines: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own memory may still serve blocks of the old weights, and new ones that build on them."""
    writer, engine = engines(), engines()
    writer.save(1)
    core().collective_rpc("reload_weights", None, (), {})
    assert "reset_connector=True" in caplog.text
    assert engine.ask(1) == [MISS]
    assert engine.tier.namespace.current is None
    assert not engine.tier.namespace.open
    engine.save(2)
    assert engine.counted("saves") == 0
    engine.manager.reset_cache()
    assert engine.tier.namespace.open
    assert engine.ask(1) == [MISS]
    engine.save(3)
    assert engine.counted("saves") == 1
    assert engines().ask(3) == [MISS]


def test_a_reset_while_requests_hold_blocks_does_not_open_the_tier(engines: Any) -> None:
    """vLLM drops no block then, and says so only to who asked for the reset."""
    engine = engines()
    request = engine.begin()
    engine.manager.reset_cache()
    assert not engine.tier.namespace.open
    engine.end(request)
    engine.manager.reset_cache()
    assert engine.tier.namespace.open


def lora(name: str, number: int, load_inplace: bool = False) -> Any:
    return SimpleNamespace(lora_name=name, lora_int_id=number, load_inplace=load_inplace)


def test_an_adapter_whose_name_comes_back_is_as_a_weight_update(engines: Any) -> None:
    engine = engines()
    engine.save(1)
    core().add_lora(lora("a", 1))
    core().remove_lora(1)
    assert engine.tier.namespace.open
    core().add_lora(lora("a", 2))
    assert not engine.tier.namespace.open


@pytest.mark.parametrize(
    ("calls", "changed"),
    [
        ([("a", 1)], 0),
        ([("a", 1), ("a", 1)], 0),
        ([("a", 1), 1, ("b", 2)], 0),
        ([("a", 1), 1, ("b", 1)], 0),
        ([("a", 1), 1, ("a", 1)], 1),
        ([("a", 1), ("a", 2)], 1),
        ([1, ("a", 2)], 0),  # its name was never heard: a request brought it
        ([("a", 1, True)], 1),
    ],
)
def test_only_a_name_that_may_stand_for_other_weights_counts(
    calls: list[Any], changed: int
) -> None:
    heard: list[int] = []
    adapters = TierAdapters(lambda: heard.append(1))
    for call in calls:
        if isinstance(call, int):
            adapters.unloaded(call)
        else:
            adapters.loaded(lora(*call))
    assert len(heard) == changed
