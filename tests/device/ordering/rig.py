"""A worker over a small paged cache on a device, whose steps a scenario runs as vLLM does.

The stores are in memory. Streams are slowed down by work that takes a given time, so that a missing
order between streams shows as a wrong byte.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, Self, cast

import numpy as np
import torch

from objkv.agent.core import CoreLimits
from objkv.agent.memory.arena import BOARD_BYTES
from objkv.assembly.backends import open_bulk, open_index
from objkv.cache.chunks import CacheSettings, ChunkCache
from objkv.codec.payload import (
    Claim,
    Provenance,
    encode,
    frame_pages,
    open_payload,
    payload_bytes_max,
    read_header,
)
from objkv.config import load_config
from objkv.connector.kv.metadata import StepPlan
from objkv.connector.kv.worker import Rank, SaveEnd, Transfers, WorkerSide
from objkv.connector.model.groups import Geometry
from objkv.errors import TransferError
from objkv.index.base import ShardRecord
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import GroupIdentity
from objkv.keys.prefix import root_hash, token_digest
from objkv.telemetry import MemoryRecorder
from objkv.tracing import NO_TRACING
from objkv.transfer.devices import SEAM_BYTES, DeviceLane, driver_of, open_lane
from objkv.transfer.lanes import Lane
from objkv.transfer.loading.loader import Loader
from objkv.transfer.loading.loads import LoadLimits
from objkv.transfer.paging import PagedGroup
from objkv.transfer.plan import Blank, ChunkMove, LoadMove, LoadMoves, LoadPlan, SaveMove, SavePlan
from objkv.transfer.registration import DeviceFrames
from objkv.transfer.saver import SaveLimits, Saver
from objkv.transfer.slabs import Slab, SlabPool, SlabsExhaustedError
from tests.device.ordering.setup import (
    CHUNK_TOKENS,
    LAYERS,
    NAMESPACE,
    Pages,
    Setup,
    content_of,
    hashes_of,
)
from tests.support.inside import InsideAgent

Delay = Callable[[Any, float], None]
"""Keeps a stream busy: (stream, seconds). The calling thread does not wait."""
_GARBAGE: Final = 0x11
_LOOK_S: Final = 5e-4


class WatchedLane:
    """A lane that reports its calls."""

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


def refuse_pin(address: int, nbytes: int) -> Callable[[], None]:
    """Page-lock nothing, as a device that registers no such memory."""
    raise RuntimeError(f"{nbytes} bytes are not registered")


class NotInTimeError(TransferError):
    """An expected event did not happen within the rig's patience."""


