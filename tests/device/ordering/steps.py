"""Scenarios of whole steps: loads and saves together, at start, and encoder outputs."""

from dataclasses import replace
from time import monotonic

import numpy as np
import torch

from objkv.codec.payload import frame_pages
from objkv.connector.encoder.items import EncoderOutput, EncoderPlan
from objkv.connector.kv.metadata import StepPlan
from objkv.errors import TransferError
from objkv.keys.encoder import encoder_hash
from objkv.transfer.lanes import Mark
from objkv.transfer.paging import check_pages
from tests.connector.encoder.world import Place, replica
from tests.device.ordering.rig import (
    CHUNKS,
    NAMESPACE,
    SLOW_S,
    WHOLE,
    OrderRig,
    Pages,
    Scenario,
    Setup,
    difference,
)
from tests.support.payloads import open_payload

_SHARE_MAX = 1 / 4
"""Largest part of the time in which the device is busy that the calling thread may take."""
_SAVED, _LOADED = 8, 40
"""First blocks of saved and of loaded chunks."""
_STORED = range(4, 7)
"""Chunks that are loaded."""
_THEN, _LATER = 5.0, 9.0
"""Contents of saved blocks: when they are saved, and of their next owner."""
_OUTPUTS = 12
_ROWS, _WIDTH = 16, 256
"""Encoder outputs, and the shape of each."""
_STEPS, _AREAS = 32, 6
_BATCHES_MAX = 1
"""Batches that the device computes while the next one is launched."""
_SHORT_S = 0.008
"""Longest delay in a step of random order."""
_LOSSES = ("load_errors", "load_refused", "save_drops", "save_errors", "saves_shed")
_MISSING_MAX = 1 / 2
"""Largest part of the loads and saves in random order that may be lost."""
_TOLD_MAX = 3
"""Differences and losses in a message."""


class FaultFoundError(TransferError):
    """A scenario found wrong bytes, or lost transfers."""


def does_not_wait(rig: OrderRig) -> bool:
    """A thread that saves, loads and fences while compute and lanes are busy"""

    def is_quick(request: str, seconds: float) -> bool:
        for delay in (rig.delay_compute, rig.delay_loads, rig.delay_saves):
            delay(seconds)
        saves = rig.save_plan([int(request[1:])], _SAVED)
        loads = rig.load_plan(_STORED, _LOADED, request=request)
        started = monotonic()
        rig.step(StepPlan(loads=(loads,), saves=(saves,), reused=frozenset({"r"})))
        rig.step(StepPlan(reused=frozenset({"r"})))
        elapsed = monotonic() - started
        rig.until_received(request)
        return elapsed < seconds * _SHARE_MAX

    return rig.attempted(is_quick)


def tests_itself(rig: OrderRig) -> bool:
    """The self-test at start, next to a kernel that writes the cache"""

    def wait(call: str) -> None:
        if call == "follow":
            rig.delay_saves(SLOW_S)

    rig.on_call = wait
    rig.delay_compute(SLOW_S)
    rig.write(0, rig.setup.blocks, _THEN)
    check_pages(rig.pages, rig.save_lane)
    rig.delay_compute(SLOW_S)
    rig.write(*_blocks(rig), _LATER)
    found = rig.read(0, rig.setup.blocks)
    first, count = _blocks(rig)
    rest = [torch.cat([page[:first], page[first + count :]]) for page in found]
    own = [page[first : first + count] for page in found]
    return rig.holds(own, _LATER) and rig.holds(rest, _THEN)


def adds_outputs(rig: OrderRig) -> bool:
    """Encoder outputs that are read by a busy model, while the plan's memory changes"""
    outputs: dict[str, torch.Tensor] = {}
    with replica(Place(), device=str(rig.device)) as one:
        rig.delay_compute(SLOW_S)
        for number in range(_OUTPUTS):
            name = f"image {number}"
            pages = np.full(_output(name).layer.nbytes, number, dtype=np.uint8)
            one.worker.load(EncoderPlan(loads={name: (_output(name), pages)}), outputs)
            pages.fill(0xFF)
        found = [outputs[f"image {number}"].view(torch.uint8).clone() for number in range(_OUTPUTS)]
    return all(bool((page.cpu() == number).all()) for number, page in enumerate(found))


