"""A worker over a small paged cache on a device, whose steps a scenario runs as vLLM does.

Its node agent runs in the same process, and overwrites memory as soon as no lease protects it.
Streams are slowed down by work that takes a given time. So a missing order between streams, or a
lease that ends too early, shows as a wrong byte.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from random import Random
from typing import Any, Final, Self, cast
from unittest.mock import patch

import numpy as np
import torch

from objkv.agent import core
from objkv.assembly.backends import open_bulk, open_index
from objkv.cache.chunks import shard_record
from objkv.codec.payload import Claim, Provenance, encode, frame_pages, read_header
from objkv.config import Config
from objkv.connector.kv import wiring
from objkv.connector.kv.metadata import StepPlan
from objkv.connector.kv.wiring import Pools, open_slabs, plan_pools, read_pages
from objkv.connector.kv.worker import Rank
from objkv.connector.model.groups import Geometry
from objkv.errors import TransferError
from objkv.index.base import ChunkEntry
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import GroupIdentity
from objkv.keys.prefix import prefix_hashes, token_digest
from objkv.telemetry import MemoryRecorder
from objkv.transfer.devices import DeviceLane, open_lane
from objkv.transfer.lanes import Lane
from objkv.transfer.paging import PagedGroup
from objkv.transfer.plan import BlocksToZero, ChunkMove, LoadPlan, SaveMove, SavePlan
from objkv.transfer.registration import ArenaRegistration
from objkv.transfer.slabs import Slab, SlabPool, SlabsExhaustedError
from tests.agent.consistency import is_consistent, waiting_of
from tests.support.arenas import LossyConnection, SpoilingArenaCache, refuse_pin
from tests.support.layouts import placed
from tests.support.payloads import open_payload
from tests.support.plans import LoadMove, move_of, packed
from tests.support.served import ServedAgent
from tests.support.waiting import wait_until

NAMESPACE: Final = "0123456789abcdef" * 2
LAYERS: Final = ("layers.0", "layers.1", "layers.2")
CHUNK_TOKENS: Final = 64
CHUNKS: Final = 8
"""Stored chunks of the prompt."""
Pages = list[torch.Tensor]
"""One tensor per layer, ``[blocks, heads, block_size, content]``."""


REGISTERED, REGISTERING, REFUSED = WAYS = ("registered", "registering", "refused")
"""How a device reads the memory of a node agent: in place, in place once the driver has registered
it, or by way of slabs, because the device registers no read-only memory."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    heads: int = 2
    block_size: int = 16
    content: int = 64
    contiguous: bool = False
    """Whether the bytes of a block are contiguous (HND). If not, all heads of a token are (NHD)."""

    @property
    def chunk_blocks(self) -> int:
        return CHUNK_TOKENS // self.block_size

    def caches(self, device: torch.device, blocks: int) -> Pages:
        sizes = (len(LAYERS), blocks, self.heads, self.block_size, self.content)
        memory = torch.zeros(prod(sizes), dtype=torch.bfloat16, device=device)
        return list(placed(memory, "LBHNC" if self.contiguous else "LBNHC", sizes))


STRIDED: Final = CacheLayout()
"""Heads of a block are apart, and blocks are small: kernels distribute them."""
WHOLE: Final = CacheLayout(heads=8, block_size=32, contiguous=True)
"""Blocks are contiguous and of 32 KiB: each is copied directly where the device can."""


@dataclass(frozen=True, slots=True)
class Setup:
    layout: CacheLayout = STRIDED
    blocks: int = 96
    load_threads: int = 2
    way: str = REGISTERED
    """How the device reads the memory of the node agent, one of ``WAYS``."""
    load_slabs: int = 4
    save_slabs: int = 16
    deadline_s: float = 60.0
    """Of loads."""
    save_deadline_s: float = 600.0
    drain_deadline_ms: int = 60_000
    windowed: bool = False
    """Whether layers attend to a window, so that blocks leave running requests."""
    writes_early: bool = False
    """See ``Rank.writes_early``."""
    watched: bool = False
    """Whether ``OrderRig.on_call`` is called."""
    attempts_s: tuple[float, ...] = (0.2, 0.8, 3.2)
    """How long the device is busy in each attempt to show that something does not wait for it. The
    machine may be too busy for the first ones."""
    slowness: float = 1.0
    """Factor of the other delays of the device. A busy machine needs longer ones to show an edge
    that is missing."""
    patience_s: float = 20.0
    """Bound of every wait for another thread or for the device."""


