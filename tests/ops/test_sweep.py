"""What a sweep leaves alone because somebody changed it meanwhile, what it gives up for a quota,
and what is saved or announced while it deletes: no record stays of what is gone, and nothing goes
that was saved since. That it finds what is there: ``tests/cli/test_upkeep.py``."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from objkv.assembly.backends import Backends
from objkv.cache.chunks import CacheSettings, ChunkCache, publish_record
from objkv.codec.payload import read_header
from objkv.errors import StoreDenied, StoreUnavailable
from objkv.index.base import Usage, WriteIndex
from objkv.index.guarded import GuardedIndex
from objkv.keys.chunk import ChunkKey
from objkv.keys.encoder import EncoderIdentity
from objkv.keys.identity import FORMAT, identity_path
from objkv.ops.backends_view import PATIENCE_S, BackendsView, read_namespace, retrying
from objkv.ops.inventory.walk import old_epochs
from objkv.ops.rebuild import Rebuild
from objkv.ops.runs import Counters, WorkPool
from objkv.ops.sweep.remove import Remover, SweepLimits
from objkv.ops.sweep.sweep import SWEPT_PERCENT, Sweep
from objkv.stores.base import Entry, Unfinished
from objkv.telemetry import NullRecorder
from tests.contracts.clock import ManualClock
from tests.contracts.damage import IDENTITY, DamagedStore, Defects, Planted
from tests.contracts.flaky import FlakyStore
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.samples import save, save_in_format, view_of, walked

NAMESPACE = IDENTITY.namespace()


class World:
    """Both ends in memory, in which a replica can act whenever the sweep takes a lease."""

    def __init__(self, defects: Defects) -> None:
        self.bulk, self.index = MemoryStore(), MeddledIndex()
        self.planted: Planted = DamagedStore(Backends(self.bulk, None, self.index)).plant(defects)
        self.view = view_of(self.bulk, self.index)

    def sweep(
        self, *, quota_bytes: int = 0, after_the_walk: Callable[[], object] = lambda: None
    ) -> Counters:
        """All categories, whatever its age."""
        pool = WorkPool(workers=2)
        limits = SweepLimits(apply=True, grace_s=-1, unidentified=True)
        walk = walked(self.view)
        after_the_walk()
        work = Sweep(self.view, walk, limits)
        quotas = work.quotas(quota_bytes)
        for units in (work.leftovers(), work.parts(), work.missing(), quotas, work.documents()):
            pool.run(units)
        return pool.counters

    def rebuild(self) -> Counters:
        pool = WorkPool(workers=2)
        walk = walked(self.view)
        pool.run(Rebuild(self.view, apply=True).parts(walk.inventory, walk.scope.namespaces))
        return pool.counters


class MeddledIndex(MemoryIndex):
    """``meddle`` is called once a lease has been given, before whoever took it goes on."""

    meddle: Callable[[], object] = staticmethod(lambda: None)

    def lease(self, name: str, owner: str, *, ttl_ms: int) -> bool:
        taken = super().lease(name, owner, ttl_ms=ttl_ms)
        meddle, self.meddle = self.meddle, lambda: None
        meddle()
        return taken


def publish(world: World, path: str) -> None:
    """What a saver does last."""
    payload = world.bulk.get(path)
    assert payload is not None
    publish_record(world.index, read_header(payload), hot=False, ttl_s=100)


@pytest.mark.parametrize("how", ["announced_meanwhile", "written_anew"])
def test_an_orphan_that_changes_while_the_sweep_takes_its_lease_stays(how: str) -> None:
    world = World(Defects(good=8, orphan=1))
    [path] = world.planted["orphan"]
    payload = world.bulk.get(path)
    assert payload is not None
    anew = partial(world.bulk.put, path, payload + b"longer")
    world.index.meddle = anew if how == "written_anew" else partial(publish, world, path)
    counters = world.sweep()
    assert (counters.counts["changed"], counters.counts["removed"]) == (1, 0)
    assert world.bulk.get(path) is not None


def test_an_orphan_or_a_record_alone_is_judged_by_what_became_of_it_after_the_walk() -> None:
    world = World(Defects(good=8, orphan=1, missing=1))
    [path] = world.planted["orphan"]
    key = ChunkKey.parse(world.planted["missing"][0])

    def change() -> None:
        publish(world, path)
        world.index.drop(NAMESPACE, key.prefix_hash)

    assert not world.sweep(after_the_walk=change).counts
    assert world.bulk.get(path) is not None


def test_what_was_used_after_the_walk_is_not_evicted() -> None:
    world = World(Defects(good=8))
    hashes = [one.prefix_hash for one in world.index.scan(NAMESPACE)]
    later = time.time() + 500
    world.index._clock = lambda: later
    counters = world.sweep(
        quota_bytes=1, after_the_walk=lambda: world.index.touch(NAMESPACE, hashes, ttl_s=10_000)
    )
    assert (counters.counts["changed"], counters.counts["removed"]) == (8, 0)


def test_what_somebody_saves_right_now_is_busy() -> None:
    world = World(Defects(good=8, orphan=1))
    [path] = world.planted["orphan"]
    world.index.lease(path, "saver", ttl_ms=100_000)
    assert world.sweep().counts["busy"] == 1
    assert world.bulk.get(path) is not None
    world.index.release(path, "saver")
    assert world.sweep().counts["removed"] == 1
    assert world.index.lease(path, "saver", ttl_ms=1), "the sweep keeps no lease"


def test_a_record_whose_payload_comes_meanwhile_stays() -> None:
    world = World(Defects(good=8, missing=1))
    [path] = world.planted["missing"]
    world.index.meddle = lambda: world.bulk.put(path, b"here it is")
    assert world.sweep().counts["changed"] == 1
    key = ChunkKey.parse(path)
    assert world.index.lookup(key.namespace, [key.prefix_hash]) != [None]


def test_a_record_is_forgotten_before_its_payload_is_deleted() -> None:
    world = World(Defects(good=8, old_epoch=1))
    [path] = world.planted["old_epoch"]
    key, order = ChunkKey.parse(path), []
    delete, forget = world.bulk.delete, world.index.forget
    world.bulk.delete = lambda path: order.append("delete") or delete(path)
    world.index.forget = lambda *told: order.append("forget") or forget(*told)
    world.sweep()
    assert order[:2] == ["forget", "delete"]
    assert world.bulk.folders(key.namespace) == [], "its document is gone as well"


def test_old_epochs_that_are_in_use_stay() -> None:
    world = World(Defects(good=8, old_epoch=2))
    used, unused = (ChunkKey.parse(path) for path in world.planted["old_epoch"])
    world.index._clock = lambda: time.time() + 500
    world.index.touch(used.namespace, [used.prefix_hash], ttl_s=10_000)
    limits = SweepLimits(apply=True, grace_s=1_000)
    counters = Counters()
    for late_s, left in ((900, [used, unused]), (1_100, [used]), (1_600, [])):
        clock = partial(lambda late_s: time.time() + late_s, late_s)
        for unit in Sweep(world.view, walked(world.view), limits, clock=clock).parts():
            unit.work(counters, lambda: None)
        assert [key for key in (used, unused) if world.bulk.get(key.path())] == left


def test_only_the_epoch_tells_old_from_new() -> None:
    bulk = MemoryStore()
    encoder = EncoderIdentity("m", "w", 1, "default", "p", None, "bfloat16")
    identities = {
        "old": IDENTITY,
        "new": replace(IDENTITY, weights_epoch=9),
        "other tenant": replace(IDENTITY, weights_epoch=1, tenant="b"),
        "encoder, old": encoder,
        "encoder, new": replace(encoder, weights_epoch=2),
    }
    for one in identities.values():
        bulk.put(identity_path(one.namespace()), one.canonical())
    bulk.put(identity_path("0" * 32), b"{}")
    found = [read_namespace(bulk, one.namespace()) for one in identities.values()]
    found.append(read_namespace(bulk, "0" * 32))
    assert old_epochs(found) == {IDENTITY.namespace(), encoder.namespace()}
    assert [one.is_known for one in found] == [True] * 5 + [False]
    assert [one.has_chunks for one in found] == [True, True, True, False, False, False]


@pytest.mark.parametrize("is_own_index", [True, False])
def test_payloads_of_an_earlier_format_go_with_their_document(is_own_index: bool) -> None:
    world = World(Defects(good=1))
    world.view = replace(world.view, is_own_index=is_own_index)
    earlier, later = (save_in_format(world.bulk, FORMAT + step) for step in (-1, 1))
    assert world.sweep().counts["old_epoch"] == 1
    left = world.bulk.folders("")
    assert earlier not in left
    assert {NAMESPACE, later} <= {*left}


def test_beyond_the_quota_ends_of_chains_go_first() -> None:
    world = World(Defects(good=24))  # three chains of eight
    before = {one.prefix_hash: one for one in world.index.scan(NAMESPACE)}
    used = sum(one.nbytes for one in before.values())
    quota = used // 2
    counters = world.sweep(quota_bytes=quota)
    left = {one.prefix_hash: one for one in world.index.scan(NAMESPACE)}
    assert counters.counts["over_quota"] == counters.counts["removed"] >= 12
    assert sum(one.nbytes for one in left.values()) <= quota * SWEPT_PERCENT // 100
    assert sum(entry.nbytes for entry in world.bulk.scan(NAMESPACE) if "/0." in entry.key) == sum(
        one.nbytes for one in left.values()
    )
    for one in left.values():  # nothing is left that continues what is gone
        assert one.token_start == 0 or one.parent_hash in left
    assert world.sweep(quota_bytes=quota).counts["over_quota"] == 0
    for prefix_hash in left:
        world.index.pin(NAMESPACE, prefix_hash, until_s=1 << 40, ttl_s=9)
    kept = world.sweep(quota_bytes=1).counts
    assert (kept["over_quota"], kept["full"]) == (0, 1)


def test_a_rebuild_leaves_to_savers_what_they_are_saving() -> None:
    world = World(Defects(good=3, orphan=2))
    first, second = world.planted["orphan"]
    world.index.lease(first, "saver", ttl_ms=100_000)
    counts = world.rebuild().counts
    assert (counts["written"], counts["restored"], counts["present"]) == (1, 1, 3)
    key = ChunkKey.parse(second)
    assert world.index.lookup(key.namespace, [key.prefix_hash]) != [None]


class TotalsIndex(MeddledIndex):
    """Keeps running totals, as one does that cannot tell exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.totals: dict[str, Usage] = {}

    def usage(self) -> list[Usage]:
        return list(self.totals.values())

    def set_usage(self, usage: Usage) -> None:
        self.totals[usage.namespace] = usage


