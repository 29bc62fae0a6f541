"""What verifying does while somebody writes, and in which order it takes payloads out of use. That
it finds what is there: ``tests/cli/test_upkeep.py``."""

from dataclasses import replace
from threading import Event, Thread

import pytest

from objkv.assembly.backends import Backends
from objkv.cache.bulk_index import BulkIndex
from objkv.errors import StoreUnavailable
from objkv.index.base import ChunkEntry
from objkv.keys.chunk import ChunkKey
from objkv.ops.backends_view import record_keys, retrying
from objkv.ops.runs import Counters
from objkv.ops.verify import LARGE_BYTES, RECORDED, Budget, Checker, Verify, choose_sample
from tests.contracts.damage import DamagedStore, Defects
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.samples import view_of, walked


class World:
    """Both ends in memory, and a hot store; one payload of a kind besides some good ones."""

    def __init__(self, **defects: int) -> None:
        self.bulk, self.hot, self.index = MemoryStore(), MemoryStore(), MemoryIndex()
        maker = DamagedStore(Backends(self.bulk, self.hot, self.index))
        self.planted = maker.plant(Defects(good=3, **defects))
        self.view = view_of(self.bulk, self.index, self.hot, lease_ms=1000)

    def key(self, kind: str) -> ChunkKey:
        return ChunkKey.parse(self.planted[kind][0])

    def verify(self, key: ChunkKey) -> Counters:
        work = Verify(self.view, {}, quarantine=True, budget=Budget(1 << 20))
        counters = Counters()
        for unit in work.sample([key]):
            unit.work(counters, lambda items=1: None)
        for unit in list(work.settle(counters)):
            unit.work(counters, lambda items=1: None)
        return counters

    def mend(self, key: ChunkKey) -> None:
        """What a saver does whose load found the payload corrupt."""
        good = DamagedStore(Backends(MemoryStore(), None, MemoryIndex()))
        good.plant(Defects(good=40))
        payload = good._ends.bulk.get(key.path())
        assert payload is not None
        self.bulk.put(key.path(), payload)


def test_what_is_mended_or_forgotten_while_it_is_checked_is_no_finding() -> None:
    def meanwhile(_: float) -> None:
        if how == "mended":
            world.mend(key)
        else:
            world.index.drop(key.namespace, key.prefix_hash)

    for how, verdict in (("mended", "ok"), ("forgotten", "changed")):
        world = World(frame=1)
        key = world.key("frame")
        checked, record = Checker(world.view, Budget(1 << 20), sleep=meanwhile).check(key, None)
        assert (checked.verdict, record is None) == (verdict, how == "forgotten")
    check = Checker(
        World(frame=1).view, Budget(1), sleep=lambda _: pytest.fail("slept"), clock=lambda: 4e9
    ).check
    assert check(key, None)[0].verdict == "corrupt", "what was written long ago is not waited for"


def test_quarantine_copies_then_forgets_then_deletes() -> None:
    world = World(frame=1)
    key, order = world.key("frame"), []
    bad = world.bulk.get(key.path())
    forget, put, delete = world.index.forget, world.bulk.put, world.bulk.delete
    world.index.forget = lambda *told: order.append("forget") or forget(*told)
    world.bulk.put = lambda path, value: order.append(f"put {path}") or put(path, value)
    world.bulk.delete = lambda path: order.append("delete") or delete(path)
    assert world.verify(key).counts["quarantined"] == 1
    assert order == [f"put quarantine/{key.path()}", "forget", "delete"]
    assert world.bulk.get(f"quarantine/{key.path()}") == bad
    assert world.index.lookup(key.namespace, [key.prefix_hash]) == [None]
    assert world.index.lease(key.path(), "saver", ttl_ms=1), "no lease is kept"


def own_index(**defects: int) -> World:
    """A folder that is its own index: its leases keep nobody out."""
    world = World(**defects)
    world.view = replace(world.view, hot=None, index=BulkIndex(world.bulk), is_own_index=True)
    return world


@pytest.mark.parametrize("moment", ["get", "put"])
def test_what_is_mended_although_there_is_a_lease_stays(moment: str) -> None:
    world = own_index(frame=1)
    key, times = world.key("frame"), 0
    real = getattr(world.bulk, moment)
    # Two looks, one more with the lease, and the fourth get is of what is to be copied.
    before = {"get": 4, "put": 1}[moment]

    def meddled(path: str, *value: bytes) -> object:
        nonlocal times
        times += path.endswith(key.path())
        if times == before and path.endswith(key.path()):
            times += 1
            setattr(world.bulk, moment, real)
            world.mend(key)
        return real(path, *value)

    setattr(world.bulk, moment, meddled)
    assert world.verify(key).counts["quarantined"] == 0
    assert times > before
    assert world.verify(key).counts["ok"] == 1
    if moment == "get":
        assert world.bulk.head(f"quarantine/{key.path()}") is None


@pytest.mark.parametrize(("held", "is_forgotten"), [(1, False), (2, True)])
def test_who_has_lost_the_lease_gives_up(held: int, is_forgotten: bool) -> None:
    world = World(frame=1)
    key, lease, asked = world.key("frame"), world.index.lease, 0

    def lost(name: str, owner: str, *, ttl_ms: int) -> bool:
        nonlocal asked
        asked += 1
        if asked > held:  # it took too long, and a saver came
            world.index.release(name, owner)
            lease(name, "saver", ttl_ms=ttl_ms)
        return lease(name, owner, ttl_ms=ttl_ms)

    world.index.lease = lost  # type: ignore[method-assign]
    assert world.verify(key).counts["quarantined"] == 0
    assert world.bulk.head(key.path()) is not None
    assert (world.index.lookup(key.namespace, [key.prefix_hash]) == [None]) is is_forgotten


