"""The catalogue of mutants: objkv without one ordering edge, and what finds that out.

A scenario of ``tests.device.gpu_order`` finds it on the simulated device, or a situation of
``tests.fences`` in an interleaving of threads, or both do. ``python -m tests.device.mutants`` tries
each scenario that is named here, and prints how many rounds it took, as a table in Markdown.
"""

import importlib
import inspect
import logging
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch

from tests.device import simulated
from tests.device.gpu_order import SCENARIOS, run_scenarios
from tests.device.ordering import agent
from tests.device.ordering.agent import agent_rig
from tests.device.ordering.rig import Scenario

PATIENCE_S = 4.0
"""For mutants that make something wait for ever."""
ROUNDS = 12
"""How often a scenario is tried against a mutant. One or two are enough on a quiet machine."""
ATTEMPT_S = 0.3
"""How long the device is busy where something must not wait for it."""
DELAY_US_MAX = 500
"""The longest random delay of an operation on a stream."""
OWN = "own"
"""The worker loads for itself. In the other ways, ``ordering.agent.WAYS``, by a node agent."""
BY_NAME = {scenario.name: scenario for scenario in (*SCENARIOS, *agent.SCENARIOS)}


@dataclass(frozen=True)
class Edit:
    """Replaces text in the source of a function."""

    place: str
    """``module:function`` or ``module:Class.function``, in ``objkv``."""
    old: str
    new: str = "pass"
    """By default the statement ``old`` is removed."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        module_name, _, path = self.place.partition(":")
        module = importlib.import_module(f"objkv.{module_name}")
        owner: Any = module
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        original = inspect.getattr_static(owner, name)
        text = textwrap.dedent(inspect.getsource(original))
        assert self.old in text, f"{self.place} no longer contains: {self.old}"
        scope: dict[str, Any] = {}
        edited = text.replace(self.old, self.new)
        exec(compile(edited, f"<mutant of {self.place}>", "exec"), vars(module), scope)  # noqa: S102  # our own code
        with patch.object(owner, name, scope[name]):
            yield


@dataclass(frozen=True)
class Mutant:
    """The edge that is missing, and who finds that."""

    name: str
    edits: tuple[Edit, ...]
    scenario: str = ""
    """Of the simulated device."""
    way: str = OWN
    """How the worker of that scenario loads and saves."""
    situation: str = ""
    """Of the fences."""
    world: str = "slow"
    """Where that situation is played."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            for edit in self.edits:
                stack.enter_context(edit.applied())
            yield


def mutant(name: str, place: str, old: str, new: str = "pass", **found_by: str) -> Mutant:
    """A mutant with one edit."""
    return Mutant(name, (Edit(place, old, new),), **found_by)


_LANE = "transfer.devices:DeviceLane."
_ON_STREAM = "with self._lock, self._api.stream(self.stream):"
_MARK = "transfer.devices:DeviceMark."
_WRITER = "transfer.loading.job:BlockWriter."
_JOB = "transfer.loading.job:LoadJob."
_LOADS = "transfer.loading.loads:Loads."
_LOADER = "transfer.loading.loader:Loader."
_READING = "transfer.loading.loader:_Reading."
_WINDOWS = "transfer.registration:Windows."
_SLABS = "transfer.slabs:SlabPool."
_SAVER = "transfer.saver:Saver."
_WORKER = "connector.kv.worker:WorkerSide."
_CACHE = "cache.chunks:ChunkCache."
_INSIDE = "agent.connections:InsideAgent."
_COPIES = "connector.encoder.copies:DeviceCopies."

