"""Threads that do jobs, and that nobody waits for longer than they want."""

import subprocess
import sys
from concurrent.futures import CancelledError
from threading import Event

import pytest

from objkv.cache.lookup import Threads


def test_jobs_are_done_and_their_outcomes_told() -> None:
    threads = Threads(2, "t")
    assert [future.result(60) for future in [threads.submit(lambda: 7) for _ in range(9)]] == [
        7
    ] * 9
    failing = threads.submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failing.result(60)
    assert threads.submit(lambda: "on").result(60) == "on"
    assert not threads._waiting
    threads.close(60)
    threads.close(60)
    assert not any(thread.is_alive() for thread in threads._threads)
    with pytest.raises(RuntimeError, match="no more"):
        threads.submit(lambda: 1)


def test_closing_cancels_what_waits_and_leaves_what_hangs() -> None:
    threads, gate, begun = Threads(1, "t"), Event(), Event()
    hanging = threads.submit(lambda: (begun.set(), gate.wait(60)))
    assert begun.wait(60)
    waiting = threads.submit(lambda: 1)
    threads.close(0.01)
    with pytest.raises(CancelledError):
        waiting.result(60)
    gate.set()
    assert hanging.result(60) == (None, True)


def test_a_process_ends_although_a_job_hangs() -> None:
    program = (
        "from objkv.cache.lookup import Threads\n"
        "from threading import Event\n"
        "begun = Event()\n"
        "Threads(1, 't').submit(lambda: (begun.set(), Event().wait()))\n"
        "begun.wait()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