@lru_cache
def content_of(chunk: int, shapes: tuple[tuple[int, ...], ...]) -> Pages:
    pages = []
    for number, shape in enumerate(shapes):
        generator = torch.Generator().manual_seed(1000 * chunk + number)
        pages.append(torch.randn(shape, generator=generator).to(torch.bfloat16))
    return pages


@lru_cache
def hashes_of(namespace: str) -> Sequence[bytes]:
    return prefix_hashes(namespace, range(CHUNKS * CHUNK_TOKENS), CHUNK_TOKENS)


def equal(found: Pages, expected: Pages) -> bool:
    return not difference(found, expected)


def difference(found: Pages, expected: Pages) -> str:
    """Return where two sets of pages first differ: layer, block and bytes. Empty if nowhere."""
    for layer, (a, b) in enumerate(zip(found, expected, strict=True)):
        ours, theirs = (pages.cpu().contiguous().view(torch.uint8) for pages in (a, b))
        differs = (ours != theirs).flatten(1).any(1)
        if bool(differs.any()):
            blocks = differs.nonzero().flatten().tolist()
            block = blocks[0]
            at = int((ours[block] != theirs[block]).flatten().nonzero()[0])
            heads = [pages[block].flatten()[at : at + 8].tolist() for pages in (ours, theirs)]
            return (
                f"layer {layer}, blocks {blocks} of {len(ours)}, from byte {at} on: "
                f"{bytes(heads[0]).hex()} instead of {bytes(heads[1]).hex()}"
            )
    return ""


ARENA_BYTES: Final = 32 << 20
"""Room for all that a scenario saves, if the disk is slow."""
SLOW_S: Final = 0.1
"""How long one side of an edge is delayed. Longer than the other side takes on a busy machine."""
WINDOW_BYTES: Final = 256 << 10
"""More than a payload of the rig. Some lie across two windows."""
_BEHIND_MAX: Final = 8
"""Payloads that an agent may still have to save when more are handed over."""
Delay = Callable[[Any, float], None]
"""Keeps a stream busy: (stream, seconds). The calling thread does not wait."""
_GARBAGE: Final = 0x11


class WatchedLane:
    def __init__(self, lane: Lane, watch: Callable[[str], object]) -> None:
        self._lane, self._watch = lane, watch

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._lane, name)
        if not callable(value):
            return value

        def call(*args: Any) -> Any:
            result = value(*args)
            self._watch(name)
            return result

        return call


