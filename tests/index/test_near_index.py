import pytest

from objkv.errors import StoreUnavailable
from objkv.index.memory import MemoryIndex
from objkv.index.near import SETTLE_S, NearIndex
from objkv.testing.clock import ManualClock
from objkv.testing.index_samples import (
    FIELD,
    LONG_S,
    NAMESPACE,
    OTHER,
    OTHER_FIELD,
    at_once,
    chunk,
    prefix_hash,
    shard,
)
from tests.index.flaky_index import FlakyIndex

FIRST, SECOND, THIRD = (prefix_hash(number) for number in (1, 2, 3))


class Place:
    """A near-cache, what is behind it, and a second way to that, as another replica has it."""

    def __init__(self, records_max: int = 100) -> None:
        self.clock = ManualClock()
        self.far = MemoryIndex(clock=self.clock)
        self.inner = FlakyIndex(self.far)
        self.near = NearIndex(self.inner, records_max=records_max, ttl_s=30, clock=self.clock)
        for number in (1, 2, 3):
            self.far.publish(chunk(number), {FIELD: shard()}, ttl_s=LONG_S)
        self.clock.advance(SETTLE_S)

    def found(self, *hashes: bytes) -> list[bool]:
        return [record is not None for record in self.near.lookup(NAMESPACE, hashes)]


@pytest.fixture
def place() -> Place:
    return Place()


def test_what_was_found_is_not_asked_again(place: Place) -> None:
    assert place.found(FIRST, SECOND) == [True, True]
    assert place.found(SECOND, FIRST, SECOND) == [True, True, True]
    assert place.inner.calls == ("lookup",)


def test_only_what_is_not_kept_is_asked_in_one_call(place: Place) -> None:
    place.found(SECOND)
    asked = []
    place.far.lookup = lambda namespace, hashes: asked.append(list(hashes)) or [None] * len(hashes)  # type: ignore[assignment, func-returns-value]
    assert place.found(FIRST, SECOND, THIRD) == [False, True, False]
    assert asked == [[FIRST, THIRD]]


def test_order_and_unknown_hashes_are_kept_apart(place: Place) -> None:
    place.found(SECOND)
    records = place.near.lookup(NAMESPACE, [THIRD, prefix_hash(9), SECOND, FIRST])
    assert [record and record.prefix_hash for record in records] == [THIRD, None, SECOND, FIRST]


def test_absence_is_not_remembered(place: Place) -> None:
    assert place.found(prefix_hash(9)) == [False]
    place.far.publish(chunk(9), {FIELD: shard()}, ttl_s=LONG_S)
    assert place.found(prefix_hash(9)) == [True]


def test_a_record_that_lacks_what_is_needed_is_asked_for_until_it_has_it(place: Place) -> None:
    near = NearIndex(
        place.inner,
        records_max=8,
        ttl_s=30,
        clock=place.clock,
        fields=frozenset({FIELD, OTHER_FIELD}),
    )
    near.lookup(NAMESPACE, [FIRST])
    place.far.publish(chunk(1), {OTHER_FIELD: shard()}, ttl_s=LONG_S)
    place.clock.advance(SETTLE_S)
    (record,) = near.lookup(NAMESPACE, [FIRST])
    assert record is not None
    assert OTHER_FIELD in record.shards
    near.lookup(NAMESPACE, [FIRST])
    assert place.inner.calls == ("lookup", "lookup")


def test_namespaces_are_kept_apart(place: Place) -> None:
    place.found(FIRST)
    assert place.near.lookup(OTHER, [FIRST]) == [None]


def test_records_are_believed_for_a_while_only(place: Place) -> None:
    place.found(FIRST)
    place.far.drop(NAMESPACE, FIRST)
    place.clock.advance(29)
    assert place.found(FIRST) == [True]
    place.clock.advance(1)
    assert place.found(FIRST) == [False]


