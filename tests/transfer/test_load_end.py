"""The end of a loader: its threads go, and what still arrives touches nothing."""

import logging
import threading

import pytest

from objkv.index.memory import MemoryIndex
from tests.transfer.arriving import StuckStore
from tests.transfer.paged_cache import same_blocks
from tests.transfer.world import PATIENCE_S, Replica, stores, wait_until


def load_threads(replica: Replica) -> list[str]:
    """Those that are alive; other tests' loaders may have threads of the same names."""
    return [thread.name for thread in replica.loader._threads if thread.is_alive()]


def test_closing_ends_all_threads(caplog: pytest.LogCaptureFixture) -> None:
    before = set(threading.enumerate())
    replica = Replica(*stores(), seed=1)
    assert load_threads(replica) == ["objkv-load-0", "objkv-load-1"]
    replica.close()
    assert not load_threads(replica)
    assert not set(threading.enumerate()) - before
    assert "at shutdown" not in caplog.text
    replica.loader.close()


def test_closing_waits_for_no_network_beyond_its_bound_and_says_what_is_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = StuckStore()
    replica = Replica(store, MemoryIndex(), seed=1, join_s=0.01)
    replica.save(range(1))
    before = replica.snapshot()
    replica.loader.submit(replica.load_plan(range(1), 9))
    assert store.asked.wait(PATIENCE_S)
    with caplog.at_level(logging.WARNING):
        replica.close()
    assert "loads still on the network at shutdown" in caplog.text
    assert len(load_threads(replica)) == 1
    store.go.set()
    wait_until(lambda: not load_threads(replica))
    assert same_blocks(before, range(32), replica.caches, range(32))
    assert replica.load_slabs.leased == 0
