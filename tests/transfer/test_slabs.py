"""Every slab is either free or leased, and given back once."""

import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch

from objkv.transfer import slabs
from objkv.transfer.slabs import SlabPool, SlabsExhaustedError
from tests.support.device import ON_HOST
from tests.support.mappings import is_private

pytestmark = ON_HOST


class Copies:
    """The mark of copies that end when a test sets ``have_ended``."""

    def __init__(self) -> None:
        self.have_ended, self.polls = False, 0

    def done(self) -> bool:  # to wait for it would hold the thread for ever if the device hangs
        self.polls += 1
        return self.have_ended


def test_free_and_leased_slabs_are_all_there_are_and_each_is_given_back_once() -> None:
    pool = SlabPool("load", count=3, slab_bytes=8)
    assert (pool.total, pool.leased) == (3, 0)
    slabs = [pool.lease(), pool.lease()]
    assert (pool.total, pool.leased) == (3, 2)
    slabs.append(pool.lease())
    with pytest.raises(SlabsExhaustedError):
        pool.lease()
    for slab in slabs:
        slab.release()
        with pytest.raises(AssertionError):
            slab.release()
    assert (pool.total, pool.leased) == (3, 0)


def test_a_lane_that_is_behind_keeps_no_slabs_of_another() -> None:
    pool, slow, fast = SlabPool("load", count=3, slab_bytes=8), Copies(), Copies()
    for copies in (slow, fast, fast):
        pool.lease().release(copies)
    fast.have_ended = True
    assert fast.polls == 2, "a device is not polled while slabs are free"
    memory = {pool.lease().tensor.data_ptr() for _ in range(2)}
    assert len(memory) == 2
    assert fast.polls == 3, "once for all slabs of a mark"


# Page-locked memory.


class Pinned:
    """A driver that keeps a list of locked memory: (address, bytes)."""

    def __init__(self) -> None:
        self.locked: list[tuple[int, int]] = []

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        piece = (memory.data_ptr(), memory.nbytes)
        self.locked.append(piece)
        return lambda: self.locked.remove(piece)


def test_slabs_are_in_no_core_dump_and_no_child() -> None:
    assert is_private(SlabPool("save", count=2, slab_bytes=4096).memory.numpy())


def test_slabs_are_pages_of_their_own_and_not_one_more() -> None:
    driver = Pinned()
    pool = SlabPool("load", count=3, slab_bytes=3 * 4096, pin=driver.pin)
    assert [(address % 4096, nbytes) for address, nbytes in driver.locked] == [(0, 9 * 4096)]
    begins = driver.locked[0][0]
    starts = {pool.lease().tensor.data_ptr() - begins for _ in range(3)}
    assert starts == {0, 3 * 4096, 6 * 4096}


def test_slabs_are_locked_until_the_pool_and_every_view_of_them_are_gone() -> None:
    driver = Pinned()
    pool = SlabPool("load", count=2, slab_bytes=4096, pin=driver.pin)
    slab = pool.lease()
    view = np.frombuffer(slab.view, np.uint8)[:10]
    del pool, slab
    gc.collect()
    assert len(driver.locked) == 1
    view[:] = 1
    del view
    gc.collect()
    assert driver.locked == []


def test_what_a_device_still_copies_is_neither_unlocked_nor_freed_with_its_pool(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver, hung, ended = Pinned(), Copies(), Copies()
    before = len(slabs._STRANDED)
    for copies in (hung, ended):
        pool = SlabPool("load", count=2, slab_bytes=4096, pin=driver.pin)
        pool.lease().release(copies)
        ended.have_ended = True
        del pool
        gc.collect()
    assert len(driver.locked) == 1
    assert [memory.nbytes for memory in slabs._STRANDED[before:]] == [4096]
    assert "slabs kept for copies that never ended pool=load count=1" in caplog.text


def test_a_driver_that_cannot_unlock_ends_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("the driver is shutting down")

    pool = SlabPool("load", count=1, slab_bytes=8, pin=lambda _: fail)
    del pool
    gc.collect()
    assert "slabs not unlocked" in caplog.text
