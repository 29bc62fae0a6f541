"""The report of ``gpu-check``, and the page that one attaches to an issue."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from objkv.ops.bench.harness import BenchRow, Machine

Facts = dict[str, str]
"""Lines about a device, by name."""
Outcome = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class GpuCase:
    """One thing that was tested."""

    name: str
    ok: bool | None
    """Null if it cannot be tested here."""
    detail: str = ""
    """The test, its fault, or the reason for skipping it."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class GpuStage:
    """The result of one stage."""

    name: str
    outcome: Outcome
    seconds: float
    cases: tuple[GpuCase, ...] = ()
    figures: tuple[BenchRow, ...] = ()
    note: str = ""
    """Why it failed or was skipped: for a program that failed, the end of its log."""

    @property
    def summary(self) -> str:
        """One line."""
        parts = []
        if tested := [case.ok for case in self.cases if case.ok is not None]:
            parts.append(f"{sum(tested)} of {len(tested)} cases passed")
        if judged := [row for row in self.figures if row.ok is not None]:
            parts.append(
                f"{sum(row.ok is True for row in judged)} of {len(judged)} targets reached"
            )
        elif self.figures:
            parts.append(f"{len(self.figures)} figures")
        if self.note:
            parts.append(self.note.splitlines()[0])
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class GpuReport:
    """The result of one run."""

    objkv: str
    device: str
    simulated: bool
    """Whether the device was simulated: then figures are those of its time model."""
    quick: bool
    """Whether sizes were small: then the figures show only that it works."""
    facts: Facts
    """Driver, versions, link and copy speeds."""
    machine: Machine
    stages: tuple[GpuStage, ...]
    began: str
    """Date and time in UTC, ISO 8601."""
    model: str
    """The replicas' model."""
    finished: bool
    """Whether this is the whole report. It is written after each stage."""

    @property
    def passed(self) -> bool:
        """Whether the run is finished and no stage failed. Some may have been skipped."""
        return self.finished and all(stage.outcome != "failed" for stage in self.stages)

    @property
    def verdict(self) -> str:
        """A few words."""
        if any(stage.outcome == "failed" for stage in self.stages):
            return "failed"
        if not self.finished:
            return "not finished"
        skipped = sum(stage.outcome == "skipped" for stage in self.stages)
        return f"passed, {skipped} of {len(self.stages)} stages skipped" if skipped else "passed"


def page(report: GpuReport) -> str:
    """Return the report as one Markdown page."""
    return "\n".join(_page(report)) + "\n"


def _page(report: GpuReport) -> Iterator[str]:
    yield f"# objkv gpu-check: {report.verdict}"
    yield ""
    yield f"objkv {report.objkv} on {report.device}."
    if report.simulated:
        yield ""
        yield "**The device is simulated.** Its figures are those of a time model, not of a GPU."
        yield "The replicas' are those of this machine's CPU."
    if report.quick:
        yield ""
        yield "Sizes were small: the figures show only that it works."
    yield ""
    machine = report.machine
    memory = "" if machine.memory_bytes is None else f", {machine.memory_bytes >> 30} GiB"
    facts = {
        **report.facts,
        "Host": f"{machine.cores} cores of {machine.cpu}{memory}, load {machine.load}",
        "System": f"{machine.system}, Python {machine.python}",
        "Model of the replicas": report.model,
        "Began": report.began,
    }
    yield from _table(("", ""), facts.items())
    yield ""
    rows = [(s.name, s.outcome, f"{s.seconds:.0f} s", s.summary) for s in report.stages]
    yield from _table(("Stage", "Result", "Time", ""), rows)
    for stage in report.stages:
        if stage.outcome != "skipped":
            yield from _stage(stage)


def _stage(stage: GpuStage) -> Iterator[str]:
    if not (stage.cases or stage.figures or stage.note):
        return
    yield ""
    yield f"## {stage.name}"
    if stage.figures:
        yield ""
        yield from _table(
            ("", "objkv", "limit", "", "ratio", "target", "limit is"),
            map(_figure, stage.figures),
        )
    passed = [case for case in stage.cases if case.ok]
    if others := [case for case in stage.cases if not case.ok]:
        yield ""
        words: dict[bool | None, str] = {False: "**failed**", None: "skipped"}
        rows = [(case.name, words[case.ok], case.detail) for case in others]
        yield from _table(("Case", "Result", ""), rows)
    if passed:
        yield ""
        yield f"<details><summary>{len(passed)} cases passed</summary>"
        yield ""
        yield from _table(("Case", ""), [(case.name, case.detail) for case in passed])
        yield ""
        yield "</details>"
    if stage.note:
        yield ""
        yield from ("```", *stage.note.splitlines(), "```")


def _figure(row: BenchRow) -> tuple[str, ...]:
    target = ""
    if row.target is not None:
        sign = "≤" if row.target.at_most else "≥"
        target = f"{sign} {row.target.bound:g}{' ✓' if row.ok else ' **missed**'}"
    limit = "" if row.limit is None else f"{row.limit:.4g}"
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    return row.name, f"{row.ours:.4g}", limit, row.unit, ratio, target, row.limit_name


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        cells = (cell.replace("|", "\\|").replace("\n", " ") for cell in row)
        yield f"| {' | '.join(cells)} |"
