"""An ordering rig whose worker loads and saves by a node agent, which runs in the same process.

Memory of the agent is overwritten as soon as no lease protects it, so a copy that comes too late,
or a lease that ends too early, shows as wrong bytes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast
from unittest.mock import patch

from objkv.agent.client import AgentConnection
from objkv.agent.outbox import AgentSaves, Outbox
from objkv.agent.residents import Resident, Residents
from objkv.codec.payload import payload_bytes_max
from objkv.connector.kv.metadata import StepPlan
from objkv.connector.kv.worker import Transfers, WorkerSide
from objkv.connector.programs import gpu_order
from objkv.connector.programs.ordering.rig import OrderRig, Scenario
from objkv.connector.programs.ordering.setup import NAMESPACE, WHOLE, Pages, Setup, equal
from objkv.transfer.devices import driver_of
from objkv.transfer.lanes import Lane
from objkv.transfer.loading.loader import Loader
from objkv.transfer.loading.loads import LoadLimits
from objkv.transfer.registration import DeviceFrames
from objkv.transfer.saver import SaveLimits, Saver
from objkv.transfer.slabs import SlabPool
from tests.agent.world import Node
from tests.device import simulated
from tests.device.mutants import mutant

ARENA_BYTES = 4 << 20
WINDOW_BYTES = 256 << 10
"""More than a payload of the rig. Some lie across two windows."""
POISON = 0xEE


class AgentRig(OrderRig):
    """Its slabs of loads are those through which the device reads what is not registered."""

    window_bytes = WINDOW_BYTES
    arena_bytes = ARENA_BYTES
    is_registered = False
    """Whether the whole arena is registered before the first load. If not, as in use, windows are
    when they were first read."""
    is_refused = False
    """Whether the device registers no memory for reading."""

    def _open_stores(self) -> None:
        self.node = Node(memory=self.arena_bytes).listen()
        self._old: list[Node] = []
        self.bulk = self.node.store
        self._index = cast(Any, self.node.index)

    def open_worker(self) -> None:
        """See ``OrderRig.open_worker``."""
        simulated.allow_read_only(not self.is_refused)
        super().open_worker()
        self.loader.close()
        self.saver.close(0.0)
        setup, lane = self.setup, self.load_lanes[0]
        self.load_lanes = self.load_lanes[:1]
        bounds = LoadLimits(1024, setup.deadline_s, setup.deadline_s)
        self.on_device = DeviceFrames(
            self.load_slabs,
            driver_of(self.device).pin_read_only,
            window_bytes=self.window_bytes,
            begin=lane.adopt_thread,
        )
        self.loader = Loader(  # type: ignore[assignment]
            {0: self.pages},
            lane,
            partial(self.connect, wants_arena=True),
            limits=bounds,
            recorder=self.recorder,
            on_device=self.on_device,
        )
        if self.is_registered:
            self.register()
        self.open_outbox()
        self.worker = WorkerSide(
            self.worker._config,
            self.geometry,
            self.worker._rank,
            {0: self.pages},
            transfers=Transfers(self.loader, self.saver, self.target),
            tracing=self.worker._tracing,
        )

    def register(self) -> None:
        """Register the whole arena."""
        windows = self.on_device._windows
        assert windows is not None
        start, nbytes = windows._address, windows._nbytes
        for at in range(0, nbytes, self.window_bytes):
            windows.has(start + at, 1)
        self.wait_until(lambda: windows.registered_bytes == nbytes)

    def open_outbox(self) -> None:
        """Make the slabs of saves anew, in memory that the agent has, too."""
        setup, slab_bytes = self.setup, -(-payload_bytes_max(self.pages.layers) // 4096) * 4096
        outbox = Outbox(setup.save_slabs * slab_bytes)
        pin = driver_of(self.device).pin
        self.save_slabs = SlabPool(
            "save", count=setup.save_slabs, slab_bytes=slab_bytes, pin=pin, fd=outbox.fd
        )
        slabs = self.take_all_slabs(self.save_slabs)
        self._slab_memory = [slab.tensor for slab in slabs]
        self.give_back(slabs)
        self.target = AgentSaves(
            lambda fd: self.connect(outbox=fd), outbox, self.save_slabs.memory.numpy()
        )
        self.saver = self._open_saver(self.save_lane)

    def _open_saver(self, lane: Lane) -> Saver:
        if not hasattr(self, "target"):
            return super()._open_saver(lane)
        setup = self.setup
        return Saver(
            self.target,
            {0: self.pages},
            self.save_slabs,
            lane=lane,
            limits=SaveLimits(1, 1024, setup.save_deadline_s, "none", "rig"),
            recorder=self.recorder,
        )

    def connect(self, **options: Any) -> AgentConnection:
        """A new connection to the agent."""
        return AgentConnection(self.node.path, call_s=self.setup.patience_s, **options)

    def stored(self, chunk: int, namespace: str = NAMESPACE) -> Pages | None:
        """See ``OrderRig.stored``. Waits for the agent, too."""
        self.saver.drain(self.setup.patience_s)
        self.node.saves.drain(self.setup.patience_s)
        return super().stored(chunk, namespace)

    @property
    def agent(self) -> AgentConnection:
        """The loader's connection."""
        agent: AgentConnection = self.loader._agent  # type: ignore[attr-defined]
        return agent

    def restart(self) -> None:
        """Another agent at the same place, over the same store."""
        old = self.node
        assert old.server is not None
        old.core.close(self.setup.patience_s)
        old.server.close()
        old.path.unlink()
        self.node = Node(memory=self.arena_bytes, path=old.path, store=old.store).listen()
        self._old.append(old)

    def settle(self) -> None:
        """Wait until the agent has nothing leased."""
        self.wait_until(lambda: self.node.residents.leased() == 0)

    def close(self) -> None:
        """See ``OrderRig.close``. Nothing may be leased then."""
        super().close()
        self.settle()
        assert self.node.residents.check()
        for node in (self.node, *self._old):
            node.close()


