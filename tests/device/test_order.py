"""Loads and saves keep their order with a model's kernels, and no edge of it is missing unnoticed.

Each scenario runs on the host and on the simulated device, whose streams are late at random. Each
mutant lacks one edge, and the scenario that is named with it finds that.
"""

import re
from collections.abc import Iterator
from itertools import count
from time import sleep
from types import ModuleType
from typing import Any

import pytest
import torch

from objkv.cache.chunks import ChunkCache
from objkv.connector.kv.metadata import StepPlan
from objkv.transfer.saver import Saver
from tests.device import gpu_order
from tests.device.gpu_order import SCENARIOS, busy_kernel, run_scenarios
from tests.device.mutants import MUTANTS, Edit, Mutant, delay, finds, play
from tests.device.ordering.rig import OrderRig, Scenario
from tests.device.ordering.setup import STRIDED, WHOLE, CacheLayout, Pages, Setup

HOST = torch.device("cpu")
SEEDS = (1, 2)
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
WAITS = ("synchronize", "blocking", "pageable", "strided")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """PyTorch's own threads spin while they wait for each other, on cores that streams need."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_scenarios_and_mutants_are_enough_and_named_once() -> None:
    assert len(BY_NAME) == len(SCENARIOS) >= 20
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 25
    assert all(scenario.description for scenario in SCENARIOS)
    assert {mutant.found_by for mutant in MUTANTS} <= set(BY_NAME)


@pytest.mark.parametrize("name", BY_NAME)
def test_all_bytes_are_right_on_the_host(name: str) -> None:
    (verdict,) = run_scenarios(HOST, scenarios=(BY_NAME[name],))
    assert verdict.is_right, verdict


def _random_steps(scenario: Scenario = BY_NAME["steps in random order"]) -> str:
    """Run the scenario on the host. Why it failed, or nothing."""
    (verdict,) = run_scenarios(HOST, scenarios=(scenario,))
    return verdict.fault


def test_random_steps_name_a_save_whose_bytes_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    stored, numbers = OrderRig.stored, count()

    def flipped(*args: Any) -> Pages | None:
        pages = stored(*args)
        if pages is not None and next(numbers) == 1:
            pages[2].view(torch.uint8)[3].flatten()[5] ^= 1
        return pages

    monkeypatch.setattr(OrderRig, "stored", flipped)
    fault = _random_steps()
    assert re.search(r"1 have wrong bytes: save \d+ \d+, chunk 5: layer 2, blocks \[3\]", fault)


def test_random_steps_name_a_load_whose_bytes_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    read, numbers = OrderRig.read, count()

    def flipped(*args: Any) -> Pages:
        pages = read(*args)
        if next(numbers) == 1:
            pages[0].view(torch.uint8)[1] ^= 1
        return pages

    monkeypatch.setattr(OrderRig, "read", flipped)
    assert re.search(r"1 have wrong bytes: load \d+ \d+: layer 0, blocks \[1\]", _random_steps())


def test_random_steps_tell_dropped_saves_from_wrong_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    take, every = Saver._take, 3

    def dropping(saver: Saver, plan: Any, save: Any, key: Any) -> Any:
        return take(saver, plan, save, key) if next(numbers) % every else None

    monkeypatch.setattr(Saver, "_take", dropping)
    numbers = count()
    assert not _random_steps(), "counted, and most are saved"
    every, numbers = 1, count()
    fault = _random_steps()
    assert re.search(r"are missing: save \d+ \d+, chunk 4, .*; counted {'save_drops': \d+}", fault)
    monkeypatch.setattr(Saver, "_count_drop", lambda saver, key: None)
    every, numbers = 3, count()
    assert re.search(r"are missing: save \d+ \d+, chunk 4, .*; counted {}", _random_steps())


@pytest.mark.parametrize("name", BY_NAME)
def test_the_first_fetch_may_end_last(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenarios read blocks only after their load was reported."""
    fetch, numbers = ChunkCache.get_into, count()

    def slow_at_first(*args: Any, **kwargs: Any) -> int | None:
        if next(numbers) == 0:
            sleep(0.1)
        return fetch(*args, **kwargs)

    monkeypatch.setattr(ChunkCache, "get_into", slow_at_first)
    (verdict,) = run_scenarios(HOST, scenarios=(BY_NAME[name],))
    assert verdict.is_right, verdict


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("seed", SEEDS)
def test_all_bytes_are_right_on_a_device(sim: ModuleType, name: str, seed: int) -> None:
    assert not play(torch.device("sim:0"), BY_NAME[name], seed)


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_each_missing_edge_is_found(sim: ModuleType, mutant: Mutant) -> None:
    assert finds(BY_NAME[mutant.found_by], mutant)


