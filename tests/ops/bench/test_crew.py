"""Threads that start together."""

import mmap
import threading
import time

import numpy as np
import pytest

from objkv.ops.bench.harness import Threads, make_slab


def test_all_threads_work_at_once() -> None:
    meet = threading.Barrier(3)
    with Threads(3) as crew:
        for _ in range(2):
            assert crew.run(lambda _: meet.wait(60) and None) >= 0
    assert not meet.broken


def test_the_seconds_are_those_of_the_threads_however_late_others_wake_up() -> None:
    times: list[float] = []

    def work(_: int) -> None:
        times.append(time.perf_counter())
        sum(range(100_000))
        times.append(time.perf_counter())

    with Threads(2) as crew:
        for _ in range(20):
            times.clear()
            assert crew.run(work) >= max(times) - min(times)


def test_an_error_is_raised_once_all_have_ended() -> None:
    ended: list[int] = []

    def work(number: int) -> None:
        if number == 0:
            raise ValueError("broken")
        ended.append(number)

    with Threads(2) as crew, pytest.raises(ValueError, match="broken"):
        crew.run(work)
    assert ended == [1]


def test_a_slab_begins_at_a_page() -> None:
    slab = make_slab(3 * mmap.PAGESIZE + 1)
    assert np.frombuffer(slab, np.uint8).ctypes.data % mmap.PAGESIZE == 0
    assert (len(slab), slab.readonly, slab.format) == (3 * mmap.PAGESIZE + 1, False, "B")
