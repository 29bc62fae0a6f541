"""Output of all commands: tables for people, one JSON document for programs."""

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment, Segments
from rich.text import Text

from objkv.cli.tables import FittedTable
from objkv.ops.formats import printable, span

_WIDTH = 10_000
_STYLES = {
    "ok": "green",
    "warning": "yellow",
    "warnings": "yellow",
    "skipped": "dim",
    "failed": "bold red",
    "denied": "bold red",
    "unreachable": "bold red",
    "corrupt": "bold red",
    "missing": "bold red",
}


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise, so that the command chooses the exit code; rich would exit with 1."""
        raise


class Printer:
    """Writes results to standard output and progress to standard error."""

    def __init__(self, *, machine: bool, color: bool, wide: bool = False) -> None:
        """``wide``: tables are not fitted to the terminal."""
        self.machine = machine
        """Whether the result is one JSON document and nothing else."""
        self.color = color
        """Whether colors are allowed. The terminal decides whether there are any."""
        self._wide = wide
        self._is_cut = False
        # Wider than any row: a pipe's reader finds whole hashes with grep. Tables for a terminal
        # are fitted to it before they are printed.
        self._console = _Console(width=_WIDTH, no_color=True if not color else None)
        self._progress = Console(stderr=True, no_color=True if not color else None)

    def document(self, value: Any) -> None:
        """Print ``value``, which may contain dataclasses, as the JSON document."""
        sys.stdout.write(json.dumps(plain(value), indent=2) + "\n")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print rows. ``>`` before a column's name aligns it right and ``~`` lets it wrap between
        words. A table whose columns all lack names has no header.

        On a terminal, hashes are shortened and the last columns are left out if there is no room.
        """
        cells = [[_cell(value) for value in row] for row in rows]
        fitted = FittedTable(columns, cells)
        if not self._wide and sys.stdout.isatty():
            fitted.fit(shutil.get_terminal_size().columns)
        for line in self._console.render_lines(fitted.table(), pad=False):
            whole = Segments([*_trimmed(line), Segment.line()])
            self._console.print(whole, soft_wrap=True, end="")
        if fitted.is_cut and not self._is_cut:
            self._is_cut = True
            self.line("cut to fit the terminal: -o wide shows everything", "dim")

    def line(self, text: str = "", style: str = "") -> None:
        """Print one line, with control characters replaced."""
        self._console.print(Text(printable(text), style=style), soft_wrap=True)

    def note(self, text: str) -> None:
        """Print one line on standard error, also with ``--json``."""
        self._progress.print(Text(printable(text), style="yellow"), soft_wrap=True)

    @contextmanager
    def counting(self, what: str) -> Iterator[Callable[[int], None]]:
        """Yield a function that takes the number done so far. Shown on a terminal only."""
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        disable = not self._progress.is_terminal
        with Progress(
            *columns, console=self._progress, transient=True, disable=disable
        ) as progress:
            task = progress.add_task(what, total=None)
            yield lambda done: progress.update(task, description=f"{what}: {done:,}")

    @contextmanager
    def steps(self, what: str) -> Iterator[Callable[[int, int | None], None]]:
        """Yield a function that takes the number of entries done and of all, None if the latter is
        unknown. Shown on a terminal only."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        disable = not self._progress.is_terminal
        with Progress(
            *columns, console=self._progress, transient=True, disable=disable
        ) as progress:
            task = progress.add_task(what, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Show a spinner on a terminal within the block."""
        with self.counting(what):
            yield


def plain(value: Any) -> Any:
    """Convert ``value`` to JSON values: dataclasses to objects, bytes to hex."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def size(nbytes: int | None) -> str:
    """``1.5 MiB``; a dash for None."""
    if nbytes is None:
        return "-"
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun: ``1 chunk``, ``2,000 chunks``.

    >>> counted(1, "token fills", "tokens fill"), counted(2000, "chunk")
    ('1 token fills', '2,000 chunks')
    """
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def age(moment_s: int | None, now_s: float | None = None) -> str:
    """Return how long ago, in the largest unit that fits; a dash for None."""
    if moment_s is None:
        return "-"
    return span((time.time() if now_s is None else now_s) - moment_s)


def _trimmed(line: Sequence[Segment]) -> list[Segment]:
    """Remove the spaces at the end, which a narrow terminal would wrap."""
    trimmed = list(line)
    while trimmed and not trimmed[-1].text.strip():
        trimmed.pop()
    if trimmed:
        trimmed[-1] = trimmed[-1]._replace(text=trimmed[-1].text.rstrip())
    return trimmed


def _cell(value: object) -> Text:
    if value is None:
        text = "-"
    elif isinstance(value, bool):
        text = "true" if value else "false"
    else:
        text = f"{value:,}" if isinstance(value, int) else str(value)
    return Text(printable(text), style=_STYLES.get(text, ""))