@pytest.mark.parametrize("only", [None, NAMESPACE])
def test_totals_of_a_namespace_whose_records_have_all_expired_are_counted_again(
    only: str | None,
) -> None:
    world = World(Defects(orphan=3))
    gone = "f" * 32
    index = TotalsIndex()
    world.view = replace(world.view, index=index, admin=index)
    for name in (NAMESPACE, gone):
        index.totals[name] = Usage(name, 10_000, 9, 0)
    work = Sweep(world.view, walked(world.view, only), SweepLimits(apply=True, grace_s=-1))
    WorkPool(workers=1).run(work.totals())
    left = {usage.namespace: usage.nbytes for usage in index.usage()}
    assert left == {NAMESPACE: 0, gone: 10_000 if only else 0}


def test_a_put_under_way_is_left_alone_whatever_the_grace() -> None:
    world, now_s = World(Defects(good=2)), time.time()
    left = [Unfinished("a", name, 1, now_s - age_s) for name, age_s in (("new", 9), ("old", 1_000))]
    discarded: list[str] = []
    world.bulk.unfinished = lambda: iter(left)
    world.bulk.discard = lambda found: discarded.append(found.name) is None
    assert world.sweep().counts["temporary"] == 1
    assert discarded == ["old"]


def test_a_sweep_of_one_namespace_leaves_the_leftovers_of_others_alone() -> None:
    mine, other = "ab" * 16, "cd" * 16
    left = [Unfinished(f"{name}/00", f"~{name}", 1, 0.0) for name in (mine, other)]
    bulk = MemoryStore()
    bulk.unfinished = lambda: list(left)
    bulk.discard = lambda found: left.remove(found) is None
    quarantined = {
        name: f"quarantine/{name}/00/{'0' * 40}/0.x.safetensors" for name in (mine, other)
    }
    for path in quarantined.values():
        bulk.put(path, b"corrupt")
    view = view_of(bulk, MemoryIndex())
    limits = SweepLimits(apply=True, grace_s=-1, put_s=0)
    pool = WorkPool(workers=1)
    pool.run(Sweep(view, walked(view, mine), limits).leftovers())
    assert {finding.key for finding in pool.counters.findings} == {
        f"{mine}/00/~{mine}", quarantined[mine],
    }  # fmt: skip
    assert [entry.key for entry in bulk.scan("quarantine/")] == [quarantined[other]]
    assert [one.key for one in left] == [f"{other}/00"]
    left.append(Unfinished(f"{other}/01", f"~{other}", 1, time.time()))
    pool.run(Sweep(view, walked(view), replace(limits, grace_s=60)).leftovers())
    assert pool.counters.counts["young"] == 2, "written and quarantined just now"


