"""Units of work by several threads: each is done once, whatever ends the run."""

import os
import signal
from collections import Counter
from pathlib import Path
from threading import Event, Lock

import pytest

from objkv.errors import StoreUnavailable
from objkv.ops.runs import (
    FINDINGS_MAX,
    Check,
    Checkpoint,
    Counters,
    Finding,
    Unit,
    WorkPool,
)


class Work:
    """Units that count how often each was done."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        self._lock = Lock()

    def units(self, count: int, *, trouble: dict[str, BaseException] | None = None) -> list[Unit]:
        return [
            self._unit(str(number), (trouble or {}).get(str(number))) for number in range(count)
        ]

    def _unit(self, name: str, trouble: BaseException | None) -> Unit:
        def work(counters: Counters, check: Check) -> None:
            check()
            if isinstance(trouble, KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
                Event().wait(0.2)
                check()
            elif trouble is not None:
                raise trouble
            counters.find("done", name, 1)
            with self._lock:
                self.done[name] += 1

        return Unit(name, work)


def test_all_units_are_done_once_and_counted() -> None:
    work, checkpoint, reports = Work(), Checkpoint(None), []
    pool = WorkPool(checkpoint, workers=4)
    pool.run(work.units(50), lambda done, total: reports.append((done, total)))
    assert pool.ending == "complete"
    assert set(work.done.values()) == {1}
    assert (checkpoint.counters.counts["done"], checkpoint.counters.nbytes["done"]) == (50, 50)
    assert (reports[0], reports[-1]) == ((0, None), (50, 50))


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    file = tmp_path / "progress" / "sweep.json"
    work = Work()
    first = Checkpoint(file)
    pool = WorkPool(first, workers=2)
    pool.run(work.units(40, trouble={"20": KeyboardInterrupt()}))
    assert pool.ending == "interrupted"
    pool.run(work.units(40))  # what would follow is not begun
    first.close(complete=False)
    assert 0 < sum(work.done.values()) < 40

    second = Checkpoint(file)
    assert second.resumed
    pool = WorkPool(second, workers=2)
    pool.run(work.units(40))
    second.close(complete=True)
    assert pool.ending == "complete"
    assert second.counters.counts["done"] == 40
    assert set(work.done.values()) == {1}
    third = Checkpoint(file)
    assert not third.resumed
    third.close(complete=True)


def test_the_first_error_ends_the_run_and_what_was_done_is_kept(tmp_path: Path) -> None:
    work, checkpoint = Work(), Checkpoint(tmp_path / "file")
    with pytest.raises(StoreUnavailable, match="gone"):
        WorkPool(checkpoint, workers=1).run(work.units(40, trouble={"9": StoreUnavailable("gone")}))
    checkpoint.close(complete=False)
    again = Checkpoint(tmp_path / "file")
    assert again.done == {str(number) for number in range(9)}
    again.close(complete=False)


def test_nothing_is_begun_after_the_deadline() -> None:
    now = 0.0
    work, checkpoint = Work(), Checkpoint(None)
    pool = WorkPool(checkpoint, workers=1, deadline_s=5.0, clock=lambda: now)
    pool.run(work.units(3))
    now = 5.0
    pool.run(work.units(6))
    assert pool.ending == "deadline"
    assert sum(work.done.values()) == 3


def test_a_second_run_at_once_keeps_no_checkpoint(tmp_path: Path) -> None:
    first, second = Checkpoint(tmp_path / "file"), Checkpoint(tmp_path / "file")
    assert (first.is_kept, second.is_kept) == (True, False)
    second.finish("a", Counters())
    second.close(complete=False)
    first.close(complete=True)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 2}', '{"format": 1, "done": 3}', "\xff"]
)
def test_a_file_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text, "latin-1")
    checkpoint = Checkpoint(tmp_path / "file")
    assert (checkpoint.resumed, checkpoint.is_kept) == (False, True)
    checkpoint.close(complete=True)


def test_findings_beyond_the_bound_are_counted() -> None:
    counters = Counters()
    for number in range(FINDINGS_MAX + 5):
        counters.find("orphan", str(number), 2)
    both = Counters()
    both.add(counters)
    both.add(counters)
    assert both.counts["orphan"] == 2 * (FINDINGS_MAX + 5)
    assert len(both.findings) == FINDINGS_MAX
    assert len(both.findings) + both.omitted == both.counts["orphan"]
    assert Counters.parse(both.plain()) == both
    assert both.findings[0] == Finding("orphan", "0", 2)
