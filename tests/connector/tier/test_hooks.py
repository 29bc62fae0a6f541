"""What a secondary tier hears of weights and adapters that change with no cache being reset."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_offload.base import LookupResult

from objkv.connector.tier.identity import TierAdapters

MISS = LookupResult.MISS
pytestmark = pytest.mark.usefixtures("vllm_as_before")


def core() -> Any:
    """An EngineCore without a model; every tier of this process hears it."""
    engine: Any = object.__new__(EngineCore)
    engine.model_executor = SimpleNamespace(
        collective_rpc=lambda *_: ["done"],
        add_lora=lambda *_: True,
        remove_lora=lambda *_: True,
    )
    return engine


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
    assert not engine.tier.open
    engine.save(2)
    assert engine.counted("saves") == 0
    engine.manager.reset_cache()
    assert engine.tier.open
    assert engine.ask(1) == [MISS]
    engine.save(3)
    assert engine.counted("saves") == 1
    assert engines().ask(3) == [MISS]


def test_a_reset_while_requests_hold_blocks_does_not_open_the_tier(engines: Any) -> None:
    """vLLM drops no block then, and says so only to who asked for the reset."""
    engine = engines()
    request = engine.begin()
    engine.manager.reset_cache()
    assert not engine.tier.open
    engine.end(request)
    engine.manager.reset_cache()
    assert engine.tier.open


def lora(name: str, number: int, load_inplace: bool = False) -> Any:
    return SimpleNamespace(lora_name=name, lora_int_id=number, load_inplace=load_inplace)


def test_an_adapter_whose_name_comes_back_is_as_a_weight_update(engines: Any) -> None:
    engine = engines()
    engine.save(1)
    core().add_lora(lora("a", 1))
    core().remove_lora(1)
    assert engine.tier.open
    core().add_lora(lora("a", 2))
    assert not engine.tier.open


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
