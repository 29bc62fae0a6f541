"""``gpu-check``: everything that only a device can show, in one run and one report.

Each stage is a child process. A stage that fails does not stop the others.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Final

from objkv.errors import ConfigError, ObjkvError
from objkv.ops.bench.gpu import SIMULATED, bench_gpu, bench_simulated
from objkv.ops.bench.harness import BenchSetting
from objkv.ops.demo import DemoReport
from objkv.ops.programs import Program, ProgramFailed

_BOUND_S = 900.0
_PROGRAMS: Final = "objkv.connector.programs."


@dataclass(frozen=True, slots=True)
class CheckedStage:
    """The result of one stage."""

    name: str
    passed: bool
    seconds: float
    lines: tuple[str, ...]
    """Results in one line each, for people."""
    fault: str = ""
    """The error that ended the stage, or empty."""


@dataclass(frozen=True, slots=True)
class GpuReport:
    """The result of one run."""

    simulated: bool
    """Whether the device was the simulated one, whose times mean nothing for a GPU."""
    facts: Mapping[str, Any]
    """Device, driver and versions."""
    stages: tuple[CheckedStage, ...]

    @property
    def passed(self) -> bool:
        """Whether every stage passed."""
        return all(stage.passed for stage in self.stages)


@dataclass(slots=True)
class GpuChecks:
    """Runs the stages one after another. For one run."""

    setting: BenchSetting
    simulated: bool
    replicas: Callable[[], DemoReport]
    """Runs two replicas that share a prefix. Raises ``ProgramFailed``."""
    facts: dict[str, Any] = field(default_factory=dict)

    def run(self) -> GpuReport:
        """Run all stages. Raises ``ConfigError`` if there is no device."""
        stages = [
            self._stage("self-test of lanes and layouts", self._layouts),
            self._stage("order of operations", self._order),
            self._stage("speed", self._speed),
            self._stage("two replicas share a prefix", self._share),
        ]
        return GpuReport(self.simulated, self.facts, tuple(stages))

    def _stage(self, name: str, run: Callable[[], tuple[bool, Sequence[str]]]) -> CheckedStage:
        self.setting.tell(name, "running")
        started = monotonic()
        passed, fault = False, ""
        lines: Sequence[str] = ()
        try:
            passed, lines = run()
        except ConfigError:
            raise
        except ProgramFailed as exc:
            lines, fault = exc.tail().splitlines(), exc.what
        except ObjkvError as exc:
            fault = str(exc)
        return CheckedStage(name, passed, monotonic() - started, tuple(lines), fault)

    def _layouts(self) -> tuple[bool, Sequence[str]]:
        found = list(self._said("gpu_check"))
        if not found:
            raise ConfigError(
                "no GPU here: run this on a machine with one, or try --simulated in a clone of "
                "the project"
            )
        self.facts |= found[0]["facts"]
        faults = [f"{one['check']}: {one['fault']}" for one in found[1:] if one["fault"]]
        return not faults, faults or [f"{len(found) - 1} combinations returned the right bytes"]

    def _order(self) -> tuple[bool, Sequence[str]]:
        found = list(self._said("gpu_order"))
        faults = [
            f"{one['name']} ({one['description']}): {one['fault'] or 'wrong bytes'}"
            for one in found
            if not one["is_right"]
        ]
        right = [f"{len(found)} scenarios returned the right bytes"]
        return bool(found) and not faults, faults or right

    def _speed(self) -> tuple[bool, Sequence[str]]:
        section = (bench_simulated if self.simulated else bench_gpu)(self.setting)
        lines = []
        for row in section.rows:
            ratio = "" if row.ratio is None else f", {row.ratio:.2f} of {row.limit_name}"
            lines.append(f"{row.name}: {row.ours:.3g} {row.unit}{ratio}")
        missed = [row.name for row in section.rows if row.ok is False and not self.setting.quick]
        return not (missed or section.skipped), [*lines, *(f"missed: {name}" for name in missed)]

    def _share(self) -> tuple[bool, Sequence[str]]:
        report = self.replicas()
        lines = [
            f"{row.prompt}: {row.prompt_tokens} tokens, {row.served_tokens} served, recomputed in "
            f"{row.recompute_s:.3f} s, loaded in {row.second_s:.3f} s, "
            f"{'same answer' if row.identical else 'another answer'}"
            for row in report.rows
        ]
        return report.fine, [f"{report.engine} on {report.device}", *lines]

    def _said(self, program: str) -> Iterator[dict[str, Any]]:
        kind = SIMULATED if self.simulated else "gpu"
        log = self.setting.folder / f"{program}.log"
        arguments = ("-m", _PROGRAMS + program, kind)
        with Program(program, arguments, log, {}) as child:
            for line in child.lines(bound_s=_BOUND_S):
                yield json.loads(line)


def markdown_of(report: GpuReport) -> str:
    """Return the report as one Markdown page."""
    title = "simulated device" if report.simulated else str(report.facts.get("device", "GPU"))
    lines = [f"# objkv gpu-check: {title}", ""]
    if report.simulated:
        lines += ["The device is simulated. Its times say nothing about a GPU.", ""]
    for name, value in report.facts.items():
        shown = value
        if isinstance(value, dict):
            shown = ", ".join(f"{package} {version}" for package, version in value.items())
        if shown not in ("", None):
            lines.append(f"- {name}: {shown}")
    for stage in report.stages:
        verdict = "passed" if stage.passed else "FAILED"
        lines += ["", f"## {stage.name}: {verdict} ({stage.seconds:.0f} s)", ""]
        lines += [f"- {stage.fault}"] if stage.fault else []
        lines += [f"- {line}" for line in stage.lines]
    return "\n".join(lines) + "\n"


def write_report(report: GpuReport, folder: Path, document: Mapping[str, Any]) -> tuple[Path, Path]:
    """Write ``report.json`` and ``report.md`` to ``folder``, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / "report.json", folder / "report.md"
    files[0].write_text(json.dumps(document, indent=2) + "\n")
    files[1].write_text(markdown_of(report))
    return files