class OrderRig:
    """A worker, its paged cache, and the stores. Closed once, by the end of ``with``."""

    seam_bytes = SEAM_BYTES
    """Of lanes."""

    def __init__(self, device: torch.device, delay: Delay, setup: Setup, seed: int = 0) -> None:
        """``seed``: of random choices."""
        self.device, self.setup = device, setup
        self.random = Random(seed)  # not a secret
        self.is_asynchronous = device.type != "cpu"
        """Whether kernels and copies run while the calling thread goes on."""
        self._delay = delay
        self.on_call: Callable[[str], object] = lambda name: None
        """Called with the name of a lane's method, after each call."""
        self.recorder = MemoryRecorder()
        self._received, self._sent = set[str](), set[str]()
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
        self.open_worker()
        self._records: dict[int, ShardRecord] = {}

    def _open_stores(self) -> None:
        config = load_config({"bulk_url": "memory:", "index_url": "memory:"}, environ={})
        self.bulk = open_bulk(config, self.recorder)
        self._index = open_index(config, self.recorder)

    def open_cache(self, writer: str) -> ChunkCache:
        """Return another client of the same stores."""
        settings = CacheSettings(writer, ttl_s=600, lease_ms=60_000, hot_save_bytes_max=0)
        return ChunkCache(self.bulk, None, self._index, settings, self.recorder)

    def open_worker(self) -> None:
        """Open the worker over ``caches``, as the connector does after ``register_kv_caches``."""
        setup = self.setup
        shape = self.geometry.shape(0, 0)
        assert shape is not None
        self.pages = PagedGroup(shape, self.caches)
        self.load_lane = self._open_lane(urgent=True)
        self.save_lane = self._open_lane(urgent=False)
        self.save_lane.prepare(self.pages.pages)
        pin = driver_of(self.device).pin if self.is_asynchronous else None
        self.load_slabs, self.save_slabs = (
            SlabPool(name, count=count, slab_bytes=payload_bytes_max(self.pages.layers), pin=pin)
            for name, count in (("load", setup.load_slabs), ("save", setup.save_slabs))
        )
        slabs = self.take_all_slabs(self.save_slabs)
        self._slab_memory = [slab.tensor for slab in slabs]
        self.give_back(slabs)
        self.cache = self.open_cache("rig")
        self.loader = self._open_loader()
        self.saver = self._open_saver(self.save_lane)
        self.worker = self._open_side(self.cache)

    def _open_side(self, target: SaveEnd) -> WorkerSide:
        """Return the worker's side over loader and saver. ``target``: where saves end."""
        setup = self.setup
        config = load_config(
            {"bulk_url": "memory:", "drain_deadline_ms": setup.drain_deadline_ms}, environ={}
        )
        return WorkerSide(
            config,
            self.geometry,
            Rank(0, "rig", 1, writes_early=setup.writes_early),
            {0: self.pages},
            transfers=Transfers(self.loader, self.saver, target),
            tracing=NO_TRACING,
        )

    def _open_loader(self) -> Loader:
        """Return a loader over a core of this process, whose memory the device can read."""
        setup = self.setup
        bounds = CoreLimits(setup.load_threads, 1024)
        self.inside = inside = InsideAgent(self.cache, setup.arena_bytes, bounds, self.recorder)
        on_device = None
        if self.is_asynchronous:
            pin = driver_of(self.device).pin_read_only if setup.registers else refuse_pin
            begin = self.load_lane.adopt_thread
            on_device = DeviceFrames(
                self.load_slabs, pin, window_bytes=self.seam_bytes, begin=begin
            )
        loader = Loader(
            {0: self.pages},
            self.load_lane,
            inside.connect,
            limits=LoadLimits(1024, setup.deadline_s, setup.deadline_s),
            recorder=self.recorder,
            on_device=on_device,
        )
        if on_device is not None and setup.registers:
            self.register(on_device, inside.arena.nbytes)
        return loader

    def register(self, on_device: DeviceFrames, nbytes: int) -> None:
        """Register the whole arena."""
        for offset in range(0, nbytes, self.seam_bytes):
            on_device.request(offset)
        on_device.request(nbytes - 1)
        self.wait_until(lambda: on_device.registered_bytes == nbytes)

    def _open_lane(self, *, urgent: bool) -> Lane:
        lane = open_lane(self.device, urgent=urgent, seam_bytes=self.seam_bytes)
        if not self.setup.watched:
            return lane
        return cast("Lane", WatchedLane(lane, lambda name: self.on_call(name)))

    def _open_saver(self, lane: Lane) -> Saver:
        setup = self.setup
        return Saver(
            self.cache,
            {0: self.pages},
            self.save_slabs,
            lane=lane,
            limits=SaveLimits(1024, setup.save_deadline_s, "rig"),
            recorder=self.recorder,
        )

    # The model's kernels, on the current compute stream.

    def write(self, first: int, count: int, value: float) -> None:
        """Let a kernel write blocks: ``value`` in the first layer, one more in each further one."""
        for number, pages in enumerate(self.caches):
            pages[first : first + count].fill_(value + number)

    def read(self, first: int, count: int) -> Pages:
        """Let a kernel read blocks, as attention does. The result is on the device."""
        return [cache[first : first + count].clone() for cache in self.caches]

    def delay_compute(self, seconds: float) -> None:
        """Keep the compute stream busy."""
        if self.is_asynchronous:
            self._delay(torch.get_device_module(self.device).current_stream(self.device), seconds)

    def delay_loads(self, seconds: float) -> None:
        """Keep the lane of loads busy."""
        self._delay_lane(self.load_lane, seconds)

    def delay_saves(self, seconds: float) -> None:
        """Keep the lane of saves busy."""
        self._delay_lane(self.save_lane, seconds)

    def _delay_lane(self, lane: Lane, seconds: float) -> None:
        if self.is_asynchronous:
            self._delay(cast("DeviceLane", lane).stream, seconds)

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        if self.is_asynchronous:
            torch.get_device_module(self.device).synchronize(self.device)

    @contextmanager
    def other_device(self) -> Iterator[bool]:
        """Select another device for this thread. The result is False if there is none."""
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
        self._received -= {load.request_id for load in plan.loads}
        self.worker.before_reuse(plan)
        self.worker.before_forward(plan)

    def end(self, plan: StepPlan) -> None:
        """End a step after the forward pass was launched."""
        self.worker.end_forward(plan)
        self.report(plan)

    def report(self, plan: StepPlan, finished: Collection[str] = ()) -> None:
        """Let the worker report what ended."""
        results = self.worker.results(plan, set(finished))
        self._received |= results.received
        self._sent |= results.sent

    def step(self, plan: StepPlan, forward: Callable[[], object] = lambda: None) -> None:
        """Run a step whose loads are for later steps. They start after the forward pass was
        launched. Source: vLLM 0.32, ``start_after_forward`` in
        ``v1/worker/kv_connector_model_runner_mixin.py``."""
        self.begin(plan)
        forward()
        self.worker.start_loads(plan)
        self.end(plan)

    def until_received(self, request: str = "r") -> None:
        """Run empty steps until the engine may use a request's blocks, loaded or not."""
        self.wait_until(lambda: self._is_reported(StepPlan(), self._received, request))

    def until_sent(self, request: str = "r") -> None:
        """Run empty steps until the engine may free a finished request's blocks."""
        plan = StepPlan(held=frozenset({request}))
        self.wait_until(lambda: self._is_reported(plan, self._sent, request))

    def is_received(self, request: str) -> bool:
        """Whether a request's load was reported."""
        return request in self._received

    def is_sent(self, request: str) -> bool:
        """Whether a finished request's saves were reported as out of its blocks."""
        return request in self._sent

    def _is_reported(self, plan: StepPlan, reported: set[str], request: str) -> bool:
        if request not in reported:
            self.report(plan)
        return request in reported

    def let_saves_catch_up(self) -> None:
        """Wait while more saves would be dropped, as on a busy machine."""

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Poll for an event of another thread or of the device. Raises ``NotInTimeError``."""
        end = time.monotonic() + self.setup.patience_s
        while not condition():
            if time.monotonic() > end:
                raise NotInTimeError(f"nothing happened within {self.setup.patience_s:g} s")
            time.sleep(_LOOK_S)

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
            LoadMove(
                self._move(NAMESPACE, chunk, first + at * count),
                ((self._field, self._record(chunk)),),
            )
            for at, chunk in enumerate(chunks)
        ]
        blanks = (Blank(0, tuple(blank)),) if blank else ()
        return LoadPlan(request, NAMESPACE, LoadMoves.pack(moves), sync, blanks=blanks)

    def save_plan(
        self, chunks: Sequence[int], first: int, *, request: str = "r", namespace: str = NAMESPACE
    ) -> SavePlan:
        """Return a plan that saves consecutive blocks from ``first`` on."""
        count = self.setup.layout.chunk_blocks
        moves = [self._move(namespace, c, first + at * count) for at, c in enumerate(chunks)]
        saves = tuple(SaveMove(move, token_digest(()), None) for move in moves)
        return SavePlan(request, namespace, saves)

    def expected(self, chunks: Sequence[int]) -> Pages:
        """Return the stored bytes of chunks, in host memory."""
        return [
            torch.cat([self._content(chunk)[layer] for chunk in chunks])
            for layer in range(len(LAYERS))
        ]

    def stored(self, chunk: int, namespace: str = NAMESPACE) -> Pages | None:
        """Return the bytes of a chunk that was saved, or None if none is stored. Waits for saves
        in progress."""
        if not self.saver.drain(self.setup.patience_s):
            raise NotInTimeError("saves did not end")
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

    def key(self, chunk: int) -> ChunkKey:
        """Return the key of a chunk's payload."""
        return self._claim(NAMESPACE, chunk).key

    @property
    def _field(self) -> str:
        return self.key(0).field

    def _claim(self, namespace: str, chunk: int) -> Claim:
        move = self._move(namespace, chunk, 1)
        shard = self.pages.shape.rank_shard.shard
        key = ChunkKey(namespace, move.prefix_hash, 0, shard)
        return Claim(key, move.parent_hash, move.token_start, move.token_end)

    def _move(self, namespace: str, chunk: int, first: int) -> ChunkMove:
        hashes = hashes_of(namespace)
        return ChunkMove(
            chunk=chunk,
            group=0,
            prefix_hash=hashes[chunk],
            parent_hash=hashes[chunk - 1] if chunk else root_hash(namespace),
            token_start=chunk * CHUNK_TOKENS,
            token_end=(chunk + 1) * CHUNK_TOKENS,
            first_block=0,
            block_ids=tuple(range(first, first + self.setup.layout.chunk_blocks)),
        )

    def _content(self, chunk: int) -> Pages:
        return content_of(chunk, tuple(layer.shape for layer in self.pages.layers))

    def _record(self, chunk: int) -> ShardRecord:
        """Store a chunk if it is not stored yet, and return its index record."""
        if chunk not in self._records:
            claim = self._claim(NAMESPACE, chunk)
            pages = [page.view(torch.uint8).numpy().data for page in self._content(chunk)]
            provenance = Provenance(token_digest(()), "rig", 0)
            payload = encode(claim, self.pages.layers, pages, codec="none", provenance=provenance)
            self.bulk.put(claim.key.path(), payload)
            checksum = read_header(payload).checksum
            nbytes = self.pages.raw_bytes
            self._records[chunk] = ShardRecord(len(payload), nbytes, "none", False, checksum, 0)
        return self._records[chunk]

    def damage(self, chunk: int) -> None:
        """Flip a bit of the last layer of a stored chunk."""
        path = self.key(chunk).path()
        payload = bytearray(self.bulk.get(path) or b"")
        payload[-1] ^= 1
        self.bulk.put(path, bytes(payload))

    # Memory of loads and saves.

    def overwrite_loads(self) -> None:
        """Overwrite the memory of loads as soon as no load has any of it."""
        residents = self.inside.core.residents
        self.wait_until(lambda: residents.leased() == 0)
        for chunk in self._records:
            residents.forget(self.key(chunk).path())
        np.frombuffer(self.inside.arena.view[BOARD_BYTES:], np.uint8).fill(_GARBAGE)

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
        memory = self._slab_memory
        self.worker.close()
        before = [slab.clone() for slab in memory]
        self.synchronize()
        return all(map(torch.equal, before, memory))

    def close(self) -> None:
        """Stop the worker and wait for the device."""
        self.worker.close()
        self.synchronize()

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

    @property
    def description(self) -> str:
        """One line for a report."""
        return (self.run.__doc__ or "").strip()
