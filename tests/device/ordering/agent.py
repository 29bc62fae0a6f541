"""A worker that loads and saves by a node agent, which runs in the same process, and its scenarios.

Memory of the agent is overwritten as soon as no lease protects it, so a copy that comes too late,
or a lease that ends too early, shows as wrong bytes.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, cast
from unittest.mock import patch

from objkv.agent import core
from objkv.agent.memory.arena import PAGE
from objkv.agent.outbox import AgentSaves, Outbox
from objkv.assembly.agent import NodeAgent
from objkv.assembly.backends import open_bulk, open_index
from objkv.codec.payload import payload_bytes_max
from objkv.config import load_config
from objkv.connector.kv.metadata import StepPlan
from objkv.errors import TransferError
from objkv.ops.programs import Program
from objkv.telemetry import MemoryRecorder
from objkv.transfer.devices import driver_of
from objkv.transfer.lanes import Lane
from objkv.transfer.loading.loader import Loader
from objkv.transfer.loading.loads import LoadLimits
from objkv.transfer.registration import DeviceFrames
from objkv.transfer.saver import SaveLimits, Saver
from objkv.transfer.slabs import SlabPool
from tests.device.ordering.rig import OrderRig, Scenario, refuse_pin
from tests.device.ordering.setup import NAMESPACE, WHOLE, Pages, Setup, equal
from tests.support.arenas import LossyConnection, SpoilingResidents

ARENA_BYTES: Final = 32 << 20
"""Room for all that a scenario saves, if the disk is slow."""
WINDOW_BYTES: Final = 256 << 10
"""More than a payload of the rig. Some lie across two windows."""
WAYS: Final = ("registered", "registering", "refused")
"""How a device reads the memory of a node agent: in place, in place once the driver has registered
it, or by way of slabs, because the device registers no read-only memory."""
_FIRST, _CHUNKS, _OWNER, _SLOW_S = 8, range(4), 7.0, 0.1
_KILLS = 2


_BEHIND_MAX = 8
"""Payloads that an agent may still have to save when more are handed over."""


class AgentRig(OrderRig):
    """Its slabs of loads are those for memory that is not registered with the device."""

    seam_bytes = WINDOW_BYTES
    arena_bytes = ARENA_BYTES
    is_registered = False
    """Whether the whole arena is registered before the first load. If not, as in use, windows are
    when they were first read."""
    is_refused = False
    """Whether memory of the arena is never registered, as with devices that cannot."""

    def _open_stores(self) -> None:
        self._folder = TemporaryDirectory(prefix="objkv-")
        self._agent_path = Path(self._folder.name) / "agent.sock"
        self._agent_config = load_config(
            {
                "bulk_url": f"file://{self._folder.name}/chunks",
                "index_url": f"sqlite://{self._folder.name}/index",
                "agent_memory_bytes": self.arena_bytes,
                "drain_deadline_ms": 0,
                "load_threads": self.setup.load_threads,
                "save_threads": self.setup.save_threads,
            },
            environ={},
        )
        self.bulk = open_bulk(self._agent_config, self.recorder)
        self._index = open_index(self._agent_config, self.recorder)
        self.node = self._open_agent()

    def _open_agent(self) -> NodeAgent:
        with patch.object(core, "Residents", SpoilingResidents):
            return NodeAgent(self._agent_config, self._agent_path, MemoryRecorder())

    def open_worker(self) -> None:
        """See ``OrderRig.open_worker``."""
        super().open_worker()
        self.saver.close(0.0)
        self._open_outbox()
        self.worker = self._open_side(self.target)

    def _open_loader(self) -> Loader:
        """Return a loader over the agent's memory."""
        setup, lane = self.setup, self.load_lane
        pin = refuse_pin if self.is_refused else driver_of(self.device).pin_read_only
        self.on_device = DeviceFrames(
            self.load_slabs, pin, window_bytes=self.seam_bytes, begin=lane.adopt_thread
        )
        self.loader = Loader(
            {0: self.pages},
            lane,
            partial(self.connect, wants_arena=True),
            limits=LoadLimits(1024, setup.deadline_s, setup.deadline_s),
            recorder=self.recorder,
            on_device=self.on_device,
        )
        if self.is_registered:
            self.register(self.on_device, self.agent.arena.nbytes)
        return self.loader

    def _open_outbox(self) -> None:
        """Replace the slabs of saves by those of an outbox, whose memory the agent maps, too."""
        setup, slab_bytes = self.setup, -(-payload_bytes_max(self.pages.layers) // PAGE) * PAGE
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
        self.saver = self._saver_by_agent(self.save_lane)

    def _saver_by_agent(self, lane: Lane) -> Saver:
        setup = self.setup
        return Saver(
            self.target,
            {0: self.pages},
            self.save_slabs,
            lane=lane,
            limits=SaveLimits(1024, setup.save_deadline_s, "rig"),
            recorder=self.recorder,
        )

    def connect(self, **options: Any) -> LossyConnection:
        """Return a new connection to the agent."""
        return LossyConnection(self._agent_path, call_s=self.setup.patience_s, **options)

    def stored(self, chunk: int, namespace: str = NAMESPACE) -> Pages | None:
        """See ``OrderRig.stored``. Waits for the agent, too."""
        self.saver.drain(self.setup.patience_s)
        self.node.saves.drain(self.setup.patience_s)
        return super().stored(chunk, namespace)

    @property
    def agent(self) -> LossyConnection:
        """The loader's connection."""
        agent = self.loader.agent
        assert isinstance(agent, LossyConnection)
        return agent

    def let_saves_catch_up(self) -> None:
        """See ``OrderRig``."""
        self.wait_until(lambda: self.node.saves.waiting < _BEHIND_MAX)

    def restart(self) -> None:
        """End the agent, and start another one at the same place, over the same stores."""
        self.node.close()
        self.node = self._open_agent()

    @contextmanager
    def agent_process(self) -> Iterator[Program]:
        """Run an agent as a process of its own at the same place, until the end of the block."""
        self.node.close()
        before, log = self.loader.agent, Path(self._folder.name) / "agent.log"
        names = ("bulk_url", "index_url", "agent_memory_bytes")
        settings = {
            f"OBJKV_{name.upper()}": str(getattr(self._agent_config, name)) for name in names
        }
        arguments = ("-m", "objkv", "agent", "--socket", str(self._agent_path))
        with Program("the agent", arguments, log, settings, speaks=False) as program:
            self.wait_until(lambda: self.loader.agent not in (None, before))
            yield program

    def overwrite_loads(self) -> None:
        """Wait until no load has any memory. The agent overwrites it at once."""
        self.settle()

    def settle(self) -> None:
        """Wait until the agent has nothing leased."""
        self.wait_until(lambda: self.node.core.residents.leased() == 0)

    def close(self) -> None:
        """See ``OrderRig.close``. Nothing may be leased then."""
        try:
            super().close()
            self.settle()
            if not self.node.core.residents.check():
                raise TransferError("the agent's account of its memory is wrong")
        finally:
            self.node.close()
            self._folder.cleanup()


_REGISTERED, _REGISTERING, _REFUSED = WAYS
_ATTRIBUTES: Final[Mapping[str, Mapping[str, bool]]] = {
    _REGISTERED: {"is_registered": True},
    _REGISTERING: {},
    _REFUSED: {"is_refused": True},
}


def agent_rig(way: str, **settings: Any) -> type[AgentRig]:
    """Return a rig with these attributes, whose device reads the arena in one of ``WAYS``."""
    attributes = {**_ATTRIBUTES[way], **settings}
    return cast("type[AgentRig]", type("AgentRig", (AgentRig,), attributes))


# The scenarios.


def connection_is_lost(rig: OrderRig) -> bool:
    """Copies from the arena that are queued when the connection to its agent is lost"""
    assert isinstance(rig, AgentRig)
    _load_late(rig, "r")
    before = rig.agent
    before.is_lost = True
    rig.loader.cancel("unknown")  # wakes its thread
    rig.until_received("r")
    if rig.worker.take_failed_blocks():
        rig.write(_FIRST, _blocks(rig), _OWNER)
        rig.synchronize()
        if not rig.holds(_read(rig), _OWNER):
            return False
    rig.wait_until(lambda: rig.loader.agent not in (None, before))
    return _is_right(rig, "again")


def agent_restarts(rig: OrderRig) -> bool:
    """Copies from the arena of an agent that ends meanwhile, and loads from that of the next"""
    assert isinstance(rig, AgentRig)
    _load_late(rig, "r")
    rig.restart()
    rig.until_received("r")
    if not rig.worker.take_failed_blocks() and not equal(_read(rig), rig.expected(_CHUNKS)):
        return False
    rig.wait_until(lambda: rig.loader.agent is not None and rig.agent.is_open)
    return _is_right(rig, "again")


def agent_is_killed(rig: OrderRig) -> bool:
    """Loads from the memory of an agent that is killed meanwhile, and from that of the next"""
    assert isinstance(rig, AgentRig)
    for number in range(_KILLS):
        with rig.agent_process() as agent:
            if not _is_right(rig, f"before {number}"):
                return False
            rig.write(_FIRST, _blocks(rig), _OWNER)
            rig.delay_loads(rig.random.uniform(0, _SLOW_S))
            rig.step(StepPlan(loads=(rig.load_plan(_CHUNKS, _FIRST, request="r"),)))
            time.sleep(rig.random.uniform(0, _SLOW_S / 10))
            agent.kill()
            rig.until_received("r")
            failed = rig.worker.take_failed_blocks()
            right = [n for n in range(_blocks(rig)) if _FIRST + n not in failed]
            found, expected = _read(rig), rig.expected(_CHUNKS)
            if not equal([page[right] for page in found], [page[right] for page in expected]):
                return False
    before = rig.loader.agent
    rig.restart()
    rig.wait_until(lambda: rig.loader.agent not in (None, before))
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


_TWO_SLABS = Setup(load_slabs=2)
SCENARIOS: Final = (
    Scenario("connection lost", connection_is_lost),
    Scenario("agent restarted", agent_restarts, Setup(layout=WHOLE)),
    Scenario("agent killed", agent_is_killed, Setup(deadline_s=10.0)),
    Scenario("memory reused", memory_is_reused, _TWO_SLABS),
    Scenario("memory reused, whole blocks", memory_is_reused, replace(_TWO_SLABS, layout=WHOLE)),
)