WAYS: dict[str, dict[str, bool]] = {
    "registered": {"is_registered": True},
    "registering": {},
    "refused": {"is_refused": True},
}
"""How the device reads the arena, as attributes of the rig."""


@contextmanager
def by_agent(**settings: Any) -> Iterator[None]:
    """Let scenarios run on an ``AgentRig`` with these attributes, whose agent overwrites memory as
    soon as its last lease ends."""
    release = Residents._release

    def poisoned(self: Residents, one: Resident) -> None:
        if one.leases == 1 and one.offset >= 0:
            self.view(one)[:] = bytes([POISON]) * one.nbytes
            self._unlist(one)
        release(self, one)

    rig = type("Rig", (AgentRig,), settings)
    with patch.object(Residents, "_release", poisoned), patch.object(gpu_order, "OrderRig", rig):
        yield


# Scenarios of their own.


def connection_is_lost(rig: OrderRig) -> bool:
    """Copies from the arena that are queued when the connection to its agent is lost"""
    assert isinstance(rig, AgentRig)
    _load_late(rig, "r")
    before = rig.agent
    before._is_lost = True
    rig.loader.cancel("unknown")  # wakes its thread
    rig.until_received("r")
    if rig.worker.take_failed_blocks():
        rig.write(_FIRST, _blocks(rig), _OWNER)
        rig.synchronize()
        if not rig.holds(_read(rig), _OWNER):
            return False
    rig.wait_until(lambda: rig.loader._agent not in (None, before))  # type: ignore[attr-defined]
    return _is_right(rig, "again")


def agent_restarts(rig: OrderRig) -> bool:
    """Copies from the arena of an agent that ends meanwhile, and loads from that of the next"""
    assert isinstance(rig, AgentRig)
    _load_late(rig, "r")
    rig.restart()
    rig.until_received("r")
    if not rig.worker.take_failed_blocks() and not equal(_read(rig), rig.expected(_CHUNKS)):
        return False
    rig.wait_until(lambda: rig.loader._agent is not None and rig.loader._agent.is_open)  # type: ignore[attr-defined]
    return _is_right(rig, "again")


def memory_is_reused(rig: OrderRig) -> bool:
    """An arena with room for few payloads, whose memory is overwritten when its leases end"""
    for number in range(6):
        rig.delay_loads(_SLOW_S / 4)
        if not _is_right(rig, f"r{number}", sync=bool(number % 2)):
            return False
    return True


