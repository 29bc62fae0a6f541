"""Pools of threads: jobs in order, whatever a job does, and an end within its bound."""

import gc
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from threading import Event
from typing import Any

import pytest

from objkv.background import Pool
from tests.support.waiting import PATIENCE_S, wait_until

Job = Callable[[], object]


class Gate:
    """A job that hangs until ``open`` is set."""

    def __init__(self) -> None:
        self.begun, self.open = Event(), Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.open.wait(PATIENCE_S)


def pool_of(name: str = "t", *, threads: int = 1, **more: Any) -> Pool[Job]:
    return Pool(name, threads, lambda job: job(), **more)


def test_jobs_run_in_order() -> None:
    done: list[str] = []
    gate = Gate()
    pool = pool_of()
    assert pool.put([gate])
    assert gate.begun.wait(PATIENCE_S)
    assert pool.put(lambda name=name: done.append(name) for name in "ab")
    assert (pool.waiting, pool.busy) == (2, 1)
    assert not pool.drain(0.001)
    gate.open.set()
    assert pool.drain(PATIENCE_S)
    assert done == ["a", "b"]
    assert pool.close() == []


def test_what_a_job_raises_is_its_owners_or_logged_and_the_next_job_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise KeyError("x")

    def failed(_job: object, error: Exception) -> None:
        errors.append(error)
        if len(errors) == 2:
            raise ValueError("so does what takes errors")

    done, errors = Event(), list[Exception]()
    for pool in (pool_of("owned", failed=failed), pool_of("plain")):
        with caplog.at_level(logging.ERROR):
            done.clear()
            pool.put([fail, fail, done.set])
            assert done.wait(PATIENCE_S)
        pool.close()
    assert [type(error) for error in errors] == [KeyError, KeyError]
    assert caplog.text.count("job failed unexpectedly pool=owned") == 1
    assert caplog.text.count("job failed unexpectedly pool=plain") == 2


def test_as_many_threads_are_woken_as_there_are_new_jobs_and_who_drains_only_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wake-up takes the GIL from the forward thread, which puts the jobs."""
    made = list[list[int]]()

    class Counted(threading.Condition):
        def __init__(self, lock: threading.Lock) -> None:
            super().__init__(lock)
            made.append([])
            self.woken = made[-1]

        def notify(self, n: int = 1) -> None:
            self.woken.append(n)
            super().notify(n)

    gate = Gate()
    with monkeypatch.context() as patch:
        patch.setattr("objkv.background.Condition", Counted)
        pool = pool_of()
    woken, drained = made
    pool.put([gate])
    assert gate.begun.wait(PATIENCE_S)
    pool.put([list, dict])
    pool.put([set])
    assert woken == [1, 2, 1]
    assert drained == []
    gate.open.set()
    wait_until(lambda: not pool.waiting and not pool.busy)
    assert len(drained) == 1
    pool.close()


def test_closing_hands_back_what_no_thread_began_and_names_what_hangs() -> None:
    gate, left = Gate(), list[Job]()
    pool = pool_of()
    pool.put([gate, list, dict])
    assert gate.begun.wait(PATIENCE_S)
    assert pool.close(0.0, give_up=left.extend) == ["t-0"]
    assert left == [list, dict]
    assert pool.is_closed
    assert not pool.put([list])
    gate.open.set()
    assert pool.close(PATIENCE_S, give_up=left.extend) == []
    assert left == [list, dict]
    assert pool.drain(0.0)


def test_a_job_that_is_done_is_not_kept_until_the_next_one() -> None:
    pool: Pool[Gate] = Pool("t", 1, lambda _: None)
    gate = Gate()
    seen = weakref.ref(gate)
    pool.put([gate])
    del gate
    wait_until(lambda: gc.collect() >= 0 and seen() is None)
    pool.close()


def test_each_thread_begins_once_before_its_first_job() -> None:
    begun, gates = list[str](), [Gate(), Gate(), Gate()]
    pool = pool_of(threads=2, begin=lambda: begun.append(threading.current_thread().name))
    pool.put(gates)
    for gate in gates[:2]:
        assert gate.begun.wait(PATIENCE_S)
    assert sorted(begun) == ["t-0", "t-1"]
    for gate in gates:
        gate.open.set()
    assert pool.drain(PATIENCE_S)
    assert sorted(begun) == ["t-0", "t-1"]
    pool.close()


def test_a_thread_that_cannot_be_prepared_runs_its_jobs(caplog: pytest.LogCaptureFixture) -> None:
    """Blocks wait for some of them: a thread that ends would keep the blocks for ever."""

    def begin() -> None:
        raise RuntimeError("no device")

    done = Event()
    pool = pool_of(begin=begin)
    pool.put([done.set])
    assert done.wait(PATIENCE_S)
    assert "thread not prepared pool=t" in caplog.text
    pool.close()


def test_a_process_ends_although_a_job_hangs() -> None:
    program = (
        "from objkv.background import Pool\n"
        "from threading import Event\n"
        "begun = Event()\n"
        "Pool('t', 1, lambda _: (begun.set(), Event().wait())).put([1])\n"
        "begun.wait()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_S)