class OrderRig:
    """A worker, its paged cache, and the stores. Closed once, by the end of ``with``."""

    def __init__(self, device: torch.device, delay: Delay, setup: Setup, seed: int = 0) -> None:
        self.device, self.setup = device, setup
        self.random = Random(seed)  # not a secret
        self.is_asynchronous = device.type != "cpu"
        """Whether kernels and copies run while the calling thread goes on."""
        self._delay = delay
        self.on_call: Callable[[str], object] = lambda name: None
        """Called with the name of a lane's method, after each call."""
        self.recorder = MemoryRecorder()
        self.received, self.sent = set[str](), set[str]()
        """Requests whose blocks the engine may use, loaded or not; may free."""
        self._open_stores()
        layout = setup.layout
        group = GroupIdentity(
            "sliding_window" if setup.windowed else "full",
            CHUNK_TOKENS if setup.windowed else None,
            LAYERS,
            layout.heads,
            layout.content,
            layout.block_size,
        )
        self.geometry = Geometry((group,), CHUNK_TOKENS, layout.block_size, tp_size=1)
        self.caches: Pages = layout.caches(device, setup.blocks)
        self._open_worker()
        self._stored = set[int]()

    def _open_stores(self) -> None:
        settings = {
            "agent_memory_bytes": ARENA_BYTES,
            "drain_deadline_ms": 0,
            "load_threads": self.setup.load_threads,
        }
        with patch.object(core, "ArenaCache", SpoilingArenaCache):
            self._served = ServedAgent(settings)
        self.node, config = self._served.node, self._served.config
        self.bulk = open_bulk(config, self.recorder)
        self._index = open_index(config, self.recorder)

    def _open_worker(self) -> None:
        """As vLLM's settings make it, but for the pools, what the device registers, and a check at
        start: it would find what scenarios are to find."""
        setup = self.setup
        config = Config(
            drain_deadline_ms=setup.drain_deadline_ms,
            load_deadline_ms=round(1000 * setup.deadline_s),
            step_load_deadline_ms=round(1000 * setup.deadline_s),
            save_deadline_ms=round(1000 * setup.save_deadline_s),
        )
        with patch.multiple(
            wiring,
            ArenaRegistration=self._open_registration,
            check_pages=lambda group, lane: lane.prepare(group.pages),
            open_lane=self._open_lane,
            open_slabs=self._open_slabs,
            plan_pools=self._plan_pools,
            read_pages=self._read_pages,
        ):
            self.worker = wiring.make_worker_side(
                config,
                self.geometry,
                Rank(0, "rig", 1, writes_early=setup.writes_early),
                self.connect,
                recorder=self.recorder,
                kv_caches=dict(zip(LAYERS, self.caches, strict=True)),
            )
        self.loader, self.saver = self.worker.loader, self.worker.saver
        if self.is_asynchronous and setup.way == REGISTERED:
            windows, memory = (
                self._registration.windows,
                np.frombuffer(self.agent.arena.view, np.uint8),
            )
            address, nbytes = np.array([memory.ctypes.data]), memory.nbytes
            self.wait_until(lambda: windows.are_readable(address, nbytes)[0])

    def _read_pages(self, *given: Any) -> dict[int, PagedGroup]:
        groups = read_pages(*given)
        self.pages = groups[0]
        return groups

    def _plan_pools(self, *given: Any) -> Pools:
        planned, setup = plan_pools(*given), self.setup
        load_slabs = setup.load_slabs if planned.load_slabs else 0
        return Pools(planned.slab_bytes, load_slabs, setup.save_slabs, save_queue_max=1024)

    def _open_slabs(self, *given: Any) -> tuple[SlabPool | None, SlabPool]:
        load_slabs, self.save_slabs = found = open_slabs(*given)
        # On the host there are none of loads, as all its memory can be read.
        self.load_slabs = load_slabs or SlabPool("load", count=1, slab_bytes=1)
        return found

    def _open_registration(self, slabs: SlabPool, pin: Any, **how: Any) -> ArenaRegistration:
        pin = refuse_pin if self.setup.way == REFUSED else pin
        found = ArenaRegistration(slabs, pin, window_bytes=WINDOW_BYTES, **how)
        self._registration = found
        return found

    def connect(self, **options: Any) -> LossyConnection:
        return LossyConnection(self._served.path, call_s=self.setup.patience_s, **options)

    @property
    def agent(self) -> LossyConnection:
        agent = self.loader.link.agent
        assert isinstance(agent, LossyConnection)
        return agent

    def _open_lane(self, device: torch.device, *, urgent: bool = False) -> Lane:
        lane = open_lane(device, urgent=urgent, seam_bytes=WINDOW_BYTES)
        if self.setup.watched:
            lane = cast("Lane", WatchedLane(lane, lambda name: self.on_call(name)))
        if urgent:
            self.load_lane = lane
        else:
            self.save_lane = lane
        return lane

    # The model's kernels, on the current compute stream.

    def write(self, first: int, count: int, value: float) -> None:
        """Let a kernel write blocks: ``value`` in the first layer, one more in each further one."""
        for number, pages in enumerate(self.caches):
            pages[first : first + count].fill_(value + number)

    def read(self, first: int, count: int) -> Pages:
        """Let a kernel read blocks, as attention does. The result is on the device."""
        return [cache[first : first + count].clone() for cache in self.caches]

    def delay_compute(self, seconds: float) -> None:
        if self.is_asynchronous:
            stream = torch.get_device_module(self.device).current_stream(self.device)
            self._delay(stream, self.setup.slowness * seconds)

    def delay_loads(self, seconds: float) -> None:
        self._delay_lane(self.load_lane, seconds)

    def delay_saves(self, seconds: float) -> None:
        self._delay_lane(self.save_lane, seconds)

    def _delay_lane(self, lane: Lane, seconds: float) -> None:
        if self.is_asynchronous:
            self._delay(cast("DeviceLane", lane).stream, self.setup.slowness * seconds)

    def synchronize(self) -> None:
        if self.is_asynchronous:
            torch.get_device_module(self.device).synchronize(self.device)

    @contextmanager
    def other_device(self) -> Iterator[bool]:
        api = torch.get_device_module(self.device) if self.is_asynchronous else None
        if api is None or api.device_count() < 2:
            yield False
            return
        api.set_device((self.device.index + 1) % api.device_count())
        try:
            yield True
        finally:
            api.set_device(self.device)

    # Steps, as vLLM's model runners run them.

    def begin(self, plan: StepPlan) -> None:
        """Begin a step: what the connector does before the forward pass is launched."""
        self.received -= {load.request_id for load in plan.loads}
        self.worker.before_reuse(plan)
        self.worker.before_forward(plan)

    def end(self, plan: StepPlan) -> None:
        self.worker.end_forward(plan)
        self.report(plan)

    def report(self, plan: StepPlan, finished: Collection[str] = ()) -> None:
        results = self.worker.results(plan, set(finished))
        self.received |= results.finished_recving
        self.sent |= results.finished_sending

    def step(self, plan: StepPlan, forward: Callable[[], object] = lambda: None) -> None:
        """Run a step whose loads are for later steps. They start after the forward pass was
        launched. Source: vLLM 0.32, ``start_after_forward`` in
        ``v1/worker/kv_connector_model_runner_mixin.py``."""
        self.begin(plan)
        forward()
        self.worker.start_loads(plan)
        self.end(plan)

    def attempted(self, shows: Callable[[str, float], bool]) -> bool:
        """Whether a request and a time for which the device is busy show that something does not
        wait for it."""
        attempts = enumerate(self.setup.attempts_s)
        return not self.is_asynchronous or any(shows(f"r{n}", seconds) for n, seconds in attempts)

    def until_received(self, request: str = "r") -> None:
        """Run empty steps until the engine may use a request's blocks, loaded or not."""
        self.wait_until(lambda: self._is_reported(StepPlan(), self.received, request))

    def until_sent(self, request: str = "r") -> None:
        """Run empty steps until the engine may free a finished request's blocks."""
        plan = StepPlan(held=frozenset({request}))
        self.wait_until(lambda: self._is_reported(plan, self.sent, request))

    def _is_reported(self, plan: StepPlan, reported: set[str], request: str) -> bool:
        if request not in reported:
            self.report(plan)
        return request in reported

    def let_saves_catch_up(self) -> None:
        """Wait while more saves would be dropped, as on a busy machine."""
        self.wait_until(lambda: waiting_of(self.node.saves) < _BEHIND_MAX)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, bound_s=self.setup.patience_s)

    # Chunks and their bytes.

    def load_plan(
        self,
        chunks: Sequence[int],
        first: int,
        *,
        request: str = "r",
        sync: bool = False,
        blank: Sequence[int] = (),
    ) -> LoadPlan:
        """Return a plan that loads stored chunks into consecutive blocks from ``first`` on.
        ``blank``: blocks that it zeroes."""
        count = self.setup.layout.chunk_blocks
        moves = [
            LoadMove(self._move(NAMESPACE, chunk, first + at * count), None)
            for at, chunk in enumerate(chunks)
        ]
        for chunk in chunks:
            self._store(chunk)
        blanks = (BlocksToZero(0, tuple(blank)),) if blank else ()
        return LoadPlan(request, NAMESPACE, packed(moves), sync, blocks_to_zero=blanks)

    def save_plan(
        self, chunks: Sequence[int], first: int, *, request: str = "r", namespace: str = NAMESPACE
    ) -> SavePlan:
        count = self.setup.layout.chunk_blocks
        moves = [self._move(namespace, c, first + at * count) for at, c in enumerate(chunks)]
        saves = tuple(SaveMove(move, token_digest(()), None) for move in moves)
        return SavePlan(request, namespace, saves)

    def expected(self, chunks: Sequence[int]) -> Pages:
        return [
            torch.cat([self._content(chunk)[layer] for chunk in chunks])
            for layer in range(len(LAYERS))
        ]

    def stored(self, chunk: int, namespace: str = NAMESPACE) -> Pages | None:
        """Return the bytes of a chunk that was saved, or None if none is stored. Waits for saves
        in progress."""
        assert self.saver.drain(self.setup.patience_s), "saves did not end"
        self.node.saves.drain(self.setup.patience_s)
        claim = self._claim(namespace, chunk)
        payload = self.bulk.get(claim.key.path())
        if payload is None:
            return None
        layers = self.pages.layers
        header = open_payload(payload, claim, layers)
        frames = [frame_pages(header, number, payload, None) for number in range(len(layers))]
        return [
            torch.frombuffer(bytearray(frame), dtype=torch.bfloat16).view(layer.shape)
            for frame, layer in zip(frames, layers, strict=True)
        ]

    def holds(self, pages: Pages | None, value: float) -> bool:
        """Whether blocks contain what ``write`` wrote with ``value``."""
        return pages is not None and all(
            bool((page.cpu() == value + number).all()) for number, page in enumerate(pages)
        )

    def _claim(self, namespace: str, chunk: int) -> Claim:
        move = self._move(namespace, chunk, 1)
        key = ChunkKey(namespace, move.prefix_hash, 0)
        return Claim(key, move.parent_hash, move.token_start, move.token_end)

    def _move(self, namespace: str, chunk: int, first: int) -> ChunkMove:
        ids = range(first, first + self.setup.layout.chunk_blocks)
        return move_of(chunk, hashes_of(namespace), namespace, CHUNK_TOKENS, ids)

    def _content(self, chunk: int) -> Pages:
        return content_of(chunk, tuple(layer.shape for layer in self.pages.layers))

    def _store(self, chunk: int) -> None:
        if chunk not in self._stored:
            claim = self._claim(NAMESPACE, chunk)
            pages = [page.view(torch.uint8).numpy().data for page in self._content(chunk)]
            provenance = Provenance(token_digest(()), "rig", 0)
            payload = encode(claim, self.pages.layers, pages, codec="none", provenance=provenance)
            self.bulk.put(claim.key.path(), payload)
            span = claim.token_start, claim.token_end
            entry = ChunkEntry(NAMESPACE, claim.key.prefix_hash, claim.parent_hash, *span)
            record = shard_record(read_header(payload))
            self._index.publish(entry, {claim.key.field: record}, ttl_s=3600)
            self._stored.add(chunk)

    # Memory of loads and saves.

    def settle(self) -> None:
        """Wait until nothing in the agent's memory is leased, and so all of it overwritten."""
        self.wait_until(lambda: self.node.core.arena_cache.leased() == 0)

    def take_all_slabs(self, pool: SlabPool) -> list[Slab]:
        """Lease each slab as soon as it can be reused, and overwrite it."""
        taken: list[Slab] = []

        def take() -> bool:
            with suppress(SlabsExhaustedError):
                while len(taken) < pool.total:
                    slab = pool.lease()
                    slab.tensor.numpy().fill(_GARBAGE)
                    taken.append(slab)
            return len(taken) == pool.total

        self.wait_until(take)
        return taken

    def give_back(self, slabs: list[Slab]) -> bool:
        """Release slabs. Returns whether nothing was written to them since they were taken."""
        unchanged = all((slab.tensor.numpy() == _GARBAGE).all() for slab in slabs)
        for slab in slabs:
            slab.release()
        return unchanged

    def close_safely(self) -> bool:
        """Close the worker, as the connector does before memory is unmapped. Returns whether no
        copy of a save ends afterwards."""
        memory = self.save_slabs.memory
        self.worker.close()
        before = memory.clone()
        self.synchronize()
        return torch.equal(before, memory)

    def close(self) -> None:
        try:
            self.worker.close()
            self.synchronize()
            self.settle()
            if not is_consistent(self.node.core.arena_cache):
                raise TransferError("the agent's account of its memory is wrong")
        finally:
            self._served.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Scenario:
    """One edge between streams, with one of its sides slow."""

    name: str
    run: Callable[[OrderRig], bool]
    """Returns whether all bytes are right. Its docstring describes the scenario."""
    setup: Setup = field(default_factory=Setup)