MUTANTS = (
    # Lanes and their marks
    mutant(
        "a lane does not follow marks",
        _LANE + "follow",
        "mark.event.wait(self.stream)",
        scenario="load after a kernel",
    ),
    mutant(
        "a lane follows only its first mark",
        _LANE + "follow",
        "mark is not self._followed",
        "self._followed is None",
        scenario="loads of two steps",
    ),
    mutant(
        "the mark of computing is recorded on the lane",
        _LANE + "mark_compute",
        "self.compute",
        "self.stream",
        scenario="load after a kernel",
    ),
    mutant(
        "the mark of a lane is recorded on the compute stream",
        _LANE + "mark",
        "self.stream",
        "self.compute",
        scenario="load, then forward",
    ),
    mutant(
        "marks are not recorded",
        _LANE + "_recorded",
        "event.record(stream)",
        scenario="load, then forward",
    ),
    mutant(
        "marks are always done",
        _MARK + "done",
        "bool(self.event.query())",
        "True",
        scenario="save finished",
    ),
    mutant(
        "marks hold nothing",
        _MARK + "hold_compute",
        "self.event.wait(self._lane.compute)",
        scenario="layer by layer",
    ),
    mutant(
        "marks hold the thread's device instead of the lane's",
        _MARK + "hold_compute",
        "self._lane.compute",
        "self._lane._api.current_stream()",
        scenario="save on another device",
    ),
    mutant(
        "loads scatter on the thread's stream",
        _LANE + "scatter",
        _ON_STREAM,
        "with self._lock:",
        scenario="slabs of loads",
    ),
    mutant(
        "saves gather on the thread's stream",
        _LANE + "gather",
        _ON_STREAM,
        "with self._lock:",
        scenario="save among kernels",
    ),
    mutant(
        "block ids are uploaded from pageable memory",
        "transfer.devices:DeviceBlocks.upload",
        "upload_ids(self.ids, self._device)",
        "torch.tensor(self.ids, device=self._device)",
        scenario="busy everywhere",
    ),
    mutant(
        "copies to the device block the thread",
        _LANE + "_distribute",
        "non_blocking=True",
        "non_blocking=False",
        scenario="fetching during device work",
    ),
    mutant(
        "copies to the host block the thread",
        _LANE + "_collect",
        "non_blocking=True",
        "non_blocking=False",
        scenario="busy everywhere",
    ),
    mutant(
        "a batch reads blocks out of stream order",
        _LANE + "_copy_blocks",
        "device, host, size, False",
        "device, host, size, True",
        scenario="forward, then save, whole blocks",
    ),
    mutant(
        "copies of whole blocks span two windows",
        _LANE + "_copy_blocks",
        "rows = _cut_rows(rows, self._seam)",
        scenario="memory reused, whole blocks",
        way="registered",
    ),
    # Loads
    mutant(
        "copies do not follow the mark of their step",
        _WRITER + "write",
        "lane.follow(job.after)",
        scenario="load after a kernel",
        situation="load async abort 1",
        world="patient",
    ),
    mutant(
        "nothing is zeroed",
        _WORKER + "_clear",
        "group.clear(blank.block_ids)",
        scenario="load that zeroes blocks",
    ),
    mutant(
        "the worker marks no step",
        _WORKER + "before_forward",
        "self._loader.mark_compute()",
        "None",
        scenario="load during its forward pass",
    ),
    mutant(
        "loads follow the mark of an earlier step",
        _WORKER + "before_forward",
        "= None, False\n    if plan.loads:",
        '= vars(self).setdefault("kept", self._loader.mark_compute()), False\n    if False:',
        situation="load async abort 1",
        world="patient",
    ),
    mutant(
        "loads follow the forward pass",
        _LOADS + "submit",
        "after = after or self.mark_compute()",
        "after = self.mark_compute()",
        scenario="load during its forward pass",
    ),
    mutant(
        "no layer holds computing",
        _LOADS + "wait_layer",
        "mark.hold_compute()",
        scenario="layer by layer",
        situation="load layerwise finish 1",
    ),
    mutant(
        "the end of a step does not hold computing",
        _JOB + "close",
        "mark.hold_compute()",
        scenario="layer by layer, then the next step",
    ),
    mutant(
        "results are reported before the step's loads are settled",
        _WORKER + "results",
        "self._settle_step(plan)",
        scenario="layer by layer, speculating",
    ),
    mutant(
        "loads are reported before their copies",
        _JOB + "poll",
        "if mark.done()]",
        "]",
        scenario="load, then forward",
        situation="load async abort 1",
    ),
    mutant(
        "loads are reported while a thread queues copies",
        _JOB + "poll",
        "if self._writing:",
        "if False:",
        scenario="load aborted while queued",
        situation="load async abort 1",
        world="patient",
    ),
    mutant(
        "a closed load writes on",
        _JOB + "enter",
        "if not self._wanted(index):",
        "if False:",
        situation="load async abort 1",
        world="patient host",
    ),
    mutant(
        "the later of two marks is lost",
        _JOB + "leave",
        "self._last_marks[lane] = mark",
        "self._last_marks.setdefault(lane, mark)",
        situation="load async abort 1",
    ),
    mutant(
        "a job does not keep its marks",
        _JOB + "leave",
        "self._last_marks[lane] = mark",
        situation="load async abort 1",
    ),
    Mutant(
        "the end does not wait for copies of loads",
        (
            Edit(_JOB + "close", "while not mark.done():", "while False:"),
            Edit(_LOADER + "_lose", "keep = keep or not self._await(marks)"),
        ),
        situation="load async sleep 1",
    ),
    mutant(
        "loads are not closed at the end",
        _WORKER + "close",
        "self._loader.close()",
        situation="load async shutdown 1",
    ),
    # Memory of loads
    mutant(
        "leases end before their copies",
        _LOADER + "_advance",
        "if one.is_copied and _is_past(one.writer.mark):",
        "if one.is_copied:",
        scenario="memory of loads",
        situation="load async finish 1",
    ),
    mutant(
        "leases of a cancelled load end before their copies",
        _LOADER + "_advance",
        "_is_past(one.writer.mark)",
        "(_is_past(one.writer.mark) or not one.job.wanted(one.index))",
        situation="load async abort 1",
    ),
    mutant(
        "leases of a lost connection end before their copies",
        _LOADER + "_lose",
        "keep = keep or not self._await(marks)",
        scenario="connection lost",
        way="registered",
        situation="load async lost 1",
    ),
    mutant(
        "leases do not protect from those who need room",
        "agent.residents:Residents._is_free",
        "not self._by_key[key].leases",
        "True",
        situation="load async finish 1",
        world="kept",
    ),
    mutant(
        "an arena is unmapped while it is registered",
        _LOADER + "_leave",
        "self._on_device.detach(agent.close)",
        "agent.close()",
        scenario="connection lost",
        way="registered",
        situation="load async shutdown 2",
        world="registering",
    ),
    mutant(
        "an arena is unmapped before it is unlocked",
        _WINDOWS + "close",
        "if self._thread is not None:",
        "if False:",
        scenario="connection lost",
        way="registered",
    ),
    mutant(
        "an arena stays registered",
        _WINDOWS + "_work",
        "for undo in self._undo.values():",
        "for undo in ():",
        scenario="connection lost",
        way="registered",
        situation="load async shutdown 2",
        world="registering",
    ),
    mutant(
        "windows are read before they are registered",
        _WINDOWS + "has",
        "number in self._undo",
        "number in self._known",
        scenario="memory reused, whole blocks",
        way="refused",
        situation="load async finish 1",
        world="registering",
    ),
    mutant(
        "frames across a window that is not registered are read in place",
        _WINDOWS + "has",
        "if all(",
        "if any(",
        scenario="memory reused, whole blocks",
        way="registering",
    ),
    mutant(
        "frames are read in place where the device refuses",
        "transfer.registration:DeviceFrames.take",
        "if windows.has(start, len(memory)):",
        "if True:",
        scenario="memory reused, whole blocks",
        way="refused",
    ),
    mutant(
        "payloads that wait for a slab count as copied",
        _LOADER + "_read",
        "one.is_stalled = True",
        "self._done(agent, one)",
        scenario="memory reused",
        way="refused",
    ),
    mutant(
        "threads of the core go on after the end",
        _INSIDE + "close",
        "ended = self.core.close(seconds)",
        "ended = True",
        situation="load async shutdown 1",
    ),
    mutant(
        "the arena stays at the end",
        _INSIDE + "_unmap",
        "self.arena.close()",
        situation="load async shutdown 1",
    ),
    mutant(
        "connections stay open at the end",
        _LOADER + "_lose",
        "self._leave(agent)",
        situation="load async shutdown 1",
    ),
    # Slabs
    mutant(
        "slabs of loads are returned before their copies",
        _READING + "_write",
        "slab.release_after(mark)",
        "slab.release()",
        scenario="memory reused",
        way="refused",
        situation="load async finish 1",
        world="refused",
    ),
    mutant(
        "slabs are reclaimed before their copies",
        _SLABS + "_reclaim",
        "{key for key, mark in marks.items() if _is_done(mark)}",
        "set(marks)",
        scenario="slabs of loads",
    ),
    mutant(
        "slabs are taken back before their copies",
        _SLABS + "take_back",
        "if mark is None or _is_done(mark):",
        "if True:",
        scenario="slabs of loads",
        situation="load async finish 1",
        world="refused",
    ),
    # Saves
    mutant(
        "saves do not follow the forward pass",
        _SAVER + "_submit",
        "self._lane.follow(self._lane.mark_compute())",
        scenario="forward, then save",
        situation="save finish 0",
        world="hurried",
    ),
    mutant(
        "chunks are stored before their copies",
        _SAVER + "_hand_over",
        "while not gathered.mark.done():",
        "while False:",
        scenario="save, then store",
        situation="save finish 0",
    ),
    mutant(
        "slabs of late saves are free before their copies",
        _SAVER + "_give_up_gathered",
        "self._give_up(gathered.chunks, gathered.mark)",
        "self._give_up(gathered.chunks)",
        scenario="save past its deadline",
        situation="save finish 0",
        world="short of time",
    ),
    mutant(
        "slabs of failed gathers are free before their copies",
        _SAVER + "_gather",
        "self._give_up(failed, mark)",
        "self._give_up(failed)",
        scenario="slabs of failed saves",
    ),
    mutant(
        "slabs of saves after closing are free before their copies",
        _SAVER + "_gather",
        "self._give_up(ready, mark)",
        "self._give_up(ready)",
        scenario="slabs of closed saves",
    ),
    mutant(
        "slabs of dropped saves are kept",
        _SAVER + "_give_up",
        "c.slab.release()",
        situation="save sleep 0",
        world="hurried",
    ),
    mutant(
        "the fence does not hold computing",
        _SAVER + "fence",
        "last.hold_compute()",
        scenario="save preempted",
        situation="save preempt 0",
    ),
    mutant(
        "the fence waits for the first request only",
        _SAVER + "fence",
        "max(marks,",
        "min(marks,",
        scenario="saves of several steps preempted",
    ),
    mutant(
        "the fence for all requests waits for none",
        _SAVER + "fence",
        "list(self._open)",
        "[]",
        scenario="save, then window",
        situation="save preempt 0",
        world="early",
    ),
    mutant(
        "the oldest mark counts as done",
        _SAVER + "_is_copying",
        "mark.number >= self._open[0].number",
        "mark.number > self._open[0].number",
        scenario="save preempted",
    ),
    mutant(
        "saves are reported before their copies",
        _SAVER + "left_device",
        "return False",
        scenario="save finished",
        situation="save finish 0",
    ),
    mutant(
        "copies of saves are forgotten",
        _SAVER + "_poll",
        "while self._open and self._open[0].done():",
        "while self._open:",
        situation="save finish 0",
    ),
    mutant(
        "closing does not wait for copies of saves",
        _SAVER + "close",
        "if not self._copies_end(end + _COPIES_S):",
        "if True:",
        scenario="closed during a save",
    ),
    mutant(
        "preempted requests are not fenced",
        _WORKER + "before_reuse",
        "self._fence(plan.reused)",
        scenario="save preempted",
        situation="save preempt 0",
    ),
    mutant(
        "blocks that leave a window are not fenced",
        _WORKER + "before_reuse",
        "self._fence()",
        scenario="save, then window",
    ),
    mutant(
        "blocks that are zeroed early are not fenced",
        _WORKER + "end_forward",
        "self._fence()",
        scenario="save, then zero",
        situation="save preempt 0",
        world="early",
    ),
    mutant(
        "saves never end",
        _CACHE + "end_save",
        "self._saves.end(key.path())",
        situation="save finish 0",
    ),
    mutant(
        "leases of saves are kept",
        _CACHE + "release_lease",
        "self._index.release(key.path(), self._settings.writer)",
        situation="save finish 0",
    ),
    # Start, and encoder outputs
    mutant(
        "the self-test does not wait for its copies",
        "transfer.paging:_check",
        "lane.mark().wait()",
        scenario="self-test at start",
    ),
    mutant(
        "outputs are saved while they are computed",
        _COPIES + "to_host",
        "computed.wait(self._stream)",
        scenario="encoder outputs saved",
    ),
    mutant(
        "outputs are stored before their copies",
        _COPIES + "to_host",
        "while not copied.query():",
        "while False:",
        scenario="encoder outputs saved",
    ),
    mutant(
        "the mark of an output is recorded on the copying stream",
        _COPIES + "mark",
        "self._api.current_stream(self._device)",
        "self._stream",
        scenario="encoder outputs saved",
    ),
    mutant(
        "memory of added outputs is reused before its copy",
        _COPIES + "to_device",
        "self._staged(pages.nbytes)",
        "vars(self).setdefault('kept', self._staged(pages.nbytes))",
        scenario="encoder outputs added",
    ),
)


