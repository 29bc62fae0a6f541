"""Output of all commands: tables for people, one JSON document for programs."""

import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final

from pydantic_core import to_json, to_jsonable_python
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from objkv.ops.formats import DASH, printable

_HASH: Final = re.compile(r"(?<![0-9A-Za-z])([0-9a-f]{12})[0-9a-f]{20,52}(?![0-9A-Za-z])")
_NAME_MIN: Final = 12
"""Names are cut to this width before a column is left out."""
_WIDTH = 10_000
_MARKS = ">=~"
"""See ``Printer.table``."""
plain = partial(to_jsonable_python, bytes_mode="hex")
"""Converts a value to JSON values: dataclasses to objects, bytes to hex."""
_STYLES = {
    "ok": "green",
    **dict.fromkeys(("warning", "warnings", "not checked"), "yellow"),
    **dict.fromkeys(("full", "failed", "denied", "unreachable", "corrupt", "missing"), "bold red"),
}


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise, so that the command chooses the exit code; rich would exit with 1."""
        raise


class Printer:
    """Writes results to standard output and progress to standard error."""

    def __init__(self, *, machine: bool, wide: bool = False) -> None:
        """``wide``: tables are not fitted to the terminal."""
        self.machine = machine
        """Whether the result is one JSON document and nothing else."""
        self._wide = wide
        self._is_cut = False
        # Wider than any row: a pipe's reader finds whole hashes with grep. Tables for a terminal
        # are fitted to it before they are printed.
        self._console = _Console(width=_WIDTH)
        self._progress = Console(stderr=True)

    def document(self, value: Any) -> bool:
        """Print ``value``, which may contain dataclasses, if the result is a JSON document. Return
        whether it is: otherwise the caller prints text."""
        if self.machine:
            document = to_json(value, indent=2, bytes_mode="hex", inf_nan_mode="constants")
            sys.stdout.write(document.decode() + "\n")
        return self.machine

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print rows. ``>`` before a column's name aligns it right; such columns (numbers) are
        never cut. ``=`` neither aligns nor cuts. ``~`` lets a column wrap between words. A table
        whose columns all lack names has no header. On a terminal, hashes are shortened, names are
        cut, and the last columns are left out if there is no room."""
        is_fitted = not self._wide and sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if is_fitted else None
        table = rich_table(columns, rows, width)
        options = self._console.options.update(width=width or _WIDTH)
        for line in self._console.render_lines(table, options, pad=False):
            whole = Segments([*_trimmed(line), Segment.line()])
            self._console.print(whole, soft_wrap=True, end="")
        if len(table.columns) < len(columns) and not self._is_cut:
            self._is_cut = True
            self.line("cut to fit the terminal: -o wide shows everything", "dim")

    def line(self, text: str = "", style: str = "") -> None:
        """Print one line, with control characters replaced."""
        self._console.print(Text(printable(text), style=style), soft_wrap=True)

    def note(self, text: str) -> None:
        """Print one line on standard error, also with ``--json``."""
        self._progress.print(Text(printable(text), style="yellow"), soft_wrap=True)

    @contextmanager
    def steps(self, what: str) -> Iterator[Callable[[int, int | None], None]]:
        """Yield a function that takes the number of entries done and of all, None if the latter is
        unknown. Shown on a terminal only."""
        console, numbers = self._progress, (MofNCompleteColumn(), TimeElapsedColumn())
        columns = ("{task.description}", BarColumn(), *numbers, TimeRemainingColumn())
        disable = not console.is_terminal
        with Progress(*columns, console=console, transient=True, disable=disable) as progress:
            task = progress.add_task(what, total=None)
            yield lambda done, total: progress.update(
                task, completed=done, total=None if total is None else max(done, total)
            )

    @contextmanager
    def stages(self) -> Iterator[Callable[[str, str], None]]:
        """Yield a function that takes who begins which stage; shown in place on a terminal."""
        with self._progress.status("") as status:

            def report_stage(name: str, stage: str) -> None:
                text = Text(printable(f"{name}: {stage}"))
                if self._progress.is_terminal:
                    status.update(text)
                else:
                    self._progress.print(text, soft_wrap=True)

            yield report_stage

    def waiting(self, what: str) -> AbstractContextManager[object]:
        """Return a context manager that shows a spinner on a terminal."""
        return self._progress.status(what)


def rich_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], width: int | None = None
) -> Table:
    """Return a table of at most ``width`` cells; see ``Printer.table``."""
    cells = [[_cell(value) for value in row] for row in rows]
    places = list(range(len(columns)))
    if width is not None:
        cells = [[_shortened(cell) for cell in row] for row in cells]
        needed = [_needed(name, [row[at] for row in cells]) for at, name in enumerate(columns)]
        while len(places) > 1 and sum(needed[at] + 2 for at in places) - 2 > width:
            places.pop()
    has_names = any(name.lstrip(_MARKS) for name in columns)
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=has_names)
    for at in places:
        name = columns[at]
        is_prose, is_number = name.startswith("~"), name.startswith(">")
        table.add_column(
            name.lstrip(_MARKS),
            justify="right" if is_number else "left",
            no_wrap=name.startswith((">", "=")) or (width is None and not is_prose),
            overflow="fold" if is_prose or width is None else "ellipsis",
        )
    for row in cells:
        table.add_row(*(row[at] for at in places))
    return table


def _needed(name: str, cells: Sequence[Text]) -> int:
    """Return the least width of a column."""
    widest = max([len(name.lstrip(_MARKS)), *(cell.cell_len for cell in cells)])
    return widest if name.startswith((">", "=")) else min(widest, _NAME_MIN)


def _shortened(cell: Text) -> Text:
    """Return the cell with its hashes cut. Only a hash that is a word of its own lacks an ellipsis:
    commands take its beginning, but not that of a path."""

    def cut(found: re.Match[str]) -> str:
        around = cell.plain[: found.start()][-1:] + cell.plain[found.end() :][:1]
        return found[1] + ("…" if around.strip() else "")

    return Text(_HASH.sub(cut, cell.plain), style=cell.style)


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun: ``1 chunk``, ``2,000 chunks``.

    >>> counted(1, "token fills", "tokens fill"), counted(2000, "chunk")
    ('1 token fills', '2,000 chunks')
    """
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


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
        text = DASH
    elif isinstance(value, bool):
        text = "true" if value else "false"
    else:
        text = f"{value:,}" if isinstance(value, int) else str(value)
    return Text(printable(text), style=_STYLES.get(text, ""))
