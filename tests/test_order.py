"""The first process runs engines and the others do not, each its longest files first."""

from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from xdist.remote import Producer

from tests.order import LONG, EnginesApart

ROOT = Path(__file__).parents[1]
COUNTS = {
    "tests/test_a.py": 5,
    "tests/test_b.py": 9,
    LONG[7]: 1,
    "tests/engine/test_c.py": 3,
    LONG[1]: 1,
    LONG[0]: 1,
}
TESTS = [f"{file}::test_{number}" for file, count in COUNTS.items() for number in range(count)]


class Process:
    """A process of xdist, as the scheduler sees it."""

    shutting_down = False
    gateway = SimpleNamespace(id="of its own")

    def __init__(self) -> None:
        self.given: list[str] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += dict.fromkeys(TESTS[index].partition("::")[0] for index in indices)

    def shutdown(self) -> None:
        self.shutting_down = True


def files_given(processes: list[Process]) -> None:
    """Have all tests run, one by one, each process as fast as the others."""
    option = SimpleNamespace(
        loadscopereorder=True, tx=["popen"] * len(processes), maxprocesses=None
    )
    config: Any = SimpleNamespace(option=option, getvalue=lambda name: vars(option)[name])
    scheduler = EnginesApart(config, Producer("test", enabled=False))
    scheduler.numnodes = len(processes)
    nodes: list[Any] = list(processes)
    for node in nodes:
        scheduler.add_node(node)
        scheduler.add_node_collection(node, TESTS)
    scheduler.schedule()
    while scheduler.has_pending:
        for node in nodes:
            pending = [
                test
                for tests in scheduler.assigned_work[node].values()
                for test, is_done in tests.items()
                if not is_done
            ]
            if pending:
                scheduler.mark_test_complete(node, TESTS.index(pending[0]))


def test_one_process_runs_engines_and_the_others_the_rest_longest_first() -> None:
    first, *others = processes = [Process(), Process(), Process()]
    files_given(processes)
    assert first.given == [LONG[0], LONG[1], "tests/engine/test_c.py"]
    assert [process.given[0] for process in others] == [LONG[7], "tests/test_b.py"]
    assert sorted(chain(*(process.given for process in processes))) == sorted(COUNTS)


def test_one_process_alone_runs_all() -> None:
    process = Process()
    files_given([process])
    assert sorted(process.given) == sorted(COUNTS)


def test_who_has_none_of_its_own_left_helps_the_others() -> None:
    engines, others = processes = [Process(), Process()]
    files_given(processes)
    assert engines.given == [LONG[0], LONG[1], "tests/engine/test_c.py", "tests/test_a.py"]
    assert others.given == [LONG[7], "tests/test_b.py"]


@pytest.mark.parametrize("file", LONG)
def test_files_that_are_named_exist(file: str) -> None:
    assert (ROOT / file).is_file()