def play(scenario: Scenario, way: str, seed: int) -> str:
    """Run a scenario on the simulated device, whose streams are slow at random. Returns why it
    failed, or "" if all bytes were right."""
    device = torch.device("sim:0")
    simulated.reset()
    simulated.seed(seed)
    simulated.slow(device, 0, DELAY_US_MAX)
    simulated.DRIVER.use_batch_copy(scenario.setup.layout.contiguous)
    rig = None if way == OWN else agent_rig(way)
    (verdict,) = run_scenarios(device, scenarios=(scenario,), delay=delay, seed=seed, rig=rig)
    fault = simulated.take_error()
    simulated.reset()
    if fault:
        return f"the device reports: {fault}"
    return "" if verdict.is_right else verdict.fault or "wrong bytes"


def delay(stream: torch.Stream, seconds: float) -> None:
    """Keep a stream of the simulated device busy."""
    with torch.get_device_module("sim").stream(stream):
        simulated.sleep(round(seconds * 1e6))


def rounds_to_find(mutant: Mutant) -> int:
    """Return in which round its scenario finds a mutant, 0 if it never does."""
    scenario = BY_NAME[mutant.scenario]
    setup = replace(scenario.setup, patience_s=PATIENCE_S, attempts_s=(ATTEMPT_S,))
    with mutant.applied():
        for number in range(ROUNDS):
            if play(replace(scenario, setup=setup), mutant.way, number):
                return number + 1
    return 0


def main() -> int:
    """Print a line for each mutant. Returns the number of those that their scenario missed."""
    simulated.load()
    logging.disable(logging.CRITICAL)
    print("| without this edge | scenario | way | rounds |\n| --- | --- | --- | --: |")
    missed = 0
    for one in MUTANTS:
        if one.scenario:
            rounds = rounds_to_find(one)
            missed += not rounds
            print(f"| {one.name} | {one.scenario} | {one.way} | {rounds} |", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
