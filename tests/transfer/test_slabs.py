"""Every slab is either free or leased, and given back once."""

import pytest

from objkv.transfer.slabs import SlabPool, SlabsExhaustedError


def test_free_and_leased_slabs_are_all_there_are() -> None:
    pool = SlabPool("load", count=3, slab_bytes=8, pinned=False)
    assert (pool.total, pool.free, pool.leased) == (3, 3, 0)
    with pool.lease(), pool.lease():
        assert (pool.total, pool.free, pool.leased) == (3, 1, 2)
        last = pool.lease()
        with pytest.raises(SlabsExhaustedError):
            pool.lease()
        last.release()
    assert (pool.total, pool.free, pool.leased) == (3, 3, 0)


def test_a_slab_that_is_given_back_twice_is_a_bug() -> None:
    slab = SlabPool("load", count=1, slab_bytes=8, pinned=False).lease()
    slab.release()
    with pytest.raises(AssertionError):
        slab.release()


def test_a_pool_that_got_more_than_it_gave_says_so() -> None:
    pool = SlabPool("load", count=1, slab_bytes=8, pinned=False)
    slab = pool.lease()
    slab.release()
    with pytest.raises(AssertionError):
        pool.take_back(slab.tensor)
