"""A core inside the process: when its memory goes."""

import os
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.support.paged_cache import Replica, StuckStore, stores
from tests.support.waiting import wait_until


def open_files() -> set[str]:
    """What each descriptor of this process is, by its number."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return found


@pytest.fixture
def stuck() -> Iterator[StuckStore]:
    store = StuckStore()
    yield store
    store.go.set()


def test_memory_that_a_thread_on_the_network_writes_goes_when_it_ends(stuck: StuckStore) -> None:
    _, index = stores()
    before = open_files()
    replica = Replica(stuck, index, seed=1, join_s=0.01)
    replica.save(range(1))
    replica.loader.submit(replica.load_plan(range(1), 9))
    stuck.asked.wait()
    replica.close()
    assert replica.inside.arena.fd >= 0
    stuck.go.set()
    wait_until(lambda: replica.inside.arena.fd < 0)
    wait_until(lambda: not open_files() - before)
