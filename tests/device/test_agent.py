"""A device reads a node agent's memory: in which way, when it hangs, and when the agent dies."""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from objkv.agent.client import AgentConnection
from objkv.connector.kv.metadata import StepPlan
from objkv.index.sqlite.index import SqliteIndex
from objkv.stores.local import LocalStore
from objkv.transfer.devices import open_lane
from objkv.transfer.loading import loader
from objkv.transfer.loading.loader import Loader
from objkv.transfer.loading.loads import LoadLimits
from objkv.transfer.registration import DeviceFrames
from objkv.transfer.slabs import Slab, SlabPool
from tests.device.mutants import delay
from tests.device.ordering.agent import WAYS, agent_rig
from tests.device.ordering.setup import Setup
from tests.support.agents import AgentProcess
from tests.support.device import caches_on
from tests.support.paged_cache import BLOCKS, PATIENCE_S, Replica, same_blocks, wait_until

DEVICE = "sim:0"
CHUNKS, KILLS = 4, 3


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """PyTorch's own threads spin while they wait for each other, on cores that streams need."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("way", WAYS)
def test_registered_memory_is_read_in_place_and_other_memory_by_way_of_slabs(
    sim: ModuleType, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slabs, take = list[Slab](), DeviceFrames.take

    def counted(self: DeviceFrames, memory: memoryview, sizes: list[int]) -> Any:
        found = take(self, memory, sizes)
        slabs.extend([found[2]] if found[2] is not None else [])
        return found

    monkeypatch.setattr(DeviceFrames, "take", counted)
    with agent_rig(way)(torch.device(DEVICE), delay, Setup()) as rig:

        def load(request: str) -> bool:
            slabs.clear()
            rig.step(StepPlan(loads=(rig.load_plan(range(4), 8, request=request),)))
            rig.until_received(request)
            return not rig.worker.take_failed_blocks()

        assert load("first")
        assert bool(slabs) == (way != "registered")
        if way == "registering":
            wait_until(lambda: load("again") and not slabs)


def test_two_slabs_are_enough_for_any_load_and_a_hung_device_is_a_miss(sim: ModuleType) -> None:
    rig = agent_rig("refused")(torch.device(DEVICE), delay, Setup(load_slabs=2, deadline_s=0.3))
    with rig:
        stream: Any = rig.load_lane
        sim.hold(stream.stream)
        rig.step(StepPlan(loads=(rig.load_plan(range(4), 8),)))
        job = rig.loader._jobs["r"]
        rig.wait_until(job.is_over)
        assert rig.load_slabs.leased == 2
        sim.hold(stream.stream, False)
        rig.until_received()
        assert rig.worker.take_failed_blocks()
        rig.settle()
        assert rig.load_slabs.free == 2


def test_a_device_that_hangs_keeps_its_arena_registered_and_mapped(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(loader, "_KEPT", kept)
    setup = Setup(deadline_s=0.3)
    with agent_rig("registered")(torch.device(DEVICE), delay, setup) as rig:
        stream: Any = rig.load_lane
        arena, windows = rig.agent.arena, rig.on_device._windows
        sim.hold(stream.stream)
        rig.step(StepPlan(loads=(rig.load_plan(range(4), 8),)))
        rig.wait_until(lambda: rig.loader.leased == 4)
        rig.wait_until(lambda: bool(rig.recorder.value("load_bytes")))
        rig.agent._is_lost = True
        rig.loader.cancel("unknown")
        rig.wait_until(lambda: bool(kept))
        assert arena.fd >= 0, "mapped"
        assert rig.node.core.residents.leased() == 4
        sim.hold(stream.stream, False)
        rig.until_received()
        rig.synchronize()
        assert not sim.take_error(), "its copies still had memory"
        (agent,) = kept
        for undo in windows._undo.values():  # as the end of the process does
            undo()
        agent.close()


class ByProcess:
    """A replica on the device whose agent is another process."""

    def __init__(self, folder: Path, way: str, sim: ModuleType) -> None:
        sim.allow_read_only(way != "refused")
        self._store, self._index = LocalStore(folder / "chunks"), SqliteIndex(folder / "index")
        self.writer = Replica(self._store, self._index, seed=1)  # type: ignore[arg-type]
        self.writer.save(range(CHUNKS))
        self.reader = Replica(self._store, self._index, seed=2)  # type: ignore[arg-type]
        self.reader.loader.close()
        self._settings = {
            "bulk_url": f"file://{folder / 'chunks'}",
            "index_url": f"sqlite://{folder / 'index'}",
            "agent_memory_bytes": str(1 << 20),
        }
        self.agent = AgentProcess(self._settings)
        lane = open_lane(torch.device(DEVICE), urgent=True)
        slab_bytes = self.reader.load_slabs.slab_bytes
        slabs = SlabPool("load", count=2, slab_bytes=slab_bytes, pin=sim.DRIVER.pin)
        self.reader.loader = Loader(  # type: ignore[assignment]
            {0: self.reader.paged},
            lane,
            self._connect,
            limits=LoadLimits(64, PATIENCE_S, PATIENCE_S, join_s=PATIENCE_S),
            recorder=self.reader.recorder,
            on_device=DeviceFrames(slabs, sim.DRIVER.pin_read_only, begin=lane.adopt_thread),
        )

    def _connect(self) -> Any:
        return AgentConnection(self.agent.path, wants_arena=True)

    def restart(self) -> None:
        self.agent.path.unlink(missing_ok=True)
        self.agent = AgentProcess(self._settings, path=self.agent.path)

    def is_right(self, blocks: Any) -> bool:
        return same_blocks(self.writer.caches, blocks, self.reader.caches, blocks)

    def close(self) -> None:
        self.reader.close()
        self.writer.close()
        self.agent.kill()
        self._store.close()
        self._index.close()


@pytest.mark.parametrize("way", ["registering", "refused"])
def test_an_agent_that_is_killed_costs_misses_and_no_wrong_byte(
    sim: ModuleType, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_RETRY_MAX_S", 0.1)
    everything, dice = range(1, 1 + CHUNKS * BLOCKS), random.Random(way)
    with caches_on(torch.device(DEVICE)):
        world = ByProcess(tmp_path, way, sim)
        sim.slow(DEVICE, 0, 2000)
        for _ in range(KILLS):
            wait_until(lambda: not world.reader.load(range(CHUNKS), 1).failed_blocks)
            assert world.is_right(everything)
            for cache in world.reader.caches:
                cache.zero_()
            world.reader.loader.submit(world.reader.load_plan(range(CHUNKS), 1))
            time.sleep(dice.uniform(0, 6e-3))
            world.agent.kill()
            failed = world.reader.outcome().failed_blocks
            loaded = [block for block in everything if block not in failed]
            assert not loaded or world.is_right(loaded)
            world.restart()
        wait_until(lambda: not world.reader.load(range(CHUNKS), 1).failed_blocks)
        assert world.is_right(everything)
        world.close()