def _load_late(rig: AgentRig, request: str) -> None:
    """Load with all copies queued behind a delay."""
    rig.delay_loads(_SLOW_S)
    rig.step(StepPlan(loads=(rig.load_plan(_CHUNKS, _FIRST, request=request),)))
    nbytes = len(_CHUNKS) * rig.pages.raw_bytes
    rig.wait_until(lambda: rig.recorder.value("load_bytes") >= nbytes)


def _is_right(rig: OrderRig, request: str, *, sync: bool = False) -> bool:
    """Load, and compare all bytes."""
    plan = StepPlan(loads=(rig.load_plan(_CHUNKS, _FIRST, request=request, sync=sync),))
    if sync:
        rig.begin(plan)
        rig.worker.start_loads(plan)
        rig.end(plan)
    else:
        rig.step(plan)
        rig.until_received(request)
    return not rig.worker.take_failed_blocks() and equal(_read(rig), rig.expected(_CHUNKS))


def _blocks(rig: OrderRig) -> int:
    return len(_CHUNKS) * rig.setup.layout.chunk_blocks


def _read(rig: OrderRig) -> Pages:
    return rig.read(_FIRST, _blocks(rig))


_FIRST, _CHUNKS, _OWNER, _SLOW_S = 8, range(4), 7.0, 0.1
_TWO_SLABS = Setup(load_slabs=2)
AGENT_SCENARIOS = (
    Scenario("connection lost", connection_is_lost),
    Scenario("agent restarted", agent_restarts, Setup(layout=WHOLE)),
    Scenario("memory reused", memory_is_reused, _TWO_SLABS),
    Scenario("memory reused, whole blocks", memory_is_reused, replace(_TWO_SLABS, layout=WHOLE)),
)

_SHARED = "transfer.loading.loader:"
_REGISTRATION = "transfer.registration:"
AGENT_MUTANTS = {
    mutant(
        "leases end before their copies",
        "memory reused",
        _SHARED + "Loader._advance",
        "if one.is_copied and _is_past(one.writer.mark):",
        "if one.is_copied:",
    ): "registered",
    mutant(
        "leases of a lost connection end before their copies",
        "connection lost",
        _SHARED + "Loader._lose",
        "keep = keep or not self._await(marks)",
    ): "registered",
    mutant(
        "an arena is unmapped while it is registered",
        "connection lost",
        _SHARED + "Loader._leave",
        "self._on_device.detach(agent.close)",
        "agent.close()",
    ): "registered",
    mutant(
        "an arena stays registered",
        "connection lost",
        _REGISTRATION + "Windows._work",
        "for undo in self._undo.values():",
        "for undo in ():",
    ): "registered",
    mutant(
        "an arena is unmapped before it is unlocked",
        "connection lost",
        _REGISTRATION + "Windows.close",
        "if self._thread is not None:",
        "if False:",
    ): "registered",
    mutant(
        "windows are read before they are registered",
        "memory reused, whole blocks",
        _REGISTRATION + "Windows.has",
        "first in self._undo",
        "first in self._known",
    ): "refused",
    mutant(
        "frames across two windows are read in place",
        "memory reused, whole blocks",
        _REGISTRATION + "Windows.has",
        "first == last and first in self._undo",
        "{first, last} <= self._undo.keys()",
    ): "registered",
    mutant(
        "frames are read in place where the device refuses",
        "memory reused, whole blocks",
        _REGISTRATION + "DeviceFrames.take",
        "if windows.has(start, ends[-1] - start):",
        "if True:",
    ): "refused",
    mutant(
        "slabs of an arena's frames are free before their copies",
        "memory reused",
        _SHARED + "_Reading._write",
        "slab.release_after(mark)",
        "slab.release()",
    ): "refused",
    mutant(
        "payloads that wait for a slab count as copied",
        "memory reused",
        _SHARED + "Loader._read",
        "one.is_stalled = True",
        "self._done(one)",
    ): "refused",
}
"""Mutants, and the way in which the device reads the arena when they are found."""
