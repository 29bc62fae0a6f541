"""Measures loads and saves of a worker's paged cache on a device, along with a model's steps.

``python -m benchmarks.gpu`` measures this machine's GPU, and with ``--simulated`` the simulated
device. The model has the shape of an 8B: a chunk is 256 tokens, 32 layers, 32 MiB. The worker is
made as in a replica, and this program makes the calls that vLLM makes in each step. Transfers are
timed on the device, from the call to the last copy.

The agent's core is in this process, and its memory has all payloads before they are timed.

On the simulated device, copies and kernels take time by its model and no bytes move. Payloads have
no pages: no small host copies as fast as a GPU's link. All Python code runs as it does with a GPU,
and takes its real time.
"""

import copy
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Final, Self, cast
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
import typer
from numpy.random import default_rng

from benchmarks.alone import Check, Quick, Rounds, run_command, run_work
from benchmarks.harness import (
    BenchRow,
    BenchSetting,
    Compared,
    Section,
    Target,
    Timings,
    interleave,
)
from benchmarks.worker import (
    BLOCK,
    BLOCKS,
    CHUNK,
    LAYERS,
    LLAMA_8B,
    NOTHING,
    moves_of,
    saves_of,
    step_of,
)
from objkv.agent.core import CoreLimits
from objkv.agent.memory.arena import PAGE
from objkv.cache.chunks import CacheSettings, ChunkCache, shard_record
from objkv.cli.command import Session
from objkv.codec import payload, seal
from objkv.codec.payload import Claim, Provenance, encode_in_place, header_room
from objkv.config import load_config
from objkv.connector.kv.metadata import StepPlan
from objkv.connector.kv.wiring import make_worker_side, use_batched_copies
from objkv.connector.kv.worker import Rank
from objkv.connector.model.groups import Geometry
from objkv.index.base import ChunkEntry, ShardRecord
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import GroupIdentity
from objkv.keys.prefix import token_digest
from objkv.ops.bench.sample import NAMESPACE
from objkv.programs.gpu_facts import device_name, plain_copy
from objkv.stores.base import Arrived, Buffer, WriteStore, copy_bytes
from objkv.telemetry import NullRecorder
from objkv.transfer.devices import DRIVERS, DeviceDriver, driver_of
from objkv.transfer.paging import PagedGroup
from objkv.transfer.plan import SavePlan
from tests.contracts.memory_index import MemoryIndex
from tests.device import simulated
from tests.device.devices import (
    COPY_GBPS,
    KERNEL_GBPS,
    LAUNCH_US,
    SIMULATED,
    model_time,
    open_device,
)
from tests.support.inside import InsideAgent
from tests.support.plans import LoadMove

FORMS: Final = ("NHD", "HND")
"""Orders of heads and tokens in a block. FlashAttention's is NHD, where a head's tokens are not
contiguous."""
STEP_MS, BUSY_STEP_MS = 10, 30
"""Length of the steps that run during one long load, and of those that each start a short one."""
LOAD = Target(0.9)
ONE = Target(1.3, at_most=True)
FORWARD_US = Target(80, at_most=True, of="ours")
STEP = Target(1.02, at_most=True)
_QUICK_CHUNKS = 8
_PINNED_BYTES = 2 << 30
_PLAIN_BYTES = 256 << 20
_SAVED_SHARE, _BUSY_SHARE = 4, 8
"""Divisors of the long load: what one step saves, and what each of the busy steps loads."""
_BUSY_STEPS = 20
_LOOK_S = 2e-4
_BOUND_S = 60.0
_MATRIX, _SAMPLE = 4096, 20

Compute = Callable[[float], None]
"""Submits a model's kernels that take a given number of seconds to the current stream."""