@pytest.mark.parametrize("is_mended", [False, True])
def test_a_delete_whose_answer_was_lost_is_not_repeated_blindly(
    monkeypatch: pytest.MonkeyPatch, is_mended: bool
) -> None:
    monkeypatch.setattr("objkv.ops.backends_view.time.sleep", lambda _: None)
    world = own_index(frame=1)
    key, delete, deletes = world.key("frame"), world.bulk.delete, 0

    def lost(path: str) -> bool:
        nonlocal deletes
        deletes += 1
        delete(path)
        if is_mended:
            world.mend(key)
        raise StoreUnavailable("the answer was lost")

    world.bulk.delete = lost  # type: ignore[method-assign]
    world.view = replace(world.view, bulk=retrying(world.bulk, sleep=lambda _: None))
    assert world.verify(key).counts["quarantined"] == (not is_mended)
    assert deletes == 1
    assert (world.bulk.head(key.path()) is not None) is is_mended


def test_what_a_saver_holds_is_left_to_it() -> None:
    world = World(frame=1)
    key = world.key("frame")
    world.index.lease(key.path(), "saver", ttl_ms=100_000)
    counts = world.verify(key).counts
    assert (counts["corrupt"], counts["quarantined"]) == (1, 0)
    assert world.bulk.get(key.path()) is not None


def test_what_changes_before_the_lease_is_not_taken_away() -> None:
    world = World(frame=1)
    key, lease = world.key("frame"), world.index.lease

    def mended_before(name: str, owner: str, *, ttl_ms: int) -> bool:
        world.mend(key)
        return lease(name, owner, ttl_ms=ttl_ms)

    world.index.lease = mended_before  # type: ignore[method-assign]
    assert world.verify(key).counts["quarantined"] == 0
    assert world.bulk.get(key.path()) is not None
    assert world.index.lookup(key.namespace, [key.prefix_hash]) != [None]


def test_a_wrong_hot_copy_goes_and_the_record_says_so() -> None:
    world = World(hot=1)
    key = world.key("hot")
    assert world.verify(key).counts["mended"] == 1
    assert world.hot.get(key.path()) is None
    [record] = world.index.lookup(key.namespace, [key.prefix_hash])
    assert record is not None
    assert not record.shards[key.field].hot
    assert world.verify(key).counts["ok"] == 1
    evicted = World(hot=1)
    evicted.hot.delete(key.path())
    assert evicted.verify(key).counts["ok"] == 1


def test_what_is_absurdly_long_is_not_read() -> None:
    world = World(frame=1)
    key = world.key("frame")
    head, get = world.bulk.head, world.bulk.get

    def get_part(path: str, start: int = 0, end: int | None = None) -> bytes | None:
        assert end is not None, "read it all"
        return get(path, start, end)

    world.bulk.head = lambda path: replace(head(path), nbytes=LARGE_BYTES + 1)
    world.bulk.get = get_part
    checked, _ = Checker(world.view, Budget(1), clock=lambda: 4e9).check(key, None)
    assert checked.verdict == "corrupt"
    assert "but the header states" in checked.detail


def test_threads_share_the_memory_and_what_needs_all_has_it_alone() -> None:
    budget, inside, leave = Budget(100), Event(), Event()

    def take() -> None:
        with budget.taking(60):
            inside.set()
            leave.wait(120)

    thread = Thread(target=take)
    thread.start()
    assert inside.wait(120)
    with budget.taking(40):
        pass
    other = Thread(target=lambda: budget.taking(1000).__enter__())
    other.start()
    other.join(0.05)
    assert other.is_alive(), "it waits until nobody has any"
    leave.set()
    other.join(120)
    thread.join(120)
    assert not other.is_alive()


def test_a_sample_is_of_different_payloads_with_a_record() -> None:
    world = World()
    DamagedStore(Backends(world.bulk, None, world.index), seed=5).plant(Defects(good=7, orphan=3))
    inventory = walked(world.view).inventory
    known = {
        key
        for record in world.index.scan(world.planted.namespace)
        for key in record_keys(world.planted.namespace, record)
    }
    for size, number in ((2, 2), (50, 10)):
        found = choose_sample(inventory, RECORDED, size)
        assert len({*found}) == len(found) == number
        assert {*found} <= known
    assert len({tuple(choose_sample(inventory, RECORDED, 5)) for _ in range(30)}) > 1


def test_a_record_of_nothing_is_no_key() -> None:
    world = World()
    entry = ChunkEntry("f" * 32, bytes(20), bytes(20), 0, 16)
    [record] = [one for one in world.index.scan(world.planted.namespace) if one.nbytes][:1]
    shard = next(iter(record.shards.values()))
    world.index.publish(entry, {"0.nonsense": shard, "x.L0-1_H0-1": shard}, ttl_s=10)
    inventory = walked(world.view, "f" * 32).inventory
    assert choose_sample(inventory, RECORDED, 5) == []
