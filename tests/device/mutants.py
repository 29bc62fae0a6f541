"""Takes one ordering edge away from the transfer code, and says which scenario notices.

``python -m tests.device.mutants`` runs every scenario against every mutant on the simulated device,
and prints the table as Markdown.
"""

import importlib
import inspect
import logging
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch

from tests.device import simulated
from tests.device.gpu_order import SCENARIOS, run_scenarios
from tests.device.ordering.rig import Scenario
from tests.device.ordering.setup import Setup

PATIENCE_S = 4.0
"""For mutants that make something wait for ever."""
ROUNDS = 12
"""How often a scenario is tried against a mutant: whether a race shows is a matter of chance."""
ATTEMPT_S = 0.3
"""How long the device is busy where something must not wait for it."""
DELAY_US_MAX = 500
"""The longest random delay of an operation on a stream."""
SHOWN_MAX = 4
"""Scenarios in a row of the table."""


@dataclass(frozen=True)
class Edit:
    """Replaces text in the source of a function."""

    place: str
    """``module:function`` or ``module:Class.function``, in ``objkv``."""
    old: str
    new: str

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
    """The transfer code without one ordering edge."""

    name: str
    """The edge that is missing."""
    found_by: str
    """The scenario that finds it, of those that do."""
    edit: Edit


def mutant(name: str, found_by: str, place: str, old: str, new: str = "pass") -> Mutant:
    """A mutant with one edit, which by default removes the statement ``old``."""
    return Mutant(name, found_by, Edit(place, old, new))


_LANE = "transfer.devices:DeviceLane."
_ON_STREAM = "with self._lock, self._api.stream(self.stream):"
_MARK = "transfer.devices:DeviceMark."
_WRITER = "transfer.loading.job:BlockWriter."
_JOB = "transfer.loading.job:LoadJob."
_LOADS = "transfer.loading.loads:Loads."
_LOADER = "transfer.loading.loader:Loader."
_SLABS = "transfer.slabs:SlabPool."
_SAVER = "transfer.saver:Saver."
_WORKER = "connector.kv.worker:WorkerSide."
_COPIES = "connector.encoder.copies:DeviceCopies."

