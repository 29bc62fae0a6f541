"""A worker's side under a small engine that does to it what vLLM does, in vLLM's order.

Source of the order: vLLM 0.31-0.33, ``execute_model`` in ``v1/worker/gpu_model_runner.py`` and
``v1/core/sched/scheduler.py``. Blocks hold one number for each chunk, weights, layer and place, so
that whatever is in a wrong place, or of other weights, or too late, is seen.
"""

import gc
import logging
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from objkv.agent import arena_cache, client, core, fill
from objkv.agent.core import CoreLimits
from objkv.agent.fill import PartPolicy
from objkv.agent.memory import arena
from objkv.agent.outbox import AgentSaves, Outbox
from objkv.cache.chunks import CacheSettings, ChunkCache
from objkv.codec.payload import frame_pages, read_header
from objkv.config import Config
from objkv.connector.kv import wiring
from objkv.connector.kv.metadata import StepPlan
from objkv.connector.kv.wiring import Pools, make_worker_side, plan_pools
from objkv.connector.kv.worker import Rank, WorkerSide
from objkv.connector.model.groups import Geometry
from objkv.errors import StoreUnavailable
from objkv.keys.identity import GroupIdentity
from objkv.keys.prefix import prefix_hashes, token_digest
from objkv.stores.base import Arrived, Buffer, PruneStore
from objkv.stores.guarded import GuardedStore
from objkv.telemetry import MemoryRecorder
from objkv.transfer.loading import loader
from objkv.transfer.loading.loader import Loader
from objkv.transfer.plan import ChunkMove, LoadPlan, SaveMove, SavePlan
from objkv.transfer.registration import ArenaRegistration
from objkv.transfer.saver import COPIES_S
from tests.agent.consistency import is_consistent
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.fences.device import (
    GONE,
    Hands,
    Stream,
    WatchedArenaCache,
    WatchedConnection,
    WatchedInside,
    WatchedLane,
    WatchedLoader,
    WatchedPool,
    WatchedSaver,
)
from tests.fences.stage import Broken, Stage, the_stage
from tests.support import inside as in_test
from tests.support.arenas import refuse_pin
from tests.support.paged_cache import paged_group
from tests.support.payloads import open_payload
from tests.support.plans import LoadMove, move_of, packed

BLOCK, CHUNK, BLOCKS = 4, 8, 2
CHUNKS_MAX = 3
GROUP = GroupIdentity("full", None, ("l0", "l1"), heads=1, content=8, block_size=BLOCK)
GEOMETRY = Geometry((GROUP,), CHUNK, BLOCK, tp_size=1)
LAYERS = range(2)
TOKENS = list(range(CHUNK * CHUNKS_MAX))
NUM_BLOCKS = 27
PAGE = 4096
_HEADER_BYTES = 2048
"""Room for a header in the first of two parts, so that it has one frame and not both."""
_CELLS, _BOARD_BYTES = PAGE // 32, PAGE
"""Of an arena, so that it has few windows."""
POISON = 250.0
"""What blocks hold whose owner has written nothing."""


@cache
def namespace(epoch: int) -> str:
    """Of the weights that many updates made."""
    return f"{epoch:032x}"


@cache
def hashes(epoch: int) -> list[bytes]:
    """Of the one prompt that everybody asks for, in whatever length."""
    return prefix_hashes(namespace(epoch), TOKENS, CHUNK)


def content(epoch: int, chunk: int, layer: int, place: int) -> float:
    """What the model writes into each element of a block; exact in bfloat16."""
    return float(1 + (epoch % 8) * 24 + chunk * 8 + layer * 4 + place)


_CLOSES = 4
"""How often the agent of a life is closed, if it does not end."""


def _few_slabs(*given: Any) -> Pools:
    """As little memory as a worker can have, so that saves wait for it."""
    return replace(plan_pools(*given), save_slabs=5, save_queue_max=4)


UPLOAD_S = 0.05
FAULTS = ("refused", "lost", "flipped", "short", "broken off", "hangs")


