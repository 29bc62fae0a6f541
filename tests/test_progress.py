"""A long run says how far it is, and what runs."""

import time
from types import SimpleNamespace
from typing import Any

from tests.progress import EVERY_S, Progress


class Reporter:
    """Keeps what is printed, after two dots."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        writer = SimpleNamespace(width_of_current_line=2)
        self.config = SimpleNamespace(get_terminal_writer=lambda: writer)

    def write_line(self, line: str) -> None:
        self.lines.append(line)


def test_a_line_says_how_many_tests_are_done_and_which_files_run() -> None:
    reporter: Any = Reporter()
    progress = Progress(reporter)
    progress.pytest_collection_finish(SimpleNamespace(items=[None] * 2_000))  # type: ignore[arg-type]
    for number in range(1_000):
        progress.pytest_runtest_logstart(f"a.py::test_{number}")
        progress.pytest_runtest_logfinish(f"a.py::test_{number}")
    for name in ("b.py::one", "b.py::two", "c.py::three"):
        progress.pytest_runtest_logstart(name)
    assert reporter.lines == []
    now = time.monotonic()
    assert (
        progress.line(now + 61).strip().endswith("1,000 of 2,000 tests (50 %), running b.py c.py")
    )
    progress._told -= EVERY_S
    progress.pytest_runtest_logstart("c.py::four")
    progress.pytest_runtest_logstart("c.py::five")
    [line] = reporter.lines
    assert line.startswith("\n")
    assert line.endswith("running b.py c.py")