LEASE_S = 10


def test_calls_that_time_may_mend_are_repeated_for_a_while_and_refusals_and_scans_are_not() -> None:
    inner, slept = FlakyStore(MemoryStore()), list[float]()
    for key in "ab":
        inner.put(key, b"")
    store = retrying(inner, sleep=slept.append)
    inner.fail_next(StoreDenied("403"))
    with pytest.raises(StoreDenied):
        store.get("a")
    scan = store.scan("")
    next(scan)
    inner.fail_next(StoreUnavailable("gone"))
    with pytest.raises(StoreUnavailable):
        list(scan)
    assert not slept, "a scan that ends early would look whole"
    inner.fail_until_mended(StoreUnavailable("gone"))
    with pytest.raises(StoreUnavailable):
        store.get("a")
    assert PATIENCE_S <= sum(slept) < 2 * PATIENCE_S


class Race:
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


@pytest.mark.parametrize(("failures", "is_saved"), [(1, True), (3, True), (1, False)])
def test_a_delete_whose_answer_was_lost_is_done_and_not_repeated_on_what_was_saved_since(
    failures: int, is_saved: bool
) -> None:
    world = Race()
    world.lose_answers(failures)

    def sleep(pause_s: float) -> None:
        world.sleep(pause_s)
        if is_saved:
            world.clock.advance(LEASE_S)
            world.save(world.index)

    assert world.remove(sleep) == (not is_saved, is_saved)
    assert (len(world.slept), world.is_found()) == (1, (is_saved, is_saved))


@pytest.mark.parametrize("failures", [3, 10**9])
def test_a_delete_that_fails_is_done_in_the_end_or_an_error(failures: int) -> None:
    world, left = Race(), [failures]
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
    world = Race()
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
    world = Race()
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
