"""Takes one ordering edge away from the transfer code, and says which scenario notices.

``python -m tests.device.mutants`` runs every scenario against every mutant on the simulated device,
and prints the table as Markdown.
"""

import importlib
import inspect
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from objkv.connector.programs.gpu_order import SCENARIOS, Verdict, run_scenarios
from objkv.connector.programs.ordering.rig import Scenario

PATIENCE_S = 4.0
"""For mutants that make something wait for ever."""
ROUNDS = 3
"""How often a scenario is tried against a mutant: whether a race shows is a matter of chance."""


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
        exec(compile(edited, f"<mutant of {self.place}>", "exec"), vars(module), scope)  # noqa: S102
        with patch.object(owner, name, scope[name]):
            yield


@dataclass(frozen=True)
class Mutant:
    """The transfer code without one ordering edge."""

    name: str
    """The edge that is missing."""
    found_by: str
    """The scenario that finds it, of those that do."""
    edits: Sequence[Edit]

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            for edit in self.edits:
                stack.enter_context(edit.applied())
            yield


def edit(place: str, old: str, new: str = "pass") -> Edit:
    return Edit(place, old, new)


_LANE = "transfer.devices:DeviceLane."
_ON_STREAM = "with self._lock, self._api.stream(self.stream):"
_MARK = "transfer.devices:DeviceMark."
_FETCH = "transfer.fetch:Decoder."
_JOB = "transfer.job:LoadJob."
_LOADER = "transfer.loader:Loader."
_COPIES = "connector.encoder.copies:DeviceCopies."

MUTANTS = [
    # Lanes.
    Mutant(
        "a lane does not follow marks", "", [edit(_LANE + "follow", "mark.event.wait(self.stream)")]
    ),
    Mutant(
        "a lane follows its first mark only",
        "",
        [edit(_LANE + "follow", "mark is not self._followed", "self._followed is None")],
    ),
    Mutant(
        "the mark of computing is on the lane",
        "",
        [edit(_LANE + "mark_compute", "self.compute", "self.stream")],
    ),
    Mutant(
        "the mark of a lane is on the compute stream",
        "",
        [edit(_LANE + "mark", "self.stream", "self.compute")],
    ),
    Mutant("marks are not recorded", "", [edit(_LANE + "_recorded", "event.record(stream)")]),
    Mutant("marks are always done", "", [edit(_MARK + "done", "bool(self.event.query())", "True")]),
    Mutant(
        "marks hold nothing",
        "",
        [edit(_MARK + "hold_compute", "self.event.wait(self._lane.compute)")],
    ),
    Mutant(
        "marks hold the thread's device",
        "",
        [edit(_MARK + "hold_compute", "self._lane.compute", "self._lane._api.current_stream()")],
    ),
    Mutant(
        "scatter on the compute stream",
        "",
        [edit(_LANE + "scatter", _ON_STREAM, "with self._lock:")],
    ),
    Mutant(
        "gather on the compute stream", "", [edit(_LANE + "gather", _ON_STREAM, "with self._lock:")]
    ),
    Mutant(
        "threads on a lane are not kept apart",
        "",
        [edit(_LANE + "scatter", _ON_STREAM, "with self._api.stream(self.stream):")],
    ),
    Mutant(
        "lanes share staging memory",
        "",
        [edit(_LANE + "_staged", "self._staging", "DeviceLane._staging")],
    ),
    Mutant(
        "block ids from pageable memory",
        "",
        [edit("transfer.devices:DeviceBlocks.upload", "pin_memory=True", "pin_memory=False")],
    ),
    Mutant(
        "copies to the device block",
        "",
        [edit(_LANE + "_distribute", "non_blocking=True", "non_blocking=False")],
    ),
    Mutant(
        "copies to the host block",
        "",
        [edit(_LANE + "_collect", "non_blocking=True", "non_blocking=False")],
    ),
    # Loads.
    Mutant(
        "copies do not follow the step's mark",
        "",
        [edit(_FETCH + "_write", "lane.follow(job.after)")],
    ),
    Mutant(
        "loads follow the forward pass",
        "",
        [
            edit(
                _LOADER + "submit",
                "after = after or self.mark_compute()",
                "after = self.mark_compute()",
            )
        ],
    ),
    Mutant(
        "slabs of loads are reused at once",
        "",
        [edit(_FETCH + "__exit__", "slab.release_after(self._mark)", "slab.release()")],
    ),
    Mutant("a layer holds nothing", "", [edit(_LOADER + "wait_layer", "mark.hold_compute()")]),
    Mutant("the end of a step holds nothing", "", [edit(_JOB + "close", "mark.hold_compute()")]),
    Mutant(
        "loads are reported before their copies", "", [edit(_JOB + "poll", "if mark.done()]", "]")]
    ),
    Mutant(
        "loads are reported while they write",
        "",
        [edit(_JOB + "poll", "if self._writing:", "if False:")],
    ),
    Mutant(
        "closing does not wait for copies of loads",
        "",
        [edit(_JOB + "close", "while not mark.done():", "while False:")],
    ),
    Mutant(
        "the last thread's mark counts",
        "",
        [edit("transfer.job:_add", "if known is None or mark.number >= known.number:", "if True:")],
    ),
    # Start, encoder outputs.
    Mutant(
        "the self-test does not wait", "", [edit("transfer.paging:_check", "lane.mark().wait()")]
    ),
    Mutant(
        "encoder outputs are read early",
        "",
        [edit(_COPIES + "to_host", "computed.wait(self._stream)")],
    ),
    Mutant(
        "encoder outputs are stored early",
        "",
        [edit(_COPIES + "to_host", "while not copied.query():", "while False:")],
    ),
    Mutant(
        "memory of encoder outputs is reused",
        "",
        [
            edit(
                _COPIES + "to_device",
                "self._staged(pages.nbytes)",
                "vars(self).setdefault('kept', self._staged(pages.nbytes))",
            )
        ],
    ),
    Mutant(
        "the encoder's mark is on the copying stream",
        "",
        [edit(_COPIES + "mark", "self._api.current_stream(self._device)", "self._stream")],
    ),
    # Saves.
    Mutant(
        "saves do not follow the forward pass",
        "",
        [edit("transfer.saver:Saver.gather", "self._lane.follow(self._lane.mark_compute())")],
    ),
    Mutant(
        "the fence holds nothing",
        "",
        [edit("transfer.saver:Saver.fence", "self._last_mark.hold_compute()")],
    ),
]