MUTANTS = (
    # Lanes and their marks
    mutant(
        "a lane does not follow marks",
        "load after a kernel",
        _LANE + "follow",
        "mark.event.wait(self.stream)",
    ),
    mutant(
        "a lane follows only its first mark",
        "loads of two steps",
        _LANE + "follow",
        "mark is not self._followed",
        "self._followed is None",
    ),
    mutant(
        "the mark of computing is recorded on the lane",
        "load after a kernel",
        _LANE + "mark_compute",
        "self.compute",
        "self.stream",
    ),
    mutant(
        "the mark of a lane is recorded on the compute stream",
        "load, then forward",
        _LANE + "mark",
        "self.stream",
        "self.compute",
    ),
    mutant(
        "marks are not recorded", "load, then forward", _LANE + "_recorded", "event.record(stream)"
    ),
    mutant(
        "marks are always done",
        "save finished",
        _MARK + "done",
        "bool(self.event.query())",
        "True",
    ),
    mutant(
        "marks hold nothing",
        "layer by layer",
        _MARK + "hold_compute",
        "self.event.wait(self._lane.compute)",
    ),
    mutant(
        "marks hold the thread's device instead of the lane's",
        "save on another device",
        _MARK + "hold_compute",
        "self._lane.compute",
        "self._lane._api.current_stream()",
    ),
    mutant(
        "loads scatter on the thread's stream",
        "slabs of loads",
        _LANE + "scatter",
        _ON_STREAM,
        "with self._lock:",
    ),
    mutant(
        "saves gather on the thread's stream",
        "save among kernels",
        _LANE + "gather",
        _ON_STREAM,
        "with self._lock:",
    ),
    mutant(
        "block ids are uploaded from pageable memory",
        "busy everywhere",
        "transfer.devices:DeviceBlocks.upload",
        "upload_ids(self.ids, self._device)",
        "torch.tensor(self.ids, device=self._device)",
    ),
    mutant(
        "copies to the device block the thread",
        "fetching during device work",
        _LANE + "_distribute",
        "non_blocking=True",
        "non_blocking=False",
    ),
    mutant(
        "copies to the host block the thread",
        "busy everywhere",
        _LANE + "_collect",
        "non_blocking=True",
        "non_blocking=False",
    ),
    mutant(
        "a batch reads blocks out of stream order",
        "forward, then save, whole blocks",
        _LANE + "_copy_blocks",
        "device, host, size, False",
        "device, host, size, True",
    ),
    # Loads
    mutant(
        "copies do not follow the mark of their step",
        "load after a kernel",
        _WRITER + "write",
        "lane.follow(job.after)",
    ),
    mutant(
        "nothing is zeroed",
        "load that zeroes blocks",
        _WORKER + "_clear",
        "group.clear(blank.block_ids)",
    ),
    mutant(
        "the worker marks no step",
        "load during its forward pass",
        _WORKER + "before_forward",
        "self._loader.mark_compute()",
        "None",
    ),
    mutant(
        "loads follow the forward pass",
        "load during its forward pass",
        _LOADS + "submit",
        "after = after or self.mark_compute()",
        "after = self.mark_compute()",
    ),
    mutant(
        "leases of loads end before their copies",
        "memory of loads",
        _LOADER + "_advance",
        "if one.is_copied and _is_past(one.writer.mark):",
        "if one.is_copied:",
    ),
    mutant(
        "slabs of loads are free before their copies",
        "slabs of loads",
        "transfer.loading.loader:_Reading._write",
        "slab.release_after(mark)",
        "slab.release()",
    ),
    mutant(
        "no layer holds computing",
        "layer by layer",
        _LOADS + "wait_layer",
        "mark.hold_compute()",
    ),
    mutant(
        "the end of a step does not hold computing",
        "layer by layer, then the next step",
        _JOB + "close",
        "mark.hold_compute()",
    ),
    mutant(
        "results are reported before the step's loads are settled",
        "layer by layer, speculating",
        _WORKER + "results",
        "self._settle_step(plan)",
    ),
    mutant(
        "loads are reported before their copies",
        "load, then forward",
        _JOB + "poll",
        "if mark.done()]",
        "]",
    ),
    mutant(
        "loads are reported while a thread queues copies",
        "load aborted while queued",
        _JOB + "poll",
        "if self._writing:",
        "if False:",
    ),
    # Slabs
    mutant(
        "slabs are reclaimed before their copies",
        "slabs of loads",
        _SLABS + "_reclaim",
        "{key for key, mark in marks.items() if _is_done(mark)}",
        "set(marks)",
    ),
    mutant(
        "slabs are taken back before their copies",
        "slabs of loads",
        _SLABS + "take_back",
        "if mark is None or _is_done(mark):",
        "if True:",
    ),
    # Saves
    mutant(
        "saves do not follow the forward pass",
        "forward, then save",
        _SAVER + "_submit",
        "self._lane.follow(self._lane.mark_compute())",
    ),
    mutant(
        "chunks are stored before their copies",
        "save, then store",
        _SAVER + "_hand_over",
        "while not gathered.mark.done():",
        "while False:",
    ),
    mutant(
        "slabs of late saves are free before their copies",
        "save past its deadline",
        _SAVER + "_give_up_gathered",
        "self._give_up(gathered.chunks, gathered.mark)",
        "self._give_up(gathered.chunks)",
    ),
    mutant(
        "slabs of failed gathers are free before their copies",
        "slabs of failed saves",
        _SAVER + "_gather",
        "self._give_up(failed, mark)",
        "self._give_up(failed)",
    ),
    mutant(
        "slabs of saves after closing are free before their copies",
        "slabs of closed saves",
        _SAVER + "_gather",
        "self._give_up(ready, mark)",
        "self._give_up(ready)",
    ),
    mutant(
        "the fence does not hold computing",
        "save preempted",
        _SAVER + "fence",
        "last.hold_compute()",
    ),
    mutant(
        "the fence waits for the first request only",
        "saves of several steps preempted",
        _SAVER + "fence",
        "max(marks,",
        "min(marks,",
    ),
    mutant(
        "the fence for all requests waits for none",
        "save, then window",
        _SAVER + "fence",
        "list(self._open)",
        "[]",
    ),
    mutant(
        "the oldest mark counts as done",
        "save preempted",
        _SAVER + "_is_copying",
        "mark.number >= self._open[0].number",
        "mark.number > self._open[0].number",
    ),
    mutant(
        "saves are reported before their copies",
        "save finished",
        _SAVER + "left_device",
        "return False",
    ),
    mutant(
        "closing does not wait for copies of saves",
        "closed during a save",
        _SAVER + "close",
        "if not self._copies_end(end + _COPIES_S):",
        "if True:",
    ),
    mutant(
        "preempted requests are not fenced",
        "save preempted",
        _WORKER + "before_reuse",
        "self._fence(plan.reused)",
    ),
    mutant(
        "blocks that leave a window are not fenced",
        "save, then window",
        _WORKER + "before_reuse",
        "self._fence()",
    ),
    mutant(
        "blocks that are zeroed early are not fenced",
        "save, then zero",
        _WORKER + "end_forward",
        "self._fence()",
    ),
    # Start, and encoder outputs
    mutant(
        "the self-test does not wait for its copies",
        "self-test at start",
        "transfer.paging:_check",
        "lane.mark().wait()",
    ),
    mutant(
        "outputs are saved while they are computed",
        "encoder outputs saved",
        _COPIES + "to_host",
        "computed.wait(self._stream)",
    ),
    mutant(
        "outputs are stored before their copies",
        "encoder outputs saved",
        _COPIES + "to_host",
        "while not copied.query():",
        "while False:",
    ),
    mutant(
        "the mark of an output is recorded on the copying stream",
        "encoder outputs saved",
        _COPIES + "mark",
        "self._api.current_stream(self._device)",
        "self._stream",
    ),
    mutant(
        "memory of added outputs is reused before its copy",
        "encoder outputs added",
        _COPIES + "to_device",
        "self._staged(pages.nbytes)",
        "vars(self).setdefault('kept', self._staged(pages.nbytes))",
    ),
)