def saves_outputs(rig: OrderRig) -> bool:
    """Encoder outputs that are saved while the encoder still computes them"""
    outputs = {
        f"image {number}": torch.zeros(_ROWS, _WIDTH, dtype=torch.bfloat16, device=rig.device)
        for number in range(_OUTPUTS)
    }
    rig.synchronize()
    place = Place()
    with replica(place, device=str(rig.device)) as one:
        rig.delay_compute(SLOW_S)
        for number, (name, output) in enumerate(outputs.items()):
            output.fill_(number + 1)
            one.worker.save(EncoderPlan(saves={name: _output(name)}), outputs, name)
        one.drain()
    return all(_stored_value(place, name) == at + 1 for at, name in enumerate(outputs))


def runs_a_while(rig: OrderRig) -> bool:
    """Many steps with loads, saves, preempted and finished requests, in random order"""
    storm = _Storm(rig)
    for number in range(_STEPS):
        storm.step(number)
    return storm.end()


class _Storm:
    """Requests that take turns in some areas of the paged cache, each of the size of a load.

    An area is loaded, then read, or it is written and saved, then given to a next request: after
    the save has left the device, or earlier, by preemption.
    """

    def __init__(self, rig: OrderRig) -> None:
        self._rig = rig
        self._size = _blocks(rig)[1]
        self._loading: dict[int, tuple[str, range]] = {}
        self._saved: dict[int, str] = {}
        self._finished: dict[int, str] = {}
        self._read: list[tuple[str, Pages | None, range]] = []
        self._stored: list[tuple[str, str, float]] = []
        self._forward: list[Mark] = []

    def step(self, number: int) -> None:
        """Run one step: settle what ended, then let each free area start something."""
        rig, random = self._rig, self._rig.random
        rig.delay_compute(random.uniform(0, _SHORT_S))
        for delay in (rig.delay_loads, rig.delay_saves):
            if random.random() < 1 / 3:
                delay(random.uniform(0, _SHORT_S))
        self._settle()
        rig.let_saves_catch_up()
        reused = {area: name for area, name in self._saved.items() if random.random() < 1 / 2}
        for area in reused:
            del self._saved[area]
        loads, saves = [], []
        writes: list[tuple[int, float]] = []
        for area in range(_AREAS):
            if area in self._loading or area in self._saved or area in self._finished:
                continue
            first = 1 + area * self._size
            if random.random() < 1 / 2:
                start = random.randrange(CHUNKS - len(_STORED) + 1)
                chunks, name = range(start, start + len(_STORED)), f"load {number} {area}"
                loads.append(rig.load_plan(chunks, first, request=name))
                self._loading[area] = name, chunks
            else:
                name, value = f"save {number} {area}", float(1 + random.randrange(200))
                namespace = f"{number * _AREAS + area:032x}"
                saves.append(rig.save_plan(_STORED, first, request=name, namespace=namespace))
                writes.append((first, value))
                self._stored.append((name, namespace, value))
                self._saved[area] = name
        plan = StepPlan(
            loads=tuple(loads),
            saves=tuple(saves),
            held=frozenset(self._finished.values()),
            reused=frozenset(reused.values()),
        )
        rig.begin(plan)
        for first, value in writes:
            rig.write(first, self._size, value)
        self._forward.append(rig.loader.mark_compute())
        rig.worker.start_loads(plan)
        rig.end(plan)
        if len(self._forward) > _BATCHES_MAX:  # the engine waits for the tokens of a batch
            self._forward.pop(0).wait()
        for area in [area for area in self._saved if random.random() < 1 / 2]:
            self._finished[area] = self._saved.pop(area)

    def end(self) -> bool:
        """Wait for all transfers. Returns True if all bytes were right, else raises
        ``FaultFoundError``, which names what differs.

        A busy machine may miss loads and drop saves: none of them may be lost without a count, and
        most of them must have been done.
        """
        rig = self._rig
        for name, _ in self._loading.values():
            rig.until_received(name)
        self._settle()
        wrong, missing = [], []
        for name, pages, chunks in self._read:
            if pages is None:
                missing.append(name)
            elif found := difference(pages, rig.expected(chunks)):
                wrong.append(f"{name}: {found}")
        for name, namespace, value in self._stored:
            for chunk in _STORED:
                differs = self._stored_differs(chunk, namespace, value)
                if differs is None:
                    missing.append(f"{name}, chunk {chunk}")
                elif differs:
                    wrong.append(f"{name}, chunk {chunk}: {differs}")
        if wrong:
            raise FaultFoundError(f"{len(wrong)} have wrong bytes: {'; '.join(wrong[:_TOLD_MAX])}")
        counted = {name: count for name in _LOSSES if (count := int(rig.recorder.value(name)))}
        total = len(self._read) + len(self._stored) * len(_STORED)
        if len(missing) > min(sum(counted.values()), total * _MISSING_MAX):
            some = ", ".join(missing[:_TOLD_MAX])
            raise FaultFoundError(
                f"{len(missing)} of {total} are missing: {some}; counted {counted}"
            )
        return True

    def _stored_differs(self, chunk: int, namespace: str, value: float) -> str | None:
        """Return how a saved chunk differs from what it should be, empty if it does not, None if
        it is not stored."""
        pages = self._rig.stored(chunk, namespace)
        if pages is None:
            return None
        return difference(pages, [torch.full_like(p, value + n) for n, p in enumerate(pages)])

    def _settle(self) -> None:
        rig = self._rig
        rig.report(StepPlan(held=frozenset(self._finished.values())))
        failed = rig.worker.take_failed_blocks()
        for area, (name, chunks) in list(self._loading.items()):
            if name in rig.received:
                first = 1 + area * self._size
                is_loaded = failed.isdisjoint(range(first, first + self._size))
                pages = rig.read(first, self._size) if is_loaded else None
                self._read.append((name, pages, chunks))
                del self._loading[area]
        for area, name in list(self._finished.items()):
            if name in rig.sent:
                del self._finished[area]