def test_a_fresh_record_is_not_kept_because_other_ranks_may_add_to_it(place: Place) -> None:
    now = int(place.clock())
    young = {FIELD: shard(), OTHER_FIELD: shard().__class__(1, 1, "none", False, "f" * 32, now)}
    place.far.publish(chunk(), young, ttl_s=LONG_S)
    place.found(FIRST)
    place.found(FIRST)
    assert place.inner.calls == ("lookup", "lookup")
    place.clock.advance(SETTLE_S)
    place.found(FIRST)
    place.found(FIRST)
    assert len(place.inner.calls) == 3


def test_the_least_used_goes_first() -> None:
    place = Place(records_max=2)
    place.found(FIRST)
    place.found(SECOND)
    place.found(FIRST)
    place.found(THIRD)
    assert place.inner.calls == ("lookup",) * 3
    place.found(FIRST)
    place.found(THIRD)
    assert place.inner.calls == ("lookup",) * 3
    place.found(SECOND)
    assert place.inner.calls == ("lookup",) * 4


def test_without_room_everything_is_asked() -> None:
    place = Place(records_max=0)
    assert place.found(FIRST) == [True]
    assert place.found(FIRST) == [True]
    assert place.inner.calls == ("lookup",) * 2


def test_publishing_and_forgetting_are_seen_at_once(place: Place) -> None:
    place.found(FIRST)
    place.near.publish(chunk(), {OTHER_FIELD: shard()}, ttl_s=LONG_S)
    (record,) = place.near.lookup(NAMESPACE, [FIRST])
    assert record is not None
    assert set(record.shards) == {FIELD, OTHER_FIELD}
    assert place.near.forget(NAMESPACE, FIRST, FIELD, shard())
    assert place.near.forget(NAMESPACE, FIRST, OTHER_FIELD, shard())
    assert place.found(FIRST) == [False]


def test_a_ghost_is_not_answered_again_although_the_index_cannot_be_told(place: Place) -> None:
    place.found(FIRST)
    place.inner.error = StoreUnavailable("down")
    with pytest.raises(StoreUnavailable):
        place.near.forget(NAMESPACE, FIRST, FIELD, shard())
    with pytest.raises(StoreUnavailable):
        place.near.lookup(NAMESPACE, [FIRST])


def test_invalidating_also_stops_what_a_lookup_in_flight_brings(place: Place) -> None:
    place.inner.after = lambda: place.near.invalidate(NAMESPACE, FIRST)
    assert place.found(FIRST, SECOND) == [True, True]
    place.inner.after = lambda: None
    place.far.drop(NAMESPACE, FIRST)
    place.far.drop(NAMESPACE, SECOND)
    assert place.found(FIRST, SECOND) == [False, True]
    assert place.near._asking == []


def test_kept_records_need_no_index(place: Place) -> None:
    place.found(FIRST)
    place.inner.error = StoreUnavailable("down")
    assert place.found(FIRST) == [True]
    with pytest.raises(StoreUnavailable):
        place.found(FIRST, SECOND)


def test_the_rest_goes_to_the_inner_index(place: Place) -> None:
    place.near.touch(NAMESPACE, [FIRST], ttl_s=LONG_S)
    assert place.near.namespaces() == [NAMESPACE]
    assert len(list(place.near.scan(NAMESPACE))) == 3
    assert place.near.lease("x", "me", ttl_ms=1000)
    assert not place.near.lease("x", "you", ttl_ms=1000)
    place.near.release("x", "me")
    assert place.near.lease("x", "you", ttl_ms=1000)
    place.near.check()
    place.near.close()


def test_many_threads_may_ask_and_invalidate() -> None:
    place = Place(records_max=2)

    def work() -> None:
        for _ in range(200):
            assert place.found(FIRST, SECOND, THIRD) == [True] * 3
            place.near.invalidate(NAMESPACE, SECOND)

    at_once([work] * 4)


def test_repr_tells_how_full_it_is(place: Place) -> None:
    place.found(FIRST, SECOND)
    assert repr(NearIndex(place.far, records_max=8, ttl_s=0.5)) == (
        "<NearIndex 0/8 records for 0.5 s, of <MemoryIndex 3 records, 0 leases>>"
    )
    assert repr(place.near).startswith("<NearIndex 2/100 records for 30 s")