@dataclass(frozen=True, slots=True)
class GpuAnswer:
    """What was moved, and seconds by side, one per round."""

    device: str
    rank: GroupIdentity
    """The KV of a rank."""
    chunks: int
    """Of the long load."""
    seconds: Mapping[str, Sequence[float]]
    """On the device, for each form: plain copies of the long load's bytes (``NHD to_device``,
    ``NHD to_host``), the ``NHD load`` and the ``NHD gather`` of a step's saves. On the device: the
    ``one load`` of a chunk, a plain copy of it (``one to_device``), a ``step`` alone, a ``step
    beside`` the long load, and that ``load beside`` steps. Until it is reported: the ``busy load``
    of one of the busy steps. Processor time of the forward thread: ``forward load``, ``forward
    save``, and ``forward idle``, a step without transfers."""

    @property
    def saved(self) -> int:
        """Chunks that one step saves."""
        return max(1, self.chunks // _SAVED_SHARE)

    @property
    def loaded_by_step(self) -> int:
        """Chunks that each of the busy steps loads."""
        return max(1, self.chunks // _BUSY_SHARE)


def kv_like(nbytes: int, seed: int = 0) -> bytes:
    """Return BF16 numbers that shuffled zstd makes 1.46 times smaller and shuffled lz4 1.15 to 1.2
    times. As in a trained model, some channels of K are far from zero, and scales differ."""
    source = default_rng(seed)
    values: npt.NDArray[np.float32] = source.standard_normal(
        (nbytes // 2 // LLAMA_8B.content, LLAMA_8B.content), dtype=np.float32
    )
    far = LLAMA_8B.content // 4
    values[:, :far] += 8 * source.standard_normal(far, dtype=np.float32)
    values *= np.exp(source.standard_normal(LLAMA_8B.content, dtype=np.float32) / 2)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


class TimedDriver(DeviceDriver):
    """A device's driver whose events have times."""

    def __init__(self, driver: DeviceDriver, api: Any) -> None:
        self.kernels, self.batch_copy = driver.kernels, driver.batch_copy
        self._driver, self._api = driver, api
        self.events: list[Any] = []
        """All events since this was emptied, in the order in which they were made."""

    def event(self) -> Any:
        """See ``DeviceDriver.event``. Nothing waits for events here."""
        event = self._api.Event(enable_timing=True)
        self.events.append(event)
        return event

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        """See ``DeviceDriver.pin``."""
        return self._driver.pin(memory)

    def pin_read_only(self, address: int, nbytes: int) -> Callable[[], None]:
        """See ``DeviceDriver.pin_read_only``."""
        return self._driver.pin_read_only(address, nbytes)

    def seconds(self) -> float:
        """Return the time from the first event to the last. All must have passed."""
        first, *others = self.events
        return float(max(first.elapsed_time(event) for event in others)) / 1e3


class OnePrompt:
    """A bulk store with the payloads of one prompt, which have equal pages. It keeps nothing."""

    def __init__(self, group: PagedGroup, *, in_place: bool) -> None:
        """``in_place``: serve headers only, as if the pages were in the arena already."""
        self.layers, self.in_place = group.layers, in_place
        room = header_room(group.layers)
        self.slab = np.empty(room + group.raw_bytes, np.uint8).data
        self._pages = self.slab[room:]
        if not in_place:
            self._pages[:] = kv_like(group.raw_bytes)
        self._headers: dict[str, bytes] = {}
        self.saved: list[str] = []
        """Keys of all payloads that were put."""

    def add(self, claim: Claim) -> ShardRecord:
        """Add a payload. Returns its record."""
        provenance = Provenance(token_digest(()), "objkv bench", 0)
        encoded, header = encode_in_place(
            claim, self.layers, self.slab, codec="none", provenance=provenance
        )
        nbytes = len(self._pages)
        self._headers[claim.key.path()] = bytes(encoded[:-nbytes])
        return shard_record(header)

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int:
        """See ``ReadStore``. Layers arrive one after the other."""
        assert start is None
        assert arrived is not None
        header = self._headers[key]
        at, size = len(header), len(self._pages) // len(self.layers)
        copy_bytes(buffer, header, at)
        if self.in_place:
            at += len(self._pages)
            arrived(at)
            return at
        for first in range(0, len(self._pages), size):
            copy_bytes(buffer[at:], self._pages[first:], size)
            at += size
            arrived(at)
        return at

    def put_if_absent(self, key: str, value: Buffer) -> bool:
        """Discard the value."""
        self.saved.append(key)
        return True

    def is_in(self, cache: torch.Tensor, layer: int, chunks: Sequence[Sequence[int]]) -> bool:
        """Whether the blocks of all these chunks have the pages of a layer."""
        size = len(self._pages) // len(self.layers)
        pages = torch.frombuffer(self._pages[layer * size : (layer + 1) * size], dtype=torch.int16)
        ids = torch.tensor(list(chunks), device=cache.device)
        found = cache.view(torch.int16)[ids.flatten()]
        right = pages.to(cache.device).view(len(chunks[0]), *cache.shape[1:])
        return bool((found.view(len(chunks), *right.shape) == right).all())


class Rig:
    """A worker over a paged cache in one form, and the steps of an engine. For ``with``."""

    def __init__(
        self,
        memory: torch.Tensor,
        rank: GroupIdentity,
        form: str,
        timed: TimedDriver,
        compute: Compute,
    ) -> None:
        """``memory``: that of the paged cache, ``[words]`` bf16 on the device."""
        self._device, self._timed, self._compute = memory.device, timed, compute
        self._geometry = Geometry((rank,), CHUNK, BLOCK, tp_size=1)
        self._api = torch.get_device_module(memory.device)
        heads, size, content = rank.heads, BLOCK, rank.content
        plain = memory.view(len(LAYERS), -1, size * heads * content)
        if form == "NHD":
            layers = plain.view(*plain.shape[:2], size, heads, content).transpose(2, 3)
        else:
            layers = plain.view(*plain.shape[:2], heads, size, content)
        self._caches = dict(zip(LAYERS, layers, strict=True))
        self.chunks = (layers.shape[1] - 1) // BLOCKS
        self._loads: list[LoadMove] = []
        self.noted: dict[str, list[float]] = {}
        """Further measurements: seconds by side."""
        self._requests = 0
        self._started: dict[str, float] = {}
        """When each load was started that has not ended."""
        self._latencies: list[float] = []
        self._results_s = 0.0
        """Processor time of the last look at results."""

    def open(self, *, in_place: bool) -> None:
        """Make the worker, as a replica does, and the stored payloads."""
        shape = self._geometry.shape(0, 0)
        assert shape is not None
        self._store = OnePrompt(PagedGroup(shape, list(self._caches.values())), in_place=in_place)
        config = load_config({"pinned_bytes_max": _PINNED_BYTES}, environ={})
        recorder = NullRecorder()
        settings = CacheSettings("bench", ttl_s=600, lease_ms=60_000, hot_save_bytes_max=0)
        index = MemoryIndex()
        cache = ChunkCache(cast("WriteStore", self._store), None, index, settings, recorder)
        nbytes = self.chunks * (len(self._store.slab) // PAGE + 2) * PAGE
        # Payloads have no pages, so there is nothing to make ahead of them.
        with mock.patch("objkv.agent.memory.arena.AHEAD_BYTES", (0, 0)):
            self._agent = InsideAgent(cache, nbytes, CoreLimits(8, self.chunks), recorder)
        self._worker = make_worker_side(
            config,
            self._geometry,
            Rank(0, "bench", 1),
            self._agent.connect,
            recorder=recorder,
            kv_caches=self._caches,
        )
        # On a busy server the blocks of a prompt are scattered.
        blocks = random.Random(0).sample(range(1, 1 + self.chunks * BLOCKS), self.chunks * BLOCKS)
        for move in moves_of(NAMESPACE, range(self.chunks * CHUNK), blocks):
            key = ChunkKey(NAMESPACE, move.prefix_hash, 0)
            tokens = move.token_start, move.token_end
            self._loads.append(LoadMove(move, None))
            record = self._store.add(Claim(key, move.parent_hash, *tokens))
            entry = ChunkEntry(NAMESPACE, move.prefix_hash, move.parent_hash, *tokens)
            index.publish(entry, {key.field: record}, ttl_s=3600)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()
        self._agent.close(_BOUND_S)
        self._api.synchronize(self._device)

    # The measurements.

    def load_one(self) -> float:
        """Load one chunk. Returns device seconds."""
        return self._load(self._loads[:1])[0]

    def load(self) -> float:
        """Load all chunks. Returns device seconds."""
        seconds, forward_s = self._load(self._loads)
        self._note("forward load", forward_s)
        if not self._store.in_place:
            self._check()
        return seconds

    def _load(self, loads: Sequence[LoadMove]) -> tuple[float, float]:
        """Load chunks. Returns seconds of the device, and of the forward thread's processor."""
        plan = self._load_plan(loads)
        self._timed.events = []
        forward_s = self._processor_s(lambda: self._step(plan))
        self._wait_loads()
        return self._timed.seconds(), forward_s + self._results_s

    def gather(self) -> float:
        """Save the chunks of one step. Returns device seconds until they have left the device."""
        self._requests += 1
        name = f"save {self._requests}"
        loads = self._loads[: max(1, self.chunks // _SAVED_SHARE)]
        saves = tuple(saves_of([load.move for load in loads]))
        # A namespace of its own: the chunks of another round would not be saved again.
        plan = StepPlan(saves=(SavePlan(name, f"{self._requests:032x}", saves),))
        self._timed.events, self._store.saved = [], []
        self._note("forward save", self._processor_s(lambda: self._worker.end_forward(plan)))
        held = StepPlan(held=frozenset({name}))
        self._wait(lambda: name in self._worker.results(held, set()).finished_sending)
        report = self._worker.take_report()
        assert report is None or not report.dropped, "saves were dropped"
        seconds = self._timed.seconds()
        self._wait(lambda: len(self._store.saved) == len(saves))  # otherwise slabs run out
        return seconds

    def idle(self) -> float:
        """Run a step without transfers. Returns processor seconds of the forward thread."""

        def step() -> None:
            self._step(NOTHING)
            self._worker.results(NOTHING, set())

        return self._processor_s(step)

    def steps_alone(self, count: int) -> float:
        """Compute steps. Returns device seconds per step."""
        return self._steps([NOTHING] * count, STEP_MS / 1e3)

    def steps_beside(self, count: int) -> float:
        """Compute steps while all chunks are loaded. Returns device seconds per step."""
        load = self._load_plan(self._loads)
        self._timed.events = []
        seconds = self._steps([load] + [NOTHING] * (count - 1), STEP_MS / 1e3)
        self._wait_loads()
        self._note("load beside", self._timed.seconds())
        return seconds

    def busy_loads(self) -> float:
        """Compute steps that each start a load. Returns the median seconds of a load."""
        loads, count = self._loads, max(1, self.chunks // _BUSY_SHARE)
        firsts = [number * count % self.chunks for number in range(_BUSY_STEPS)]
        self._latencies.clear()
        steps = [self._load_plan(loads[first : first + count]) for first in firsts]
        self._steps(steps, BUSY_STEP_MS / 1e3)
        self._wait_loads()
        return float(np.median(self._latencies))

    def _steps(self, plans: Sequence[StepPlan], seconds: float) -> float:
        """Compute one step for each plan. The next step is submitted while one computes, as vLLM
        does with asynchronous scheduling. Returns device seconds per step."""
        ends = [self._mark()]
        for plan in plans:
            self._step(plan, seconds)
            ends.append(self._mark())
            self._wait(ends[-2].query)
        self._wait(ends[-1].query)
        return float(ends[0].elapsed_time(ends[-1])) / 1e3 / len(plans)

    def _step(self, plan: StepPlan, seconds: float = 0.0) -> None:
        """Make the calls of a model runner that starts loads when the forward pass is launched."""
        self._worker.before_reuse(plan)
        self._worker.before_forward(plan)
        if seconds:
            self._compute(seconds)
        for load in plan.loads:
            self._started[load.request_id] = time.perf_counter()
        self._worker.start_loads(plan)
        self._worker.end_forward(plan)

    def _wait_loads(self) -> None:
        self._wait(lambda: not self._started)

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Take the results of loads until a condition holds."""
        end = time.monotonic() + _BOUND_S
        while not condition():
            assert time.monotonic() < end, "transfers did not end"
            time.sleep(_LOOK_S)
            if self._started:
                self._take_loads()

    def _take_loads(self) -> None:
        began = time.thread_time()
        received = self._worker.results(NOTHING, set()).finished_recving
        self._results_s = time.thread_time() - began
        for name in received:
            self._latencies.append(time.perf_counter() - self._started.pop(name))
        assert not self._worker.take_failed_blocks(), "a load failed"

    def _load_plan(self, loads: Sequence[LoadMove]) -> StepPlan:
        """Return a step with one load, in the form in which a worker receives it."""
        self._requests += 1
        return copy.deepcopy(step_of(NAMESPACE, loads, f"load {self._requests}"))

    def _mark(self) -> Any:
        event = self._api.Event(enable_timing=True)
        event.record(self._api.current_stream(self._device))
        return event

    def _check(self) -> None:
        """Raise AssertionError unless the paged cache has the stored bytes."""
        chunks = [load.move.block_ids for load in self._loads]
        for layer, cache in enumerate(self._caches.values()):
            assert self._store.is_in(cache, layer, chunks), "wrong bytes were loaded"

    def _note(self, side: str, seconds: float) -> None:
        self.noted.setdefault(side, []).append(seconds)

    @staticmethod
    def _processor_s(work: Callable[[], object]) -> float:
        began = time.thread_time()
        work()
        return time.thread_time() - began


def matrix_products(device: torch.device) -> Compute:
    """Return kernels of a model: products of large matrices."""
    operand = torch.randn(2 * (_MATRIX,), device=device).to(torch.bfloat16)
    begin, end = (torch.get_device_module(device).Event(enable_timing=True) for _ in range(2))

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(operand, operand)

    products(_SAMPLE)  # without the time to load the kernel
    begin.record()
    products(_SAMPLE)
    end.record()
    end.synchronize()
    rate = _SAMPLE / (begin.elapsed_time(end) / 1e3)
    return lambda seconds: products(max(1, round(seconds * rate)))


class Bench:
    """All sides of a device, measured in turns."""

    def __init__(
        self, device: torch.device, rank: GroupIdentity, chunks: int, compute: Compute
    ) -> None:
        self._rank, self._chunks, self._compute = rank, chunks, compute
        self._timed = TimedDriver(driver_of(device), torch.get_device_module(device))
        DRIVERS[device.type] = self._timed
        words = rank.heads * BLOCK * rank.content * len(LAYERS)
        count = words * (1 + chunks * BLOCKS)
        self._memory = torch.empty(count, dtype=torch.bfloat16, device=device)
        nbytes = min(_PLAIN_BYTES, chunks * _chunk_bytes(rank))
        self._plain = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._host = torch.empty(nbytes, dtype=torch.uint8)

    def run(
        self, rounds: int, clock: Callable[[bool], object], *, in_place: bool
    ) -> dict[str, list[float]]:
        """Return seconds by side. ``clock``: turns the simulated device's time on or off."""
        unpin = self._timed.pin(self._host)
        found: dict[str, list[float]] = {}
        for form in FORMS:
            clock(False)
            rig = Rig(self._memory, self._rank, form, self._timed, self._compute)
            rig.open(in_place=in_place)
            clock(True)
            with rig:
                timings = interleave(self._sides(rig, form), rounds)
            noted = rig.noted if form == FORMS[0] else {}
            # Without the first round, which warms up.
            found |= {side: times[len(times) // (rounds + 1) :] for side, times in noted.items()}
            found |= {side: list(times) for side, times in timings.seconds.items()}
        unpin()
        return found

    def _sides(self, rig: Rig, form: str) -> dict[str, Callable[[], float]]:
        """The sides of one form. Those that depend little on it are measured for one only."""
        one, copy = _chunk_bytes(self._rank), partial(plain_copy, self._host, self._plain)
        sides: dict[str, Callable[[], float]] = {
            f"{form} to_device": partial(copy, self._chunks * one, up=True),
            f"{form} to_host": partial(copy, self._chunks * one, up=False),
        }
        sides[f"{form} load"] = rig.load
        sides[f"{form} gather"] = rig.gather
        if form != FORMS[0]:
            return sides
        steps = max(2, math.ceil(copy(self._chunks * one, up=True) * 1e3 / STEP_MS) + 1)
        return sides | {
            "one to_device": partial(copy, one, up=True),
            "one load": rig.load_one,
            "step": partial(rig.steps_alone, steps),
            "step beside": partial(rig.steps_beside, steps),
            "busy load": rig.busy_loads,
            "forward idle": rig.idle,
        }


def _chunk_bytes(rank: GroupIdentity) -> int:
    return rank.heads * CHUNK * rank.content * len(LAYERS) * torch.bfloat16.itemsize


def simulated_layers(seconds: float) -> None:
    """Take the time of a model's kernels on the simulated device."""
    for _ in LAYERS:
        simulated.sleep(round(seconds * 1e6 / len(LAYERS)))


def measure(kind: str, rank: GroupIdentity, chunks: int, rounds: int) -> GpuAnswer:
    """Measure all sides of a device. Of the simulated one, checksums are constants from now on."""
    device, is_simulated = open_device(kind), kind == SIMULATED
    if is_simulated:
        for module in (payload, seal):
            vars(module)["digest"] = lambda content: "0" * 32
        name = (
            f"simulated: {LAUNCH_US:g} µs a launch, copies at {COPY_GBPS:g} GB/s, kernels at "
            f"{KERNEL_GBPS:,g} GB/s; no bytes are moved or verified"
        )
    else:
        use_batched_copies(device)
        name = device_name(device)
    compute = simulated_layers if is_simulated else matrix_products(device)
    clock = model_time if is_simulated else lambda on: None
    bench = Bench(device, rank, chunks, compute)
    return GpuAnswer(name, rank, chunks, bench.run(rounds, clock, in_place=is_simulated))


def rows_of(answer: GpuAnswer, prefix: str = "") -> Iterator[BenchRow]:
    """Yield one row per measurement. ``prefix``: of all names."""
    one = _chunk_bytes(answer.rank)
    loaded, saved = answer.chunks * one, answer.saved * one
    timings = _with_limits(answer)
    up, down = "plain copy, host to device", "plain copy, device to host"
    for form in FORMS:
        load = Compared(timings, f"{form} load", f"{form} to_device", up)
        yield load.throughput(f"{prefix}load, {form}, scattered blocks", loaded, LOAD)
        gather = Compared(timings, f"{form} gather", f"{form} save limit", down)
        yield gather.throughput(f"{prefix}save, {form}, scattered blocks", saved)
    alone = Compared(timings, "one load", "one to_device", up)
    yield alone.duration(f"{prefix}load of one chunk", "ms", ONE)
    beside = Compared(timings, "load beside", f"{FORMS[0]} to_device", up)
    yield beside.throughput(f"{prefix}load while steps compute", loaded, LOAD)
    step = Compared(timings, "step beside", "step", "the same steps alone")
    yield step.duration(f"{prefix}step during a load of {answer.chunks} chunks", "ms", STEP)
    busy = Compared(timings, "busy load", "busy limit", "the step before it, and a plain copy")
    yield busy.duration(
        f"{prefix}load of {answer.loaded_by_step} chunks in each step of {BUSY_STEP_MS} ms",
        "ms",
        detail="from its step's start until it is reported",
    )
    yield from _forward_rows(timings, answer, prefix)


def _with_limits(answer: GpuAnswer) -> Timings:
    """Add the time of plain copies of the bytes that one step saves, and that one of the busy steps
    loads. Those begin when the step before has ended, because it may still write their blocks."""
    seconds = dict(answer.seconds)
    for form in FORMS:
        share = answer.saved / answer.chunks
        seconds[f"{form} save limit"] = [s * share for s in seconds[f"{form} to_host"]]
    share = answer.loaded_by_step / answer.chunks
    seconds["busy limit"] = [
        BUSY_STEP_MS / 1e3 + s * share for s in seconds[f"{FORMS[0]} to_device"]
    ]
    return Timings(seconds)


def _forward_rows(timings: Timings, answer: GpuAnswer, prefix: str) -> Iterator[BenchRow]:
    sides = {
        "load": f"load of {answer.chunks} chunks: start and outcome",
        "save": f"save of {answer.saved} chunks",
        "idle": "step without transfers",
    }
    for side, what in sides.items():
        yield BenchRow(
            f"{prefix}forward thread, {what}",
            "µs",
            timings.median(f"forward {side}") * 1e6,
            target=FORWARD_US if side == "load" else None,
            detail="processor time",
        )


def bench_gpu(setting: BenchSetting, kind: str, chunks: int, tp_size: int) -> Section:
    """Measure a device, as a rank of ``tp_size``."""
    prefix = "simulated: " if kind == SIMULATED else ""
    setting.report_stage(f"{prefix}GPU", "measuring")
    rank = replace(LLAMA_8B, heads=LLAMA_8B.heads // tp_size)
    answer = measure(kind, rank, _QUICK_CHUNKS if setting.quick else chunks, setting.rounds)
    rows = rows_of(answer, prefix)
    return Section("gpu", tuple(rows), {"GPU": answer.device})


def main(
    session: Session,
    rounds: Rounds = 7,
    quick: Quick = False,
    check: Check = False,
    simulated_device: Annotated[
        bool, typer.Option("--simulated", help="Measure a model of a GPU instead.")
    ] = False,
    chunks: Annotated[int, typer.Option(min=8, help="Chunks of the long load.")] = 128,
    tp: Annotated[int, typer.Option(min=1, max=8, help="Measure one rank of so many.")] = 1,
) -> int:
    """See ``run_command``."""
    kind = SIMULATED if simulated_device else "gpu"

    def measured(setting: BenchSetting) -> Section:
        return bench_gpu(setting, kind, chunks, tp)

    return run_work(session, measured, rounds, quick=quick, check=check)


if __name__ == "__main__":
    run_command(main, __doc__)