class GateStore(GuardedStore):
    """Others go on before, within and after each call; some calls fail, as the dice say."""

    def __init__(self, inner: PruneStore, faults_of_100: int, dice: random.Random) -> None:
        super().__init__(inner)
        self._faults_of_100, self._dice = faults_of_100, dice

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        fault, start = self._begin("get"), start or 0
        value = bytearray(self.inner.get(key) or b"")[start : start + len(buffer)]
        if fault == "lost" or not value:
            return None
        if fault == "flipped":
            value[self._dice.randrange(len(value))] ^= 1 << self._dice.randrange(8)
        if fault == "short":
            value = value[: self._dice.randrange(len(value))]
        half = len(value) * 3 // 4
        for first, end in ((0, half), (half, len(value))):
            buffer[first:end] = value[first:end]
            the_stage().pause("half")
            if arrived is not None and end:
                arrived(end)
            if fault == "broken off":
                raise StoreUnavailable("broken off")
        return len(value)

    def put_if_absent(self, key: str, value: Buffer) -> bool:
        fault = self._begin("put")
        written = False if fault == "lost" else self.inner.put_if_absent(key, value)
        the_stage().wait("sent", lambda: False, UPLOAD_S)
        if fault is not None:
            raise StoreUnavailable("the answer did not come")
        return written

    def _begin(self, verb: str) -> str | None:
        fault = None
        if self._dice.randrange(100) < self._faults_of_100:
            fault = self._dice.choice(FAULTS)
        the_stage().pause(verb)
        if fault == "hangs":
            the_stage().wait("hangs", lambda: False, 20.0)
        if fault == "refused":
            raise StoreUnavailable("refused")
        return fault


@dataclass(frozen=True)
class Knobs:
    late: bool = True
    """Whether copies are late, as on a GPU, or made at once, as on a CPU."""
    copy_s: float = 0.0
    """How long each late copy takes. While it does, all others go on as far as they can."""
    writes_early: bool = False
    roomy: bool = False
    """Whether most steps have blocks for all requests, and the worker knows."""
    load_threads: int = 1
    arena_pages: int = 0
    """Memory of the arena; 0: as much as a worker has by default."""
    keeps: bool = False
    """Whether payloads stay in the arena after their last lease. If not, they are spoiled."""
    frames: str = "in place"
    """How a device reads the arena: in place, registering, or refused."""
    register_s: float = 0.0
    """How long it takes to register a page."""
    drain_ms: int = 5_000
    save_ms: int = 60_000
    """After which saves are given up."""
    codec: str = "none"
    """With which the agent saves."""
    spans: int = 1
    faults_of_100: int = 0


@dataclass
class Request:
    name: str
    chunks: int
    epoch: int
    """Of the weights when it came."""
    blocks: list[int]
    loading: int = 0
    """Leading chunks that are being loaded."""
    sync: bool = False
    computed: int = 0
    """Leading chunks that hold what they should."""
    epochs: list[int] = field(default_factory=list)
    """Whose weights made each of them."""
    state: str = "new"
    aborted: bool = False
    saved: bool = False

    def of(self, chunk: int) -> list[int]:
        return self.blocks[chunk * BLOCKS : (chunk + 1) * BLOCKS]


