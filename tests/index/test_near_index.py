from dataclasses import replace

import pytest

from objkv.errors import StoreUnavailable
from objkv.index.memory import MemoryIndex
from objkv.index.near import SETTLE_S, NearIndex
from tests.contracts.clock import ManualClock
from tests.contracts.index_contract import (
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


FIELDS = [FIELD]


class Place:
    """A near cache, its inner index, and another replica's direct way to that index."""

    def __init__(self, records_max: int = 100, miss_ttl_s: float = 0.0) -> None:
        self.clock = ManualClock()
        self.far = MemoryIndex(clock=self.clock)
        self.inner = FlakyIndex(self.far)
        self.near = NearIndex(
            self.inner,
            records_max=records_max,
            ttl_s=30,
            miss_ttl_s=miss_ttl_s,
            clock=self.clock,
            fields=FIELDS,
        )
        for number in (1, 2, 3):
            self.far.publish(chunk(number), {FIELD: shard()}, ttl_s=LONG_S)
        self.clock.advance(SETTLE_S)

    def found(self, *hashes: bytes) -> list[bool]:
        return [shards is not None for shards in self.near.find(NAMESPACE, hashes, FIELDS)]


@pytest.fixture
def place() -> Place:
    return Place()


@pytest.fixture
def doubting() -> Place:
    """One that remembers absence for a second."""
    return Place(miss_ttl_s=1.0)


def test_what_was_found_is_not_asked_again(place: Place) -> None:
    assert place.found(FIRST, SECOND) == [True, True]
    assert place.found(SECOND, FIRST, SECOND) == [True, True, True]
    assert place.inner.calls == ("find",)


def test_only_what_is_not_kept_is_asked_in_one_call(place: Place) -> None:
    place.found(SECOND)
    asked = []
    place.far.find = lambda _, hashes, fields: asked.append(list(hashes)) or [None] * len(hashes)  # type: ignore[assignment, func-returns-value]
    assert place.found(FIRST, SECOND, THIRD) == [False, True, False]
    assert asked == [[FIRST, THIRD]]


def test_order_and_unknown_hashes_are_kept_apart(place: Place) -> None:
    place.found(SECOND)
    place.far.publish(chunk(3), {FIELD: shard(3)}, ttl_s=LONG_S)
    found = place.near.find(NAMESPACE, [THIRD, prefix_hash(9), SECOND], FIELDS)
    assert found == [{FIELD: shard(3)}, None, {FIELD: shard()}]


def test_without_a_time_for_it_absence_is_not_remembered(place: Place) -> None:
    assert place.found(prefix_hash(9)) == [False]
    place.far.publish(chunk(9), {FIELD: shard()}, ttl_s=LONG_S)
    assert place.found(prefix_hash(9)) == [True]


def test_many_requests_with_one_new_prompt_ask_once(doubting: Place) -> None:
    prompt = [FIRST, *(prefix_hash(number) for number in (9, 10, 11))]
    for _ in range(5):
        assert doubting.found(*prompt) == [True, False, False, False]
    assert doubting.inner.calls == ("find",)


def test_absence_is_believed_for_a_moment_only(doubting: Place) -> None:
    assert doubting.found(prefix_hash(9)) == [False]
    doubting.far.publish(chunk(9), {FIELD: shard()}, ttl_s=LONG_S)
    doubting.clock.advance(0.9)
    assert doubting.found(prefix_hash(9)) == [False]
    doubting.clock.advance(0.1)
    assert doubting.found(prefix_hash(9)) == [True]


def test_what_is_not_kept_before_a_missing_chunk_is_asked_for(doubting: Place) -> None:
    nine = prefix_hash(9)
    doubting.found(nine)
    doubting.found(FIRST)
    assert doubting.found(FIRST, SECOND, nine, THIRD) == [True, True, False, False]


def test_a_chunk_that_is_published_or_about_to_be_is_no_longer_missing(doubting: Place) -> None:
    nine, ten = prefix_hash(9), prefix_hash(10)
    assert doubting.found(nine) == [False]
    doubting.near.publish(chunk(9), {FIELD: shard()}, ttl_s=LONG_S)
    assert doubting.found(nine, ten) == [True, False]
    doubting.near.invalidate(NAMESPACE, nine, ten)
    doubting.far.publish(chunk(10), {FIELD: shard()}, ttl_s=LONG_S)
    assert doubting.found(nine, ten) == [True, True]


def test_absence_that_a_lookup_in_flight_brings_is_not_believed_after_a_save(
    doubting: Place,
) -> None:
    nine = prefix_hash(9)
    doubting.inner.after = lambda: doubting.near.invalidate(NAMESPACE, nine)
    doubting.found(nine)
    doubting.far.publish(chunk(9), {FIELD: shard()}, ttl_s=LONG_S)
    assert doubting.found(nine) == [True]


def test_no_more_missing_chunks_are_remembered_than_records() -> None:
    place = Place(records_max=2, miss_ttl_s=1.0)
    for number in range(9, 14):
        place.found(prefix_hash(number))
    assert len(place.near._book.missing) == 2


def test_nothing_of_a_lookup_in_flight_is_kept_after_all_was_cleared(doubting: Place) -> None:
    """Weights changed meanwhile, say."""
    doubting.inner.after = doubting.near.clear
    assert doubting.found(FIRST, prefix_hash(9)) == [True, False]
    doubting.inner.after = lambda: None
    doubting.far.drop(NAMESPACE, FIRST)
    doubting.far.publish(chunk(9), {FIELD: shard()}, ttl_s=LONG_S)
    assert doubting.found(FIRST) == [False]
    assert doubting.found(prefix_hash(9)) == [True]


def test_what_is_asked_with_other_fields_is_neither_kept_nor_answered_from_what_is(
    place: Place,
) -> None:
    place.found(FIRST)
    for _ in range(2):
        assert place.near.find(NAMESPACE, [FIRST], [OTHER_FIELD]) == [None]
        assert place.near.find(NAMESPACE, [FIRST], [FIELD, OTHER_FIELD]) == [{FIELD: shard()}]
    assert place.inner.calls == ("find",) * 5


def test_a_record_that_lacks_what_is_needed_is_asked_for_until_it_has_it(place: Place) -> None:
    near = NearIndex(
        place.inner,
        records_max=8,
        ttl_s=30,
        clock=place.clock,
        fields=frozenset({FIELD, OTHER_FIELD}),
    )
    both = [FIELD, OTHER_FIELD]
    assert near.find(NAMESPACE, [FIRST], both) == [{FIELD: shard()}]
    place.far.publish(chunk(1), {OTHER_FIELD: shard()}, ttl_s=LONG_S)
    place.clock.advance(SETTLE_S)
    for _ in range(2):
        assert near.find(NAMESPACE, [FIRST], both) == [{FIELD: shard(), OTHER_FIELD: shard()}]
    assert place.inner.calls == ("find", "find")


def test_namespaces_are_kept_apart(place: Place) -> None:
    place.found(FIRST)
    assert place.near.find(OTHER, [FIRST], FIELDS) == [None]
    place.far.publish(chunk(1, OTHER), {FIELD: shard(1)}, ttl_s=LONG_S)
    assert place.near.find(OTHER, [FIRST], FIELDS) == [{FIELD: shard(1)}]
    assert place.near.find(NAMESPACE, [FIRST], FIELDS) == [{FIELD: shard()}]


def test_records_are_believed_for_a_while_only(place: Place) -> None:
    place.found(FIRST)
    place.far.drop(NAMESPACE, FIRST)
    place.clock.advance(29)
    assert place.found(FIRST) == [True]
    place.clock.advance(1)
    assert place.found(FIRST) == [False]


def test_the_time_counts_from_when_it_was_asked_for(doubting: Place) -> None:
    """The index may have answered at once, and the answer may have been long on its way."""
    doubting.inner.after = lambda: doubting.clock.advance(1)
    assert doubting.found(FIRST, prefix_hash(9)) == [True, False]
    doubting.inner.after = lambda: None
    doubting.far.drop(NAMESPACE, FIRST)
    doubting.far.publish(chunk(9), {FIELD: shard()}, ttl_s=LONG_S)
    assert doubting.found(FIRST, prefix_hash(9)) == [True, True]
    doubting.clock.advance(29)
    assert doubting.found(FIRST) == [False]


def test_a_fresh_record_is_not_kept_because_other_ranks_may_add_to_it(place: Place) -> None:
    now = int(place.clock())
    young = {FIELD: replace(shard(), created_s=now)}
    place.far.publish(chunk(), young, ttl_s=LONG_S)
    place.found(FIRST)
    place.found(FIRST)
    assert place.inner.calls == ("find", "find")
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
    assert place.inner.calls == ("find",) * 3
    place.found(FIRST)
    place.found(THIRD)
    assert place.inner.calls == ("find",) * 3
    place.found(SECOND)
    assert place.inner.calls == ("find",) * 4


def test_without_room_everything_is_asked() -> None:
    place = Place(records_max=0)
    assert place.found(FIRST) == [True]
    assert place.found(FIRST) == [True]
    assert place.inner.calls == ("find",) * 2


def test_publishing_and_forgetting_are_seen_at_once(place: Place) -> None:
    place.found(FIRST)
    place.near.publish(chunk(), {FIELD: shard(1)}, ttl_s=LONG_S)
    assert place.near.find(NAMESPACE, [FIRST], FIELDS) == [{FIELD: shard(1)}]
    assert place.near.forget(NAMESPACE, FIRST, FIELD, shard(1))
    assert place.found(FIRST) == [False]


def test_a_ghost_is_not_answered_again_although_the_index_cannot_be_told(place: Place) -> None:
    place.found(FIRST)
    place.inner.error = StoreUnavailable("down")
    with pytest.raises(StoreUnavailable):
        place.near.forget(NAMESPACE, FIRST, FIELD, shard())
    with pytest.raises(StoreUnavailable):
        place.found(FIRST)


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
    assert repr(NearIndex(place.far, records_max=8, ttl_s=0.5, fields=FIELDS)) == (
        "<NearIndex 0/8 records for 0.5 s, of <MemoryIndex 3 records, 0 leases>>"
    )
    assert repr(place.near).startswith("<NearIndex 2/100 records for 30 s")


def test_a_clock_that_is_set_back_keeps_nothing_believed_for_longer(doubting: Place) -> None:
    absent = prefix_hash(4)
    assert doubting.found(FIRST, absent) == [True, False]
    doubting.far.publish(chunk(4), {FIELD: shard()}, ttl_s=LONG_S)
    doubting.far.drop(NAMESPACE, FIRST)
    assert doubting.found(FIRST, absent) == [True, False]
    doubting.clock.advance(-3600)
    assert doubting.found(FIRST, absent) == [False, True]