def play(device: torch.device, scenario: Scenario, seed: int, setup: Setup | None = None) -> str:
    """Run a scenario on the simulated device, whose streams are slow at random. Returns why it
    failed, or "" if all bytes were right."""
    setup = setup or scenario.setup
    simulated.reset()
    simulated.seed(seed)
    simulated.slow(device, 0, DELAY_US_MAX)
    simulated.DRIVER.use_batch_copy(setup.layout.contiguous)
    scenario = replace(scenario, setup=setup)
    (verdict,) = run_scenarios(device, scenarios=(scenario,), delay=delay, seed=seed)
    fault = simulated.take_error()
    simulated.reset()
    if fault:
        return f"the device reports: {fault}"
    return "" if verdict.is_right else verdict.fault or "wrong bytes"


def delay(stream: torch.Stream, seconds: float) -> None:
    """Keep a stream of the simulated device busy."""
    with torch.get_device_module("sim").stream(stream):
        simulated.sleep(round(seconds * 1e6))


def finds(scenario: Scenario, mutant: Mutant, rounds: int = ROUNDS) -> str:
    """Run a scenario against a mutant. Returns how it failed, or "" if it never did."""
    setup = replace(scenario.setup, patience_s=PATIENCE_S, attempts_s=(ATTEMPT_S,))
    device = torch.device("sim:0")
    with mutant.edit.applied():
        for seed in range(rounds):
            if found := play(device, scenario, seed, setup):
                return found
    return ""


def main() -> int:
    """Run every scenario against every mutant. Returns the number of mutants that none found."""
    simulated.load()
    logging.disable(logging.CRITICAL)
    print("| without this edge | found by |\n| --- | --- |")
    missed = 0
    for one in MUTANTS:
        names = [scenario.name for scenario in SCENARIOS if finds(scenario, one, rounds=1)]
        if not names:
            names = [scenario.name for scenario in SCENARIOS if finds(scenario, one)]
        missed += not names
        more = f" and {len(names) - SHOWN_MAX} more" if len(names) > SHOWN_MAX else ""
        print(f"| {one.name} | {'; '.join(names[:SHOWN_MAX])}{more} |", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
