"""Every slab is either free or leased, and given back once."""

import logging

import pytest

from objkv.transfer.slabs import SlabPool, SlabsExhaustedError, WideSlabs


def test_free_and_leased_slabs_are_all_there_are() -> None:
    pool = SlabPool("load", count=3, slab_bytes=8)
    assert (pool.total, pool.free, pool.leased) == (3, 3, 0)
    with pool.lease(), pool.lease():
        assert (pool.total, pool.free, pool.leased) == (3, 1, 2)
        last = pool.lease()
        with pytest.raises(SlabsExhaustedError):
            pool.lease()
        last.release()
    assert (pool.total, pool.free, pool.leased) == (3, 3, 0)


def test_a_slab_that_is_given_back_twice_is_a_bug() -> None:
    slab = SlabPool("load", count=1, slab_bytes=8).lease()
    slab.release()
    with pytest.raises(AssertionError):
        slab.release()


def test_a_pool_that_got_more_than_it_gave_says_so_once_and_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where a slab is given back nobody could do anything about it, and other things come after."""
    pool = SlabPool("load", count=1, slab_bytes=8)
    slab = pool.lease()
    slab.release()
    assert pool.adds_up
    for _ in range(2):
        with caplog.at_level(logging.ERROR):
            pool.take_back(slab.tensor)
    assert not pool.adds_up
    assert len(caplog.records) == 1
    assert "slabs do not add up" in caplog.text


def test_a_lost_slab_is_seen_at_the_next_lease() -> None:
    pool = SlabPool("load", count=3, slab_bytes=8)
    pool._free.pop()
    assert pool.adds_up
    with pool.lease():
        assert not pool.adds_up


def test_pairs_add_up_while_tasks_come_and_go() -> None:
    wide: WideSlabs[str] = WideSlabs(pairs=2, slab_bytes=8)
    assert [wide.enter(name) for name in "abc"] == [True, True, False]
    assert wide.leave() == "c"
    assert wide.enter("c")
    with wide.pool().lease():
        assert wide.adds_up
    assert (wide.leave(), wide.leave()) == (None, None)
    assert wide.adds_up
    wide.leave()
    assert not wide.adds_up
