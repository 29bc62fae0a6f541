"""What is saved, or announced, while a sweep deletes it: no record stays of what is gone, and
nothing goes that was saved since."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from objkv.cache.chunks import CacheSettings, ChunkCache
from objkv.codec.payload import read_header
from objkv.errors import StoreDenied, StoreUnavailable
from objkv.index.base import WriteIndex
from objkv.index.guarded import GuardedIndex
from objkv.ops.backends_view import PATIENCE_S, BackendsView, retrying
from objkv.ops.runs import Counters
from objkv.ops.sweep.remove import Remover, SweepLimits
from objkv.stores.base import Entry
from objkv.telemetry import NullRecorder
from tests.contracts.clock import ManualClock
from tests.contracts.flaky import FlakyStore
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.samples import save, view_of

LEASE_S = 10


def test_calls_that_time_may_mend_are_repeated_for_a_while_and_refusals_and_scans_are_not() -> None:
    inner, slept = FlakyStore(MemoryStore()), list[float]()
    inner.put("a", b"")
    store = retrying(inner, sleep=slept.append)
    inner.fail_next(StoreDenied("403"))
    with pytest.raises(StoreDenied):
        store.get("a")
    inner.fail_next(StoreUnavailable("gone"))
    with pytest.raises(StoreUnavailable):
        list(store.scan(""))
    assert not slept, "a scan that ends early would look whole"
    inner.fail_until_mended(StoreUnavailable("gone"))
    with pytest.raises(StoreUnavailable):
        store.get("a")
    assert PATIENCE_S <= sum(slept) < 2 * PATIENCE_S


class World:
    """Both ends in memory; one payload of them nobody announced."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.bulk, self.index = MemoryStore(), MemoryIndex(clock=self.clock)
        [self.key] = save(self.bulk, None, range(16))
        self.path = self.key.path()
        payload = self.bulk.get(self.path)
        assert payload is not None
        self.payload = payload
        self.counters = Counters()
        self.slept: list[float] = []
        entry = self.bulk.head(self.path)
        assert entry is not None
        self.entry = replace(entry, modified_s=entry.modified_s - 60)
        self.is_old = True
        self._head = self.bulk.head
        self.bulk.head = self.head  # type: ignore[method-assign]

    def head(self, key: str) -> Entry | None:
        """What was there first was there long ago."""
        return self.entry if self.is_old else self._head(key)

    def sleep(self, pause_s: float) -> None:
        """As the sweep does between two attempts."""
        self.slept.append(pause_s)
        self.clock.advance(pause_s)

    def view(self) -> BackendsView:
        """As patient as those of a sweep."""
        return view_of(
            retrying(self.bulk, sleep=self.sleep),
            retrying(self.index, sleep=self.sleep),
            lease_ms=LEASE_S * 1_000,
        )

    def remover(self, sleep: Callable[[float], None] | None = None) -> Remover:
        limits = SweepLimits(apply=True, grace_s=0)
        return Remover(self.view(), limits, clock=self.clock, sleep=sleep or self.sleep)

    def remove(self, sleep: Callable[[float], None] | None = None) -> tuple[int, int]:
        """How many are ``removed`` and ``changed``."""
        self.remover(sleep).payload("orphan", self.key, self.entry, None, self.counters)
        return self.counters.counts["removed"], self.counters.counts["changed"]

    def save(self, index: WriteIndex) -> None:
        """What a replica does with the same payload, unless somebody else has the lease."""
        settings = CacheSettings("saver", 3_600, LEASE_S * 1_000, 0)
        cache = ChunkCache(self.bulk, None, index, settings, NullRecorder())
        header = read_header(self.payload)
        if cache.take_lease(self.key.path()):
            cache.save(header.claim.key.path(), self.payload, header)
            cache.release_lease(self.key.path())

    def is_found(self) -> tuple[bool, bool]:
        """Whether the index promises it, and whether it is there."""
        [record] = self.index.lookup(self.key.namespace, [self.key.prefix_hash])
        return record is not None, self._head(self.path) is not None

    def lose_answers(self, times: int) -> None:
        """Deletes are done, and fail."""
        delete, left = self.bulk.delete, [times]

        def lost(key: str) -> bool:
            done = delete(key)
            self.is_old = False
            left[0] -= 1
            if left[0] >= 0:
                raise StoreUnavailable("the answer was lost")
            return done

        self.bulk.delete = lost  # type: ignore[method-assign]


@pytest.mark.parametrize("failures", [1, 3])
def test_a_delete_whose_answer_was_lost_is_not_repeated_on_what_was_saved_since(
    failures: int,
) -> None:
    world = World()
    world.lose_answers(failures)

    def sleep(pause_s: float) -> None:
        world.clock.advance(pause_s + LEASE_S)
        world.save(world.index)

    assert world.remove(sleep) == (0, 1)
    assert world.is_found() == (True, True)


def test_a_delete_that_was_done_although_its_answer_was_lost_is_done() -> None:
    world = World()
    world.lose_answers(1)
    assert world.remove() == (1, 0)
    assert (len(world.slept), world.is_found()) == (1, (False, False))


@pytest.mark.parametrize("failures", [3, 10**9])
def test_a_delete_that_fails_is_done_in_the_end_or_an_error(failures: int) -> None:
    world, left = World(), [failures]
    delete = world.bulk.delete

    def fails(key: str) -> bool:
        left[0] -= 1
        if left[0] >= 0:
            raise StoreUnavailable("busy")
        return delete(key)

    world.bulk.delete = fails  # type: ignore[method-assign]
    if failures == 3:
        assert world.remove() == (1, 0)
        assert world._head(world.path) is None
    else:
        with pytest.raises(StoreUnavailable):
            world.remove()
    assert world.index.lease(world.path, "saver", ttl_ms=1), "the sweep keeps no lease"


def test_nothing_is_removed_or_forgotten_once_the_lease_may_have_ended() -> None:
    world = World()
    [key] = save(world.bulk, world.index, range(500, 516))
    [record] = world.index.lookup(key.namespace, [key.prefix_hash])
    assert record is not None

    def slow(path: str) -> Entry | None:
        world.clock.advance(LEASE_S)
        return world.entry if path == world.path else None

    world.bulk.head = slow  # type: ignore[method-assign]
    assert world.remove() == (0, 1)
    assert world._head(world.path) is not None
    world.remover().record(key, record.shards[key.field], world.counters)
    assert world.counters.counts["changed"] == 2
    assert world.index.lookup(key.namespace, [key.prefix_hash]) == [record]


class Leaseless(GuardedIndex):
    """Fails for leases only."""

    def lease(self, name: str, owner: str, *, ttl_ms: int) -> bool:
        raise StoreUnavailable("slow")

    def release(self, name: str, owner: str) -> None:
        raise StoreUnavailable("slow")


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_a_saver_without_a_lease_saves_before_a_delete_is_forgotten_and_after_it_stays(
    when: str,
) -> None:
    world = World()
    delete = world.bulk.delete

    def meddled(key: str) -> bool:
        if when == "before":
            world.save(Leaseless(world.index))
            assert world.is_found() == (True, True)
        done = delete(key)
        world.is_old = False
        if when == "after":
            world.save(Leaseless(world.index))
        return done

    world.bulk.delete = meddled  # type: ignore[method-assign]
    assert world.remove() == (1, 0)
    assert world.is_found() == ((True, True) if when == "after" else (False, False))
