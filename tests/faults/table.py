"""Writes the matrix into ``docs/reliability.md``: ``python -m tests.faults.table``."""

from pathlib import Path

from tests.faults.rows import MODES, ROWS, VERBS, Cell, Row, Verb, cell_id

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- matrix: written by `make faults` -->", "<!-- end of the matrix -->"


def page() -> str:
    """The page with the matrix as it is."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{matrix()}{END}{after}"


def matrix() -> str:
    """The table: a line for each fault, verb and mode."""
    lines = ["| fault | what | mode | lookup | load | save |", "|---|---|---|---|---|---|"]
    lines += [_line(row, mode) for row in ROWS for mode in MODES]
    return "\n".join(lines) + "\n"


def _line(row: Row, mode: str) -> str:
    cells = [_cell(row.cell(verb), cell_id(row.name, verb, mode)) for verb in VERBS]
    name = f"`{row.name}`" if mode == MODES[0] else ""
    what = row.what if mode == MODES[0] else ""
    return f"| {name} | {what} | {mode} | {' | '.join(cells)} |"


def _cell(cell: Cell, test: str) -> str:
    told = f", `{cell.counted}`" if cell.counted else ""
    where = "" if cell.touched else ", not touched"
    return f"**{cell.outcome}**{where}{told}<br>`{test}`"


def listed() -> set[str]:
    """The tests that the page names."""
    text = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    return {part.rpartition("<br>`")[2].strip(" `") for part in text.split("|") if "<br>`" in part}


def main() -> None:
    """Write the page, print the matrix."""
    PAGE.write_text(page())
    for row in ROWS:
        verbs: tuple[Verb, ...] = VERBS
        print(f"{row.name:22}", *(f"{verb}: {row.cell(verb).outcome:6}" for verb in verbs))


if __name__ == "__main__":
    main()
