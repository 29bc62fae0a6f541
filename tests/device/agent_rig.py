"""An ordering rig whose worker loads and saves by a node agent, which runs in the same process.

Memory of the agent is overwritten as soon as no lease protects it, so a copy that comes too late,
or a lease that ends too early, shows as wrong bytes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast
from unittest.mock import patch

from objkv.agent.client import AgentConnection
from objkv.agent.outbox import AgentSaves, Outbox
from objkv.agent.residents import Resident, Residents
from objkv.codec.payload import payload_bytes_max
from objkv.connector.kv.worker import Transfers, WorkerSide
from objkv.connector.programs import gpu_order
from objkv.connector.programs.ordering.rig import OrderRig
from objkv.connector.programs.ordering.setup import NAMESPACE, Pages
from objkv.transfer.devices import driver_of
from objkv.transfer.lanes import Lane
from objkv.transfer.loading.loads import LoadLimits
from objkv.transfer.loading.shared import SharedLoader
from objkv.transfer.registration import DeviceFrames
from objkv.transfer.saver import SaveLimits, Saver
from objkv.transfer.slabs import SlabPool
from tests.agent.world import Node

ARENA_BYTES = 4 << 20
WINDOW_BYTES = 1 << 20
"""Payloads of the rig are smaller, and some lie across two windows."""
POISON = 0xEE


class AgentRig(OrderRig):
    """Its slabs of loads are those through which the device reads what is not registered."""

    window_bytes = WINDOW_BYTES
    arena_bytes = ARENA_BYTES
    is_registered = False
    """Whether the whole arena is registered before the first load. If not, as in use, windows are
    when they were first read."""

    def _open_stores(self) -> None:
        self.node = Node(memory=self.arena_bytes).listen()
        self.bulk = self.node.store
        self._index = cast(Any, self.node.index)

    def open_worker(self) -> None:
        """See ``OrderRig.open_worker``."""
        super().open_worker()
        self.loader.close()
        self.saver.close(0.0)
        setup, lane = self.setup, self.load_lanes[0]
        self.load_lanes = self.load_lanes[:1]
        bounds = LoadLimits(1, 1024, setup.deadline_s, setup.deadline_s)
        self.on_device = DeviceFrames(
            self.load_slabs,
            driver_of(self.device).pin_read_only,
            window_bytes=self.window_bytes,
            begin=lane.adopt_thread,
        )
        self.loader = SharedLoader(  # type: ignore[assignment]
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

    def settle(self) -> None:
        """Wait until the agent has nothing leased."""
        self.wait_until(lambda: self.node.residents.leased() == 0)

    def close(self) -> None:
        """See ``OrderRig.close``. Nothing may be leased then."""
        super().close()
        self.settle()
        assert self.node.residents.check()
        self.node.close()


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