def _output(name: str) -> EncoderOutput:
    return EncoderOutput(NAMESPACE, encoder_hash(NAMESPACE, name), _ROWS, _WIDTH, "BF16")


def _stored_value(place: Place, name: str) -> float | None:
    """Return the element that all of a stored output's are, or None if they differ."""
    output = _output(name)
    payload = place.store.get(output.claim.key.path())
    if payload is None:
        return None
    header = open_payload(payload, output.claim, (output.layer,))
    frame = bytearray(frame_pages(header, 0, payload, None))
    values = torch.frombuffer(frame, dtype=torch.bfloat16).unique()
    return float(values) if len(values) == 1 else None


def _blocks(rig: OrderRig) -> tuple[int, int]:
    return _LOADED, len(_STORED) * rig.setup.layout.chunk_blocks


# A slab for each save: hardly any is dropped for want of one.
_MANY = Setup(load_threads=4, save_slabs=256)
SCENARIOS = (
    Scenario("busy everywhere", does_not_wait),
    Scenario("self-test at start", tests_itself, Setup(watched=True)),
    Scenario("encoder outputs added", adds_outputs),
    Scenario("encoder outputs saved", saves_outputs),
    Scenario("steps in random order", runs_a_while, _MANY),
    Scenario("steps in random order, whole blocks", runs_a_while, replace(_MANY, layout=WHOLE)),
)
