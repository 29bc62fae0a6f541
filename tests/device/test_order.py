"""Loads and saves keep their order with a model's kernels, and no edge of it is missing unnoticed.

Each scenario runs on the host, and on the simulated device, whose streams are late at random. The
node agent overwrites memory that no lease protects. Each mutant lacks one edge, and the scenario
that is named with it finds that.
"""

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from objkv.connector.kv.metadata import StepPlan
from tests.device.gpu_order import SCENARIOS, run_scenarios, simulated_delay
from tests.device.mutants import BY_NAME, MUTANTS, play, rounds_to_find
from tests.device.ordering.rig import (
    REFUSED,
    REGISTERED,
    REGISTERING,
    STRIDED,
    WAYS,
    WHOLE,
    CacheLayout,
    OrderRig,
    Setup,
)

ROOT = Path(__file__).parents[2]
HOST, SIM = torch.device("cpu"), "sim:0"
WAITS = ("synchronize", "blocking", "pageable", "strided")
IN_WAYS = [(scenario.name, way) for way in WAYS for scenario in SCENARIOS]
QUICK = (
    ("load after a kernel, whole blocks", REGISTERED),
    ("layer by layer", REGISTERED),
    ("load aborted while queued", REGISTERED),
    ("slabs of loads", REFUSED),
    ("save among kernels", REGISTERED),
    ("save preempted", REGISTERED),
    ("closed during a save", REGISTERED),
    ("encoder outputs saved", REGISTERED),
    ("steps in random order", REGISTERED),
    ("connection lost", REGISTERED),
    ("memory reused, whole blocks", REGISTERING),
    ("memory reused", REFUSED),
)
QUICK_MUTANTS = ("copies do not follow the mark of their step", "preempted requests are not fenced")


def marks_of(is_quick: bool) -> Any:
    return () if is_quick else pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize("name", [scenario.name for scenario in SCENARIOS])
def test_all_bytes_are_right_on_the_host(name: str) -> None:
    (verdict,) = run_scenarios(HOST, scenarios=(BY_NAME[name],))
    assert verdict.is_right, verdict


@pytest.mark.parametrize(
    ("name", "way"), [pytest.param(*one, marks=marks_of(one in QUICK)) for one in IN_WAYS]
)
def test_all_bytes_are_right_on_a_device(sim: ModuleType, name: str, way: str) -> None:
    assert not play(BY_NAME[name], way, WAYS.index(way))


@pytest.mark.parametrize("name", QUICK_MUTANTS)
def test_a_missing_edge_is_found(sim: ModuleType, name: str) -> None:
    (mutant,) = (one for one in MUTANTS if one.name == name)
    assert rounds_to_find(mutant)


@pytest.mark.slow
@pytest.mark.usefixtures("sim")
def test_every_missing_edge_is_found() -> None:
    """In a process of its own: a mutant leaves anything behind."""
    command = [sys.executable, "-m", "tests.device.mutants"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("layout", [STRIDED, WHOLE], ids=["strided", "whole"])
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=marks_of(way == REGISTERING)) for way in WAYS]
)
def test_nothing_waits_for_the_device(sim: ModuleType, layout: CacheLayout, way: str) -> None:
    """No copy is from pageable memory, and no thread synchronises. Memory of an agent is registered
    by a thread of its own."""
    sim.DRIVER.use_batch_copy(True)
    with OrderRig(torch.device(SIM), simulated_delay, Setup(layout=layout, way=way)) as rig:
        rig.write(8, 32, 5.0)
        loads = [
            rig.load_plan(range(4, 7), 50, request=name, sync=name == "s", blank=(80, 82))
            for name in "rs"
        ]
        save = rig.save_plan(range(3), 8)
        sim.counts()
        rig.step(StepPlan(loads=(loads[0],), saves=(save,), reused=frozenset({"r"})))
        rig.begin(StepPlan(loads=(loads[1],), reused=frozenset({"r"})))
        rig.worker.start_loads(StepPlan(loads=(loads[1],)))
        rig.worker.wait_layer("layers.0")
        rig.end(StepPlan())
        rig.until_received()
        assert rig.saver.drain(rig.setup.patience_s)
        seen = sim.counts()
        assert not rig.worker.take_failed_blocks()
    assert any(call in ("h2d", "batch copy") for call, _ in seen)
    assert not [call for call, _ in seen if call.endswith(WAITS) or call.startswith("at once")]
    assert {thread for call, thread in seen if call == "register"} <= {"objkv-register"}


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(StepPlan(), id="none"),
        pytest.param(StepPlan(reused=frozenset({"other"})), id="others are preempted"),
    ],
)
def test_a_step_without_work_does_not_call_the_driver(sim: ModuleType, plan: StepPlan) -> None:
    with OrderRig(torch.device(SIM), simulated_delay, Setup()) as rig:
        rig.write(8, 32, 5.0)
        rig.step(StepPlan(saves=(rig.save_plan(range(3), 8),)))
        rig.until_sent()
        assert rig.saver.drain(rig.setup.patience_s)
        sim.counts()
        for _ in range(3):
            rig.step(plan)
        assert not sim.counts()