class Engine:
    """One replica's life. All methods are called by one thread of a stage."""

    def __init__(self, knobs: Knobs, seed: int) -> None:
        self.knobs = knobs
        dice = random.Random(seed)
        self.pools, self.insides = WatchedPool.begin(), WatchedInside.begin()
        self.compute = Stream("compute", late=knobs.late)
        self.hands = Hands(NUM_BLOCKS)
        self.recorder = MemoryRecorder()
        self.inner = MemoryStore()
        self.store = GateStore(self.inner, knobs.faults_of_100, dice)
        self.index = MemoryIndex(clock=lambda: the_stage().now)
        self.group, self.caches = paged_group(GROUP, chunk_tokens=CHUNK, num_blocks=NUM_BLOCKS)
        self.arrays = [c.view(torch.int16).numpy() for c in self.caches]
        self.free = list(range(1, NUM_BLOCKS))
        self.requests: dict[str, Request] = {}
        self.epoch = 0
        self.awake = True
        self.sides: list[WorkerSide] = []
        self.lanes: list[WatchedLane] = []
        self.saves: list[AgentSaves] = []
        self.outboxes: list[Outbox] = []
        self._handed: list[list[int]] = []
        self._finished: set[str] = set()
        self._held: set[str] = set()
        self._checks: list[tuple[int, str]] = []
        self._number = 0
        self._preempted: set[str] = set()
        self._is_short = False
        self._poison(slice(None))
        self._open()

    # What the scheduler decides.

    def arrive(self, chunks: int, *, sync: bool = False, stored: int = CHUNKS_MAX) -> Request:
        """A request, which loads as many leading chunks as are stored, at most ``stored``."""
        self._number += 1
        blocks = [self.free.pop(0) for _ in range(chunks * BLOCKS)]
        self._hand_over(blocks)
        request = Request(f"r{self._number}", chunks, self.epoch, blocks, sync=sync)
        records = self.index.lookup(namespace(self.epoch), hashes(self.epoch)[:chunks])
        while request.loading < min(chunks, stored) and records[request.loading] is not None:
            request.loading += 1
        self.requests[request.name] = request
        return request

    def preempt(self, name: str) -> None:
        """Its blocks go to others at once; it begins anew, and computes."""
        request = self.requests[name]
        assert request.state == "running"
        if self.knobs.roomy:
            self._run_short()
        self._preempted.add(name)
        self._release(request)
        request.blocks = [self.free.pop(0) for _ in range(request.chunks * BLOCKS)]
        self._hand_over(request.blocks)
        request.computed, request.epochs, request.state = 0, [], "new"
        request.loading = 0

    def _run_short(self) -> None:
        """A step after which there are too few blocks, and whose plan says that the next one may
        preempt."""
        if len(self.free) >= BLOCKS:
            self.arrive(1, sync=True)
        self._is_short = True
        self.step()
        self._is_short = False

    def end(self, name: str) -> None:
        request = self.requests[name]
        if request.aborted or request.state == "held":
            return
        self._finished.add(name)
        if request.state == "loading":
            request.aborted = True
        elif request.saved:
            request.state = "held"
            self._held.add(name)
        else:
            self._release(request)
            del self.requests[name]

    def lose_connection(self) -> None:
        """The loader's connection fails. Whoever waits for it is told."""
        self.insides[-1].connections[-1].is_lost = True
        self.sides[-1].loader.cancel("unknown")

    def update_weights(self) -> None:
        """In place, between steps; requests under way neither load nor save any more."""
        self.epoch += 1

    def sleep(self) -> None:
        """The memory goes, whatever was under way."""
        self._close_side()
        self.awake = False
        self._lose_memory()

    def wake(self) -> None:
        """The memory is back, and holds nothing."""
        self.compute_passes(self.compute.given)  # the check at start is on this stream, too
        self.hands.planned[:] = self.hands.now[:] = [one + 1 for one in self.hands.planned]
        self.awake = True
        self._open()

    def shut_down(self) -> None:
        if self.awake:
            self._close_side()
        self._lose_memory()
        for _ in range(_CLOSES):  # a schedule may let a deadline pass at once
            if self.insides[-1].close(1000.0):
                break
        for lane in self.lanes:
            lane.stream.end()
        self.compute.end()

    def _close_side(self) -> None:
        """The device may still copy if a schedule lets the bound of closing pass at once. That is
        logged, and the memory must stay."""
        stage = the_stage()
        bound = stage.now + self.knobs.drain_ms / 1000 + COPIES_S
        self.sides[-1].close()
        if stage.now >= bound:
            _TOLD[:] = [line for line in _TOLD if not line.startswith(_COPIES_LEFT)]
            gathering = [task for task in stage.tasks if task.name.startswith("objkv-gather")]
            stage.wait("gathers", lambda: all(task.over for task in gathering))
            for stream in {lane.stream for lane in self.lanes if lane.stream.name == "save lane"}:
                stage.wait("copies", lambda s=stream: s.done >= s.given)  # type: ignore[misc]

    # What the worker does.

    def step(self) -> None:
        side, knobs = self.sides[-1], self.knobs
        plan = self._plan()
        if knobs.writes_early:
            self._apply_handed()
        side.before_reuse(plan)
        if not knobs.writes_early:
            self._apply_handed()
        side.before_forward(plan)
        sync = any(load.sync for load in plan.loads)
        if sync:
            side.start_loads(plan)
        self._forward(side, plan)
        tokens = self.compute.given
        if not sync:
            side.start_loads(plan)
        side.end_forward(plan)
        finished, self._finished = self._finished, set()
        results = side.results(plan, finished)
        failed = side.take_failed_blocks()
        side.take_report()
        self.compute_passes(tokens)
        self._settle(failed)
        for name in results.finished_recving:
            self._received(self.requests[name], failed)
        for name in results.finished_sending:
            self._held.discard(name)
            self._release(self.requests.pop(name))

    def compute_passes(self, position: int) -> None:
        """Wait for the model, as for its tokens."""
        the_stage().wait("tokens", lambda: self.compute.done >= position or not self.knobs.late)

    def busy(self) -> bool:
        return any(r.state in ("new", "loading", "held") for r in self.requests.values())

    def running(self) -> list[str]:
        return [r.name for r in self.requests.values() if r.state == "running"]

    def _plan(self) -> StepPlan:
        loads, saves = [], []
        for request in self.requests.values():
            if request.state != "new":
                continue
            if request.loading:
                loads.append(self._load_plan(request))
            computes = request.loading < request.chunks and request.epoch == self.epoch
            if computes and (request.sync or not request.loading):
                request.saved = True
                saves.append(self._save_plan(request))
        idle = not any(r.state in ("new", "running") for r in self.requests.values())
        reused, self._preempted = frozenset(self._preempted), set()
        return StepPlan(
            tuple(loads),
            tuple(saves),
            frozenset(self._held),
            idle=idle and bool(loads),
            reused=reused,
            may_reuse=self._is_short or not self.knobs.roomy,
        )

    def _forward(self, side: WorkerSide, plan: StepPlan) -> None:
        computing: list[tuple[Request, int]] = []
        for request in self.requests.values():
            if request.state == "new" and request.loading and not request.sync:
                request.state = "loading"
            elif request.state == "new":
                computing.append((request, request.loading))
        for layer, name in enumerate(GROUP.layers):
            side.wait_layer(name)
            for request, loaded in computing:
                self._begin_at(request, loaded, [layer])
            for request in self.requests.values():
                if request.state == "running":
                    for chunk in range(request.computed):
                        self._look(request, chunk, layer, request.epochs[chunk])
        for request, loaded in computing:
            self._runs(request, loaded)

    def _begin_at(self, request: Request, loaded: int, layers: Sequence[int] = LAYERS) -> None:
        """Read the chunks that were loaded, and compute the others, as if they had come with
        them."""
        for chunk in range(loaded):
            for layer in layers:
                self._look(request, chunk, layer, request.epoch)
        for chunk in range(loaded, request.chunks):
            for layer in layers:
                self._write(request, chunk, layer)

    def _runs(self, request: Request, loaded: int) -> None:
        request.state, request.loading, request.computed = "running", 0, request.chunks
        request.epochs = [request.epoch] * loaded + [self.epoch] * (request.chunks - loaded)

    def _received(self, request: Request, failed: set[int]) -> None:
        assert request.state == "loading", (request, "told twice")
        if request.aborted:
            self._release(request)
            del self.requests[request.name]
            return
        good = next(
            (c for c in range(request.loading) if failed & {*request.of(c)}), request.loading
        )
        self._begin_at(request, good)
        self._runs(request, good)

    def _settle(self, failed: set[int]) -> None:
        """Of loads within the step: what failed is computed again, all that was told good is."""
        checks, self._checks = self._checks, []
        for block, text in checks:
            if block not in failed:
                self.hands.say(text)
        for request in self.requests.values():
            if request.state != "running" or not failed & {*request.blocks}:
                continue
            first = next(c for c in range(request.chunks) if failed & {*request.of(c)})
            for chunk in range(first, request.chunks):
                request.epochs[chunk] = self.epoch
                for layer in LAYERS:
                    self._write(request, chunk, layer)

    def _write(self, request: Request, chunk: int, layer: int) -> None:
        epoch, blocks = self.epoch, request.of(chunk)

        def work() -> None:
            for place, block in enumerate(blocks):
                self.arrays[layer][block] = _bits(content(epoch, chunk, layer, place))

        self.compute.do(work)

    def _look(self, request: Request, chunk: int, layer: int, epoch: int) -> None:
        blocks, name = request.of(chunk), request.name

        def work() -> None:
            for place, block in enumerate(blocks):
                expected = _bits(content(epoch, chunk, layer, place))
                if not bool((self.arrays[layer][block] == expected).all()):
                    self._checks.append(
                        (block, f"{name} reads a wrong chunk {chunk}, block {block}")
                    )

        self.compute.do(work)

    def _hand_over(self, blocks: list[int]) -> None:
        for block in blocks:
            self.hands.planned[block] += 1
        self._handed.append(blocks)

    def _apply_handed(self) -> None:
        handed, self._handed = self._handed, []
        for blocks in handed:
            for block in blocks:
                self.compute.do(partial(self._change_hands, block, self.hands.planned[block]))

    def _change_hands(self, block: int, generation: int) -> None:
        self.hands.now[block] = generation
        self._poison(block)

    def _poison(self, block: int | slice) -> None:
        for array in self.arrays:
            array[block] = _bits(POISON)

    def _release(self, request: Request) -> None:
        self._hand_over(request.blocks)  # to nobody
        self.free += request.blocks
        request.blocks = []

    def _lose_memory(self) -> None:
        self.hands.now[:] = [GONE] * NUM_BLOCKS
        for known in (self.requests, self._handed, self._finished, self._held):
            known.clear()
        self.free = list(range(1, NUM_BLOCKS))

    def _load_plan(self, request: Request) -> LoadPlan:
        moves = [LoadMove(self._move(request, chunk), None) for chunk in range(request.loading)]
        return LoadPlan(request.name, namespace(request.epoch), packed(moves), request.sync)

    def _save_plan(self, request: Request) -> SavePlan:
        moves = tuple(
            SaveMove(
                self._move(request, chunk),
                token_digest(TOKENS[chunk * CHUNK : (chunk + 1) * CHUNK]),
                None,
            )
            for chunk in range(request.loading, request.chunks)
        )
        return SavePlan(request.name, namespace(request.epoch), moves)

    def _move(self, request: Request, chunk: int) -> ChunkMove:
        epoch = request.epoch
        return move_of(chunk, hashes(epoch), namespace(epoch), CHUNK, request.of(chunk))

    def _open(self) -> None:
        knobs = self.knobs
        agent = self.insides[-1] if self.insides else self._open_agent()
        with patch.multiple(
            wiring,
            plan_pools=_few_slabs,
            open_lane=self._open_lane,
            Loader=self._open_loader,
            Saver=WatchedSaver,
            SlabPool=WatchedPool,
            AgentSaves=self._open_saves,
        ):
            side = make_worker_side(
                Config(
                    pinned_bytes_max=1 << 20,
                    drain_deadline_ms=knobs.drain_ms,
                    save_deadline_ms=knobs.save_ms,
                ),
                GEOMETRY,
                Rank(0, "w", batches_in_flight=1, writes_early=knobs.writes_early),
                agent.connect,
                recorder=self.recorder,
                kv_caches=dict(zip(GROUP.layers, self.caches, strict=True)),
            )
        self.sides.append(side)

    def _open_agent(self) -> WatchedInside:
        knobs = self.knobs
        settings = CacheSettings("w", ttl_s=3600, lease_ms=600_000, hot_save_bytes_max=0)
        cache = ChunkCache(
            self.store, None, self.index, settings, self.recorder, clock=lambda: the_stage().now
        )
        return WatchedInside(
            cache,
            (knobs.arena_pages or 8) * PAGE,
            CoreLimits(
                knobs.load_threads, 64, part_policy=PartPolicy(knobs.spans, part_bytes_min=1)
            ),
            self.recorder,
            knobs.codec,
            is_in_place=not self._has_device_frames,
            register_s=knobs.register_s,
        )

    def _open_lane(self, _: torch.device, *, urgent: bool = False) -> WatchedLane:
        knobs, name = self.knobs, "load lane" if urgent else "save lane"
        stream = Stream(name, late=knobs.late, seconds=knobs.copy_s)
        lane = WatchedLane(stream, self.hands, self.compute, loads=urgent)
        self.lanes.append(lane)
        return lane

    def _open_saves(self, *given: Any, **named: Any) -> AgentSaves:
        self.outboxes += [one for one in given if isinstance(one, Outbox)]
        self.saves.append(AgentSaves(*given, **named))
        return self.saves[-1]

    def _open_loader(self, *given: Any, **named: Any) -> Loader:
        if self._has_device_frames:
            slabs = WatchedPool("load", count=2, slab_bytes=PAGE)
            pin = self.insides[-1].register if self.knobs.frames == "registering" else refuse_pin
            named["on_device"] = ArenaRegistration(slabs, pin, window_bytes=PAGE)
        return WatchedLoader(self.hands, *given, **named)

    @property
    def _has_device_frames(self) -> bool:
        return self.knobs.late and self.knobs.frames != "in place"

    # What is left.

    def check(self) -> None:
        """Nothing is held, and all that is stored is right. Raises ``Broken``."""
        never(self.hands.broken, "; ".join(self.hands.broken))
        for pool in self.pools:
            never(pool.leased, f"slabs are left leased: {pool!r}")
        for inside in self.insides:
            payloads = inside.core.arena_cache
            is_left = payloads.leased() or not is_consistent(payloads)
            never(is_left, f"payloads are left leased: {payloads!r}")
            never(inside.registered, "an arena is left registered")
            never(inside.arena.fd >= 0, "an arena is left mapped")
        for saves in self.saves:
            never(saves.in_flight, f"saves never ended: {len(saves.in_flight)}")
        for entry in self.inner.scan(""):
            self._check_payload(self.inner.get(entry.key) or b"")
        for epoch in range(self.epoch + 1):
            paths = [entry.key for entry in self.inner.scan(namespace(epoch))]
            for record in self.index.scan(namespace(epoch)):
                name = record.prefix_hash.hex()
                is_stored = any(name in path for path in paths)
                never(not is_stored, f"a record of what is not stored: {name}")

    def _check_payload(self, payload: bytes) -> None:
        header = read_header(payload)
        layers = self.group.layers
        open_payload(payload, header.claim, layers)
        epoch = int(header.claim.key.namespace, 16)
        chunk = header.claim.token_start // CHUNK
        for layer, spec in enumerate(layers):
            pages = frame_pages(header, layer, payload, memoryview(bytearray(spec.nbytes)))
            values = np.frombuffer(pages, np.int16).reshape(BLOCKS, -1)
            for place in range(BLOCKS):
                is_right = (values[place] == _bits(content(epoch, chunk, layer, place))).all()
                never(not is_right, f"stored wrong: chunk {chunk}, layer {layer}, weights {epoch}")


