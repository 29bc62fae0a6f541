"""Writes the fault matrix into ``docs/reliability.md``: ``python -m tests.faults.table``."""

from pathlib import Path

from tests.faults.rows import ROWS, VERBS, Cell, Row

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
WRITTEN = "written by `python -m tests.faults.table` -->"
BEGIN, END = f"<!-- matrix: {WRITTEN}", "<!-- end of the matrix -->"


def page() -> str:
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n{matrix()}{end}{after}"


def matrix() -> str:
    lines = ["| fault | what fails | lookup | load | save |", "|---|---|---|---|---|"]
    return "\n".join(lines + [_line(row) for row in ROWS]) + "\n"


def _line(row: Row) -> str:
    cells = " | ".join(_cell(row.cell(verb)) for verb in VERBS)
    return f"| `{row.name}` | {row.what} | {cells} |"


def _cell(cell: Cell) -> str:
    counted = f", `{cell.counted}`" if cell.counted else ""
    touched = "" if cell.touched else ", not touched"
    return f"**{cell.outcome}**{touched}{counted}"


def main() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
