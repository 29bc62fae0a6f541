"""``gpu-check``: everything that only a device can show, in one run and one report.

Each stage is one or several child processes. A stage that fails does not stop the others.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Final

from objkv.errors import ConfigError, ObjkvError, pip_install
from objkv.ops.bench.gpu import SIMULATED, measure_device, rows_of
from objkv.ops.bench.harness import BenchRow, Tell, describe_machine
from objkv.ops.gpu_check.replicas import Sharing
from objkv.ops.gpu_check.report import Facts, GpuCase, GpuReport, GpuStage
from objkv.ops.programs import Program, ProgramFailed

_BOUND_S = 600.0
_ROUNDS, _QUICK_ROUNDS = 5, 1
_QUICK_EVERY = 6
"""One of so many scenarios is run with ``--quick``."""
_PROGRAMS: Final = "objkv.connector.programs."
WAYS: Final = ("registered", "registering", "refused")
"""How a device reads the memory of a node agent: in place, in place once the driver has registered
it, or by way of slabs, because the device registers no read-only memory."""
_QUICK_WAYS = WAYS[1:2]


class StageSkipped(ObjkvError):
    """A stage is not for this run."""


class NoDeviceError(ConfigError):
    """There is nothing to check."""


@dataclass(slots=True)
class _Found:
    """The results of a stage so far."""

    cases: list[GpuCase] = field(default_factory=list)
    figures: list[BenchRow] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class GpuChecks:
    """One run."""

    kind: str
    """``gpu``, or ``sim`` for the simulated device."""
    quick: bool
    model: str | None
    """Name or folder of the replicas' model; None for one with random weights."""
    folder: Path
    """For the replicas' store and for logs."""
    models: Path
    """Folder in which random models are created and kept."""
    tell: Tell

    def reports(self) -> Iterator[GpuReport]:
        """Run all stages. Yield the report so far after each of them, and once more at the end.
        Raises ``ConfigError`` if there is no device."""
        if find_spec("torch") is None or find_spec("vllm") is None:
            raise ConfigError(f"gpu-check needs vLLM: {pip_install('vllm')}")
        facts: Facts = {}
        report = GpuReport(
            objkv=metadata.version("objkv"),
            device="an unknown device",
            simulated=self.kind == SIMULATED,
            quick=self.quick,
            facts=facts,
            machine=describe_machine(),
            stages=(),
            began=datetime.now(UTC).isoformat(timespec="seconds"),
            model=self.model or "a Llama with random weights",
            finished=False,
        )
        device = self._stage("Device", lambda found: facts.update(self._facts()))
        if device.outcome == "failed":
            yield replace(report, stages=(device,), finished=True)
            return
        report = replace(report, device=facts["Device"])
        ways = _QUICK_WAYS if self.quick else WAYS
        yield report
        for name, work in (
            ("Self-test of lanes and layouts", self._self_test),
            ("Order of operations", partial(self._ordering, ("own",))),
            ("Order of operations with a node agent", partial(self._ordering, ways)),
            ("Speed", self._speed),
            ("Replicas that share prompts", self._replicas),
        ):
            report = replace(report, stages=(*report.stages, self._stage(name, work)))
            yield report
        yield replace(report, finished=True)

    def _facts(self) -> Facts:
        lines = list(self._lines("gpu_check", "facts"))
        if not lines:
            raise NoDeviceError(
                "PyTorch finds no GPU here: look at nvidia-smi or rocm-smi, and install the "
                "PyTorch for your GPU; without one, run gpu-check --simulated in a clone of objkv"
            )
        found: Facts = json.loads(lines[-1])
        return found

    def _stage(self, name: str, work: Callable[[_Found], None]) -> GpuStage:
        """Run one stage, whatever becomes of it."""
        self.tell(name, "running")
        began, note, is_skipped, found = monotonic(), "", False, _Found()
        try:
            work(found)
            failed = any(case.ok is False for case in found.cases)
        except StageSkipped as exc:
            note, failed, is_skipped = str(exc), False, True
        except ProgramFailed as exc:
            tail = exc.tail()
            about = f"The end of its log:\n{tail}" if tail else "Its log is empty."
            note, failed = f"{exc.what}\n{about}", True
        except NoDeviceError:
            raise
        except (ObjkvError, OSError, ValueError) as exc:
            note, failed = f"{type(exc).__name__}: {exc}", True
        return GpuStage(
            name,
            "skipped" if is_skipped else "failed" if failed else "passed",
            monotonic() - began,
            tuple(found.cases),
            tuple(found.figures),
            note,
        )

    def _self_test(self, found: _Found) -> None:
        for line in self._lines("gpu_check", "self-test"):
            found.cases.append(GpuCase(**json.loads(line)))
        _check_any(found)

    def _ordering(self, ways: Sequence[str], found: _Found) -> None:
        every = str(_QUICK_EVERY if self.quick else 1)
        for way in ways:
            for line in self._lines("gpu_order", every, way):
                verdict = json.loads(line)
                detail = verdict["description"]
                if not verdict["is_right"]:
                    detail += f": {verdict['fault'] or 'wrong bytes'}"
                name = verdict["name"] if len(ways) == 1 else f"{verdict['name']}: {way}"
                found.cases.append(GpuCase(name, verdict["is_right"], detail, verdict["seconds"]))
        _check_any(found)

    def _speed(self, found: _Found) -> None:
        rounds = _QUICK_ROUNDS if self.quick else _ROUNDS
        answer = measure_device(self.kind, self.folder, rounds=rounds, quick=self.quick)
        if answer is not None:
            prefix = "simulated: " if self.kind == SIMULATED else ""
            rows = rows_of(answer, prefix)
            # Small sizes miss targets that they are not meant for.
            found.figures += (replace(row, target=None) for row in rows) if self.quick else rows
        _check_any(found)

    def _replicas(self, found: _Found) -> None:
        if self.quick:
            raise StageSkipped("not with --quick")
        # The simulated device cannot run a model.
        on_cpu = self.kind == SIMULATED
        sharing = Sharing(self.model, self.folder, self.models, self.tell, on_cpu=on_cpu)
        sharing.run(found.cases, found.figures)

    def _lines(self, program: str, *words: str) -> Iterator[str]:
        log = self.folder / f"{'-'.join((program, *words))}.log"
        arguments = ("-m", _PROGRAMS + program, self.kind, *words)
        with Program(program, arguments, log, {}) as child:
            yield from child.lines(bound_s=_BOUND_S)


def _check_any(found: _Found) -> None:
    if not (found.cases or found.figures):
        raise ValueError("the program printed nothing")
