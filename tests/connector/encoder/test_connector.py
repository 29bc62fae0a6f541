"""What vLLM calls: both sides behind one class, no error let out, resets heard of."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

from objkv.connector import ObjKVECConnector
from tests.connector.encoder.engine import core, engine, make_model
from tests.connector.encoder.world import request
from tests.support.served import ServedAgent

ROWS, WIDTH = 4, 256


class Engine:
    """Scheduler's and worker's connector of one process, asked in vLLM's order."""

    def __init__(self, model: Path, store: Path, role: str, settings: Any = None) -> None:
        places = {"bulk_url": f"file://{store}/c", "index_url": f"sqlite://{store}/i.sqlite"}
        given = places | (settings or {})
        self.model, self.store = model, store
        self.agent = None if "agent" in given else ServedAgent(given)
        if self.agent is not None:
            given |= {"agent": self.agent.url}
        config = engine(model, role, settings=given)
        self.worker = ObjKVECConnector(config, ECConnectorRole.WORKER)
        self.scheduler = ObjKVECConnector(config, ECConnectorRole.SCHEDULER)
        self.cache: dict[str, torch.Tensor] = {}

    def see(self, name: str, encoded: torch.Tensor) -> bool:
        """Whether the image was encoded."""
        seen = request(f"sees-{name}", name)
        while not self.scheduler.ensure_cache_available(seen, 0):
            self.scheduler.build_connector_meta(step(0))
        promised = self.scheduler.has_cache_item(name)
        self.scheduler.update_state_after_alloc(seen, 0)
        worker = self.worker
        worker.bind_connector_metadata(self.scheduler.build_connector_meta(step(1)))
        if worker.is_consumer:
            worker.start_load_caches(self.cache)
        if not promised:
            self.cache[name] = encoded
            worker.save_caches(encoder_cache=self.cache, mm_hash=name)
        assert name in self.cache
        told: Any = SimpleNamespace(ec_connector_worker_meta=worker.build_connector_worker_meta())
        worker.clear_connector_metadata()
        self.scheduler.update_connector_output(told)
        assert self.scheduler.request_finished(seen) == (False, None)
        return not promised

    def shutdown(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()
        if self.agent is not None:
            self.agent.close()
            self.agent = None


def step(tokens: int) -> Any:
    return SimpleNamespace(total_num_scheduled_tokens=tokens, free_encoder_mm_hashes=[])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Starts engines on one store."""
    (tmp_path / "model").mkdir()
    model = make_model(tmp_path / "model")
    engines: list[Engine] = []

    def begin(role: str = "ec_both") -> Engine:
        engines.append(Engine(model, tmp_path, role))
        return engines[-1]

    yield begin
    for one in engines:
        one.shutdown()


OUTPUT = torch.arange(ROWS * WIDTH).reshape(ROWS, WIDTH).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("saves", "loads", "found"),
    [
        ("ec_both", "ec_both", True),
        ("ec_producer", "ec_consumer", True),
        ("ec_consumer", "ec_both", False),
    ],
)
def test_one_saves_another_loads(start: Any, saves: str, loads: str, *, found: bool) -> None:
    first = start(saves)
    assert first.see("x", OUTPUT)
    first.shutdown()
    first.shutdown()
    second = start(loads)
    assert second.see("x", torch.zeros(ROWS, WIDTH)) is not found
    assert torch.equal(second.cache["x"], OUTPUT) is found


def test_a_bug_costs_an_encode_not_the_engine(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = start()
    monkeypatch.setattr(one.scheduler, "_scheduler", None)  # so that every method fails
    seen = request("b", "x", "y")
    assert one.scheduler.ensure_cache_available(seen, 0)
    assert not one.scheduler.has_cache_item("x")
    assert one.scheduler.request_finished(seen) == (False, None)
    one.worker.save_caches({}, "x")


@pytest.mark.parametrize("broken", ["_track", "_output"])
def test_a_save_that_cannot_be_planned_is_not_made(start: Any, broken: str) -> None:
    """vLLM encodes the image in any case."""
    first = start()

    def fail(*_args: Any) -> None:
        raise AttributeError(broken)

    setattr(first.scheduler._scheduler, broken, fail)
    assert first.see("x", OUTPUT)
    first.shutdown()
    assert start().see("x", OUTPUT)


def test_a_promise_that_cannot_be_kept_is_told(start: Any) -> None:
    """vLLM would not encode the image, and end without a reason."""
    first = start()
    first.see("x", OUTPUT)
    first.shutdown()
    one = start()
    seen = request("b", "x", "y")
    while not one.scheduler.ensure_cache_available(seen, 0):
        one.scheduler.build_connector_meta(step(0))
    assert one.scheduler.has_cache_item("x")
    one.scheduler._scheduler._fetcher._entries.clear()
    with pytest.raises(KeyError):
        one.scheduler.update_state_after_alloc(seen, 0)


@pytest.mark.parametrize("change", ["reset", "encoder", "weights"])
def test_after_weights_may_have_changed_nothing_old_is_loaded(start: Any, change: str) -> None:
    first = start()
    first.see("x", OUTPUT)
    first.shutdown()
    second = start()
    if change == "reset":
        assert second.scheduler.reset_cache()
    elif change == "encoder":
        core().reset_encoder_cache()
    else:
        core().collective_rpc("update_weights")
    assert second.see("x", OUTPUT)


def test_numbers_of_both_sides_reach_vllm(start: Any) -> None:
    one = start()
    one.see("x", OUTPUT)
    assert one.worker.worker.writer.drain(10)
    one.see("y", OUTPUT)
    stats = one.scheduler.get_ec_connector_stats()
    assert stats is not None
    assert stats.data["saves_accepted"] == 1
    assert one.worker.get_ec_connector_stats() is None
    shown = ObjKVECConnector.build_ec_connector_stats(stats.data).reduce()
    assert shown["objkv_encoder_saves_accepted"] == 1
    assert not any(name.endswith("_count") for name in shown)
