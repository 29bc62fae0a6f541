"""Writes the fault matrix into ``docs/reliability.md``: ``python -m tests.faults.table``."""

from pathlib import Path

from tests.faults.rows import HELD_ROWS, ROWS, VERBS, Cell, Row

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
WRITTEN = "written by `python -m tests.faults.table` -->"
BEGIN, END = f"<!-- matrix: {WRITTEN}", "<!-- end of the matrix -->"
HELD_BEGIN, HELD_END = (f"<!-- {what} put on request: {WRITTEN}" for what in ("table of", "end of"))


def page() -> str:
    """Return the page with the current tables."""
    text = _replaced(PAGE.read_text(), (BEGIN, END), matrix())
    return _replaced(text, (HELD_BEGIN, HELD_END), held())


def _replaced(text: str, marks: tuple[str, str], table: str) -> str:
    before, begin, rest = text.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    return f"{before}{begin}\n{table}{end}{after}"


def matrix() -> str:
    """Return the table: one line for each fault, because both load modes have the same outcomes."""
    lines = ["| fault | what fails | lookup | load | save |", "|---|---|---|---|---|"]
    return "\n".join(lines + [_line(row) for row in ROWS]) + "\n"


def held() -> str:
    """Return the table of faults while a node puts what another one misses."""
    lines = ["| fault | what fails | the request | lookup |", "|---|---|---|---|"]
    for row in HELD_ROWS:
        waits = "waits for its bound" if row.waits else "waits for the refusal"
        waits = waits if row.is_asked else "does not wait"
        lines.append(f"| `{row.name}` | {row.what} | {waits} | {_cell(row.lookup)} |")
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    cells = " | ".join(_cell(row.cell(verb)) for verb in VERBS)
    return f"| `{row.name}` | {row.what} | {cells} |"


def _cell(cell: Cell) -> str:
    counted = f", `{cell.counted}`" if cell.counted else ""
    touched = "" if cell.touched else ", not touched"
    return f"**{cell.outcome}**{touched}{counted}"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
