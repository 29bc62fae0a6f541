"""A device reads a node agent's memory: in which way, and when it hangs."""

from types import ModuleType
from typing import Any

import pytest
import torch

from objkv.connector.kv.metadata import StepPlan
from objkv.transfer.loading import connection
from objkv.transfer.registration import ArenaRegistration
from objkv.transfer.slabs import Slab
from tests.device.gpu_order import simulated_delay
from tests.device.ordering.rig import REFUSED, REGISTERED, REGISTERING, WAYS, OrderRig, Setup
from tests.support.paged_cache import wait_until

DEVICE = "sim:0"


@pytest.mark.parametrize("way", WAYS)
def test_registered_memory_is_read_in_place_and_other_memory_by_way_of_slabs(
    sim: ModuleType, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slabs, take = list[Slab](), ArenaRegistration.readable

    def counted(self: ArenaRegistration, *wanted: Any) -> Any:
        found = take(self, *wanted)
        slabs.extend([found[3]] if found[3] is not None else [])
        return found

    monkeypatch.setattr(ArenaRegistration, "readable", counted)
    with OrderRig(torch.device(DEVICE), simulated_delay, Setup(way=way)) as rig:

        def load(request: str) -> bool:
            slabs.clear()
            rig.step(StepPlan(loads=(rig.load_plan(range(4), 8, request=request),)))
            rig.until_received(request)
            return not rig.worker.take_failed_blocks()

        assert load("first")
        assert bool(slabs) == (way != REGISTERED)
        if way == REGISTERING:
            wait_until(lambda: load("again") and not slabs)


def test_two_slabs_are_enough_for_any_load_and_a_hung_device_is_a_miss(sim: ModuleType) -> None:
    setup = Setup(way=REFUSED, load_slabs=2, deadline_s=0.3)
    with OrderRig(torch.device(DEVICE), simulated_delay, setup) as rig:
        stream: Any = rig.load_lane
        sim.hold(stream.stream)
        rig.step(StepPlan(loads=(rig.load_plan(range(4), 8),)))
        rig.wait_until(lambda: rig.loader.in_flight == 0)
        assert rig.load_slabs.leased == 2
        sim.hold(stream.stream, False)
        rig.until_received()
        assert rig.worker.take_failed_blocks()
        rig.settle()
        assert rig.load_slabs.leased == 0


def test_a_device_that_hangs_keeps_its_arena_registered_and_mapped(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, undos, pin = list[Any](), list[Any](), sim.DRIVER.pin_read_only
    monkeypatch.setattr(connection, "_KEPT", kept)

    def pinned(*place: int) -> Any:
        undos.append(pin(*place))
        return undos[-1]

    monkeypatch.setattr(sim.DRIVER, "pin_read_only", pinned)
    with OrderRig(torch.device(DEVICE), simulated_delay, Setup(deadline_s=0.3)) as rig:
        stream: Any = rig.load_lane
        arena = rig.agent.arena
        sim.hold(stream.stream)
        rig.step(StepPlan(loads=(rig.load_plan(range(4), 8),)))
        rig.wait_until(lambda: rig.loader.link.leased == 4)
        rig.wait_until(lambda: bool(rig.recorder.value("load_bytes")))
        rig.agent.is_lost = True
        rig.loader.cancel("unknown")
        rig.wait_until(lambda: bool(kept))
        assert arena.fd >= 0, "mapped"
        assert rig.node.core.arena_cache.leased() == 4
        sim.hold(stream.stream, False)
        rig.until_received()
        rig.synchronize()
        assert not sim.take_error(), "its copies still had memory"
        (agent,) = kept
        for undo in undos:  # as the end of the process does
            undo()
        agent.close()
