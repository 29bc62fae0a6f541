"""Units of work by several threads: each is done once, whatever ends the run."""

import os
import signal
from collections import Counter
from threading import Event, Lock

import pytest

from objkv.errors import StoreUnavailable
from objkv.ops.runs import FINDINGS_MAX, Check, Counters, Finding, Unit, WorkPool


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
                while True:  # Python drops an interrupt that comes in a finaliser
                    os.kill(os.getpid(), signal.SIGINT)
                    for _ in range(500):
                        check()
                        Event().wait(0.01)
            elif trouble is not None:
                raise trouble
            counters.find("done", name, 1)
            with self._lock:
                self.done[name] += 1

        return Unit(work)


def test_all_units_are_done_once_and_counted() -> None:
    work, reports = Work(), []
    pool = WorkPool(workers=4)
    pool.run(work.units(50), lambda done, total: reports.append((done, total)))
    assert pool.ending == "complete"
    assert set(work.done.values()) == {1}
    assert (pool.counters.counts["done"], pool.counters.nbytes["done"]) == (50, 50)
    assert (reports[0], reports[-1]) == ((0, None), (50, None))
    units = [Unit(lambda counters, check: None, items=1) for _ in range(3)]
    WorkPool(workers=1).run(units, lambda done, total: reports.append((done, total)))
    assert reports[-1] == (3, 3)


def test_an_interrupt_ends_the_run_with_what_was_done_and_nothing_follows() -> None:
    work, pool = Work(), WorkPool(workers=2)
    pool.run(work.units(40, trouble={"20": KeyboardInterrupt()}))
    assert pool.ending == "interrupted"
    pool.run(work.units(40))
    assert 0 < pool.counters.counts["done"] == sum(work.done.values()) < 40


def test_the_first_error_ends_the_run() -> None:
    work, pool = Work(), WorkPool(workers=1)
    with pytest.raises(StoreUnavailable, match="gone"):
        pool.run(work.units(40, trouble={"9": StoreUnavailable("gone")}))
    assert work.done.keys() == {str(number) for number in range(9)}


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
    assert both.findings[0] == Finding("orphan", "0", 2)