@pytest.mark.parametrize(
    ("place", "old"),
    [
        ("transfer.loading.loads:Loads.submit", "not in it"),
        ("transfer.loading.loads:Loads.gone", "pass"),
    ],
)
def test_a_mutant_of_code_that_has_changed_is_an_error(place: str, old: str) -> None:
    with pytest.raises((AssertionError, AttributeError)), Edit(place, old, "pass").applied():
        pass


@pytest.mark.parametrize("layout", [STRIDED, WHOLE], ids=["strided", "whole"])
def test_nothing_waits_for_the_device(sim: ModuleType, layout: CacheLayout) -> None:
    """No copy is from pageable memory, and no thread synchronises."""
    sim.DRIVER.use_batch_copy(True)
    with OrderRig(torch.device("sim:0"), delay, Setup(layout=layout)) as rig:
        rig.write(8, 32, 5.0)
        loads = [
            rig.load_plan(range(4, 7), 50, request=name, sync=name == "s", blank=(80, 82))
            for name in "rs"
        ]
        plan = StepPlan(
            loads=(loads[0],), saves=(rig.save_plan(range(3), 8),), reused=frozenset({"r"})
        )
        sim.counts()
        rig.step(plan)
        rig.begin(StepPlan(loads=(loads[1],), reused=frozenset({"r"})))
        rig.worker.start_loads(StepPlan(loads=(loads[1],)))
        rig.worker.wait_layer("layers.0")
        rig.end(StepPlan())
        rig.until_received()
        assert rig.saver.drain(rig.setup.patience_s)
        seen = sim.counts()
    assert any(call in ("h2d", "batch copy") for call, _ in seen)
    waits = {
        (call, thread): number
        for (call, thread), number in seen.items()
        if call.endswith(WAITS) or call.startswith("at once")
    }
    assert not waits


def test_a_step_without_work_does_not_call_the_driver(sim: ModuleType) -> None:
    with OrderRig(torch.device("sim:0"), delay, Setup()) as rig:
        rig.write(8, 32, 5.0)
        rig.step(StepPlan(saves=(rig.save_plan(range(3), 8),)))
        rig.until_sent()
        assert rig.saver.drain(rig.setup.patience_s)
        sim.counts()
        for _ in range(3):
            rig.step(StepPlan())
        assert not sim.counts()


def test_a_stream_is_busy_without_help_of_the_driver(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_order, "_MATRIX", 64)
    device = torch.device("sim:0")
    keep_busy = busy_kernel(device)
    stream = torch.get_device_module(device).Stream(device)
    sim.counts()
    keep_busy(stream, 0.01)
    assert {call for call, _ in sim.counts()} >= {"kernel"}
    busy_kernel(HOST)(stream, 1.0)


def test_an_exception_is_a_failure_of_its_scenario_alone() -> None:
    def fail(rig: OrderRig) -> bool:
        """A scenario that fails"""
        raise ValueError("first line\nsecond line")

    last = SCENARIOS[-1]
    failed, right = run_scenarios(HOST, scenarios=(Scenario("fails", fail), last))
    assert (failed.is_right, failed.fault) == (False, "ValueError: first line")
    assert (right.name, right.is_right) == (last.name, True)


def test_the_program_fails_where_a_scenario_does(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(rig: OrderRig) -> bool:
        """A scenario that fails"""
        return False

    monkeypatch.setattr(gpu_order, "SCENARIOS", SCENARIOS[:1])
    assert gpu_order.main("sim", "own") == 0
    monkeypatch.setattr(gpu_order, "SCENARIOS", (*SCENARIOS[:1], Scenario("fails", fail)))
    assert gpu_order.main("sim", "own") == 1
    assert "FAILED own, fails: A scenario that fails" in capsys.readouterr().out
