"""A device loads from a node agent's memory, and saves by its outbox: all bytes are right, and no
edge of it is missing unnoticed. Streams are late at random, and the agent overwrites memory as soon
as no lease protects it.
"""

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
from tests.device.agent_rig import AGENT_MUTANTS, by_agent
from tests.device.gpu_order import SCENARIOS
from tests.device.mutants import Mutant, delay, finds, play
from tests.device.ordering import agent
from tests.device.ordering.agent import WAYS, AgentRig, agent_rig
from tests.device.ordering.setup import STRIDED, WHOLE, CacheLayout, Setup
from tests.support.agents import AgentProcess
from tests.support.device import caches_on
from tests.support.paged_cache import BLOCKS, PATIENCE_S, Replica, same_blocks, wait_until

DEVICE = "sim:0"
BY_NAME = {scenario.name: scenario for scenario in (*SCENARIOS, *agent.SCENARIOS)}
SEEDS = {way: seed for seed, way in enumerate(WAYS)}
WAITS = ("synchronize", "blocking", "pageable", "strided")
CHUNKS, KILLS = 4, 3


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """PyTorch's own threads spin while they wait for each other, on cores that streams need."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BY_NAME)
def test_all_bytes_are_right_by_an_agent(sim: ModuleType, name: str, way: str) -> None:
    with by_agent(way):
        assert not play(torch.device(DEVICE), BY_NAME[name], SEEDS[way])


@pytest.mark.parametrize("mutant", AGENT_MUTANTS, ids=[mutant.name for mutant in AGENT_MUTANTS])
def test_each_missing_edge_is_found(sim: ModuleType, mutant: Mutant) -> None:
    with by_agent(AGENT_MUTANTS[mutant]):
        assert finds(BY_NAME[mutant.found_by], mutant)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", [STRIDED, WHOLE], ids=["strided", "whole"])
def test_nothing_waits_for_the_device(sim: ModuleType, layout: CacheLayout, way: str) -> None:
    """No copy is from pageable memory, and no thread synchronises. Unlocking is done by a thread of
    its own, registering too."""
    sim.DRIVER.use_batch_copy(True)
    rig = agent_rig(way)(torch.device(DEVICE), delay, Setup(layout=layout))
    with rig:
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
    waits = {
        (call, thread): number
        for (call, thread), number in seen.items()
        if call.endswith(WAITS) or call.startswith("at once")
    }
    assert not waits
    registering = {thread for call, thread in seen if call == "register"}
    assert registering <= {"objkv-register"}


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


def test_saves_go_by_the_outbox_which_is_pinned(sim: ModuleType) -> None:
    with AgentRig(torch.device(DEVICE), delay, Setup()) as rig:
        rig.write(8, 32, 5.0)
        assert rig.save_slabs.memory.is_pinned()
        sim.counts()
        rig.step(StepPlan(saves=(rig.save_plan(range(3), 8),)))
        assert all(rig.holds(rig.stored(chunk), 5.0) for chunk in range(3))
        seen = sim.counts()
    assert not [call for call, _ in seen if call.endswith(WAITS)]


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