def never(what: Any, says: str) -> None:
    if what:
        raise Broken(says)


@cache
def _bits(value: float) -> int:
    return int(torch.tensor(value).to(torch.bfloat16).view(torch.int16))


class _Errors(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        reason = record.exc_info[1] if record.exc_info else ""
        _TOLD.append(f"{record.getMessage()} {reason!r}")


_TOLD: list[str] = []
"""What objkv logged as an error since a play began: a bug. What it warns of is wanted here."""

_COPIES_LEFT = "copies of saves did not finish on the device"


@contextmanager
def listening() -> Iterator[None]:
    logger = logging.getLogger("objkv")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with patch.multiple(logger, handlers=[_Errors(logging.ERROR)], propagate=False):
            yield
    finally:
        logger.setLevel(level)


def play(stage: Stage, life: Callable[[Engine], None], knobs: Knobs, seed: int) -> Engine:
    """A whole life on a stage, and the look at what is left of it. Raises ``Broken``."""
    engines: list[Engine] = []
    files = _files()

    def main() -> None:
        engine = Engine(knobs, seed)
        engines.append(engine)
        life(engine)
        engine.shut_down()

    _TOLD.clear()
    with ExitStack() as stack:
        kept = partial(WatchedArenaCache, keeps=knobs.keeps)
        stack.enter_context(patch.object(core, "ArenaCache", kept))
        stack.enter_context(patch.object(in_test, "InsideConnection", WatchedConnection))
        stack.enter_context(patch.object(fill, "_HEADER_BYTES", _HEADER_BYTES))
        # Payloads are small, and a step is to get them layer by layer nevertheless.
        stack.enter_context(patch.object(loader, "_SLICE_BYTES", 1))
        stack.enter_context(patch.object(client, "BOARD_BYTES", _BOARD_BYTES))
        for module in (arena, arena_cache):
            how = {"BOARD_BYTES": _BOARD_BYTES, "CELLS": _CELLS}
            stack.enter_context(patch.multiple(module, **how))
        stack.push(_forget)
        stack.callback(_close_memory, engines)  # that of a broken life, too
        stage.play(main)
        (engine,) = engines
        never(_TOLD, f"logged as an error: {_TOLD}")
        engine.check()
    never(stage.alarms, f"{len(stage.alarms)} alarms are left open")
    files += sum(pool.is_outbox for pool in engine.pools)
    if _files() > files:
        gc.collect()
    never(_files() > files, f"{_files() - files} files are left open")
    return engine


def _close_memory(engines: list[Engine]) -> None:
    for engine in engines:
        for inside in engine.insides:
            inside.give_up()
        for outbox in engine.outboxes:
            outbox.close()


def _forget(kind: type[BaseException] | None, *_: object) -> None:
    """Nothing keeps the slabs of a broken life."""
    if kind is not None:
        WatchedPool.begin()


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))
