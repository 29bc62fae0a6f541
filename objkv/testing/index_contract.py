"""What every index promises, one test per promise; subclass it and give the fixtures.

``index`` is an empty ``PruneIndex``, ``clock`` what it reads the time from. An index whose time is
the server's own overrides ``pass_time`` to wait, with a ``short_s`` to wait for; ``put_garbage``
spoils a record.
"""

from dataclasses import replace
from functools import partial

from objkv.index.base import PruneIndex, Record
from objkv.testing.clock import ManualClock
from objkv.testing.find_contract import FindContract
from objkv.testing.index_samples import (
    FIELD,
    LONG_S,
    NAMESPACE,
    OTHER,
    OTHER_FIELD,
    at_once,
    chunk,
    get,
    prefix_hash,
    shard,
)
from objkv.testing.pin_contract import PinContract
from objkv.testing.usage_contract import UsageContract

THREADS = 12


class IndexContract(FindContract, PinContract, UsageContract):
    """Held to by every ``PruneIndex``."""

    def put_garbage(self, index: PruneIndex, number: int) -> None:
        """Put something under chunk ``number`` that no objkv wrote, where anybody else can."""

    def test_unknown_hashes_are_none(self, index: PruneIndex) -> None:
        assert index.lookup(NAMESPACE, [prefix_hash(1), prefix_hash(2)]) == [None, None]

    def test_looking_up_nothing_finds_nothing(self, index: PruneIndex) -> None:
        assert index.lookup(NAMESPACE, []) == []

    def test_what_was_published_is_found(self, index: PruneIndex) -> None:
        index.publish(chunk(7), {FIELD: shard()}, ttl_s=LONG_S)
        assert get(index, 7) == Record(
            prefix_hash=prefix_hash(7),
            parent_hash=prefix_hash(6),
            token_start=6 * 256,
            token_end=7 * 256,
            shards={FIELD: shard()},
        )

    def test_lookup_keeps_the_order_and_the_repetitions_of_its_question(
        self, index: PruneIndex
    ) -> None:
        for number in (1, 2, 3):
            index.publish(chunk(number), {FIELD: shard(number)}, ttl_s=LONG_S)
        found = index.lookup(NAMESPACE, [prefix_hash(n) for n in (3, 9, 1, 3)])
        assert [record and record.shards[FIELD].nbytes for record in found] == [3, None, 1, 3]

    def test_a_thousand_hashes_are_looked_up_at_once(self, index: PruneIndex) -> None:
        for number in range(0, 1000, 100):
            index.publish(chunk(number + 1), {FIELD: shard(number + 1)}, ttl_s=LONG_S)
        found = index.lookup(NAMESPACE, [prefix_hash(n + 1) for n in range(1000)])
        assert [n for n, record in enumerate(found) if record] == list(range(0, 1000, 100))

    def test_namespaces_do_not_see_each_other(self, index: PruneIndex) -> None:
        index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
        assert get(index, namespace=OTHER) is None
        assert list(index.scan(OTHER)) == []

    def test_publishing_again_adds_and_replaces_fields(self, index: PruneIndex) -> None:
        index.publish(chunk(), {FIELD: shard(1), OTHER_FIELD: shard(2)}, ttl_s=LONG_S)
        index.publish(chunk(), {OTHER_FIELD: shard(3), "1.L0-1_H0-1": shard(4)}, ttl_s=LONG_S)
        record = get(index)
        assert record is not None
        assert record.shards == {FIELD: shard(1), OTHER_FIELD: shard(3), "1.L0-1_H0-1": shard(4)}

    def test_concurrent_publishes_of_different_shards_all_stay(self, index: PruneIndex) -> None:
        fields = [f"0.L0-2_H{head}-{head + 1}" for head in range(THREADS)]
        at_once(
            [partial(index.publish, chunk(), {field: shard()}, ttl_s=LONG_S) for field in fields]
        )
        record = get(index)
        assert record is not None
        assert set(record.shards) == set(fields)

    def test_a_record_expires(self, index: PruneIndex, clock: ManualClock) -> None:
        index.publish(chunk(), {FIELD: shard()}, ttl_s=self.short_s)
        assert get(index) is not None
        self.pass_time(clock, self.short_s)
        assert get(index) is None
        assert list(index.scan(NAMESPACE)) == []
        assert index.namespaces() == []

    def test_what_expired_does_not_come_back_with_a_later_publish(
        self, index: PruneIndex, clock: ManualClock
    ) -> None:
        index.publish(chunk(), {FIELD: shard()}, ttl_s=self.short_s)
        index.touch(NAMESPACE, [prefix_hash(1)], ttl_s=self.short_s)
        self.pass_time(clock, self.short_s)
        index.publish(chunk(), {OTHER_FIELD: shard()}, ttl_s=LONG_S)
        record = get(index)
        assert record is not None
        assert (set(record.shards), record.hits) == ({OTHER_FIELD}, 0)

    def test_an_expired_record_can_be_neither_forgotten_nor_pinned_nor_dropped(
        self, index: PruneIndex, clock: ManualClock
    ) -> None:
        index.publish(chunk(), {FIELD: shard()}, ttl_s=self.short_s)
        self.pass_time(clock, self.short_s)
        assert not index.forget(NAMESPACE, prefix_hash(1), FIELD, shard())
        assert not index.pin(NAMESPACE, prefix_hash(1), until_s=int(clock()) + LONG_S, ttl_s=LONG_S)
        index.touch(NAMESPACE, [prefix_hash(1)], ttl_s=LONG_S)
        assert not index.drop(NAMESPACE, prefix_hash(1))
        assert get(index) is None

    def test_publishing_and_touching_renew_the_time_to_live(
        self, index: PruneIndex, clock: ManualClock
    ) -> None:
        for number in (1, 2):
            index.publish(chunk(number), {FIELD: shard()}, ttl_s=self.short_s)
        index.publish(chunk(1), {OTHER_FIELD: shard()}, ttl_s=LONG_S)
        index.touch(NAMESPACE, [prefix_hash(2)], ttl_s=LONG_S)
        self.pass_time(clock, self.short_s)
        assert get(index, 1) is not None
        assert get(index, 2) is not None

    def test_a_touch_counts_one_hit_for_each_record_that_exists(self, index: PruneIndex) -> None:
        for number in (1, 2):
            index.publish(chunk(number), {FIELD: shard()}, ttl_s=LONG_S)
        index.touch(NAMESPACE, [prefix_hash(n) for n in (1, 2, 1, 3)], ttl_s=LONG_S)
        index.touch(NAMESPACE, [prefix_hash(1)], ttl_s=LONG_S)
        index.touch(NAMESPACE, [], ttl_s=LONG_S)
        first, second, third = index.lookup(NAMESPACE, [prefix_hash(n) for n in (1, 2, 3)])
        assert first is not None
        assert second is not None
        assert (first.hits, second.hits) == (2, 1)
        assert first.touched_s > 0
        assert third is None

    def test_publishing_again_keeps_hits_and_pin(
        self, index: PruneIndex, clock: ManualClock
    ) -> None:
        index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
        index.touch(NAMESPACE, [prefix_hash(1)], ttl_s=LONG_S)
        index.pin(NAMESPACE, prefix_hash(1), until_s=int(clock()) + LONG_S, ttl_s=LONG_S)
        index.publish(chunk(), {OTHER_FIELD: shard()}, ttl_s=LONG_S)
        record = get(index)
        assert record is not None
        assert (record.hits, record.pinned) == (1, True)

    def test_forgetting_compares(self, index: PruneIndex) -> None:
        index.publish(chunk(), {FIELD: shard(), OTHER_FIELD: shard()}, ttl_s=LONG_S)
        rewritten = replace(shard(), header_checksum="f" * 32)
        assert not index.forget(NAMESPACE, prefix_hash(1), FIELD, rewritten)
        assert not index.forget(NAMESPACE, prefix_hash(1), "9.L0-2_H0-4", shard())
        assert not index.forget(NAMESPACE, prefix_hash(2), FIELD, shard())
        assert index.forget(NAMESPACE, prefix_hash(1), FIELD, shard())
        assert not index.forget(NAMESPACE, prefix_hash(1), FIELD, shard())
        record = get(index)
        assert record is not None
        assert set(record.shards) == {OTHER_FIELD}

    def test_of_many_who_forget_a_field_one_succeeds(self, index: PruneIndex) -> None:
        index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
        forget = partial(index.forget, NAMESPACE, prefix_hash(1), FIELD, shard())
        assert sorted(map(bool, at_once([forget] * THREADS))) == [False] * (THREADS - 1) + [True]

    def test_hits_touches_and_pins_do_not_count_when_forgetting(
        self, index: PruneIndex, clock: ManualClock
    ) -> None:
        index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
        index.touch(NAMESPACE, [prefix_hash(1)], ttl_s=LONG_S)
        index.pin(NAMESPACE, prefix_hash(1), until_s=int(clock()) + LONG_S, ttl_s=LONG_S)
        assert index.forget(NAMESPACE, prefix_hash(1), FIELD, shard())

    def test_a_record_without_fields_disappears_with_its_hits_and_pin(
        self, index: PruneIndex, clock: ManualClock
    ) -> None:
        index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
        index.touch(NAMESPACE, [prefix_hash(1)], ttl_s=LONG_S)
        index.pin(NAMESPACE, prefix_hash(1), until_s=int(clock()) + LONG_S, ttl_s=LONG_S)
        index.forget(NAMESPACE, prefix_hash(1), FIELD, shard())
        assert get(index) is None
        assert index.namespaces() == []
        index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
        record = get(index)
        assert record is not None
        assert (record.hits, record.pinned) == (0, False)

    def test_there_is_nothing_to_pin_or_drop_where_there_is_no_record(
        self, index: PruneIndex, clock: ManualClock
    ) -> None:
        assert not index.pin(NAMESPACE, prefix_hash(1), until_s=int(clock()) + LONG_S, ttl_s=LONG_S)
        assert not index.drop(NAMESPACE, prefix_hash(1))
        assert get(index) is None

    def test_dropping_removes_a_pinned_record_too(
        self, index: PruneIndex, clock: ManualClock
    ) -> None:
        index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
        index.pin(NAMESPACE, prefix_hash(1), until_s=int(clock()) + LONG_S, ttl_s=LONG_S)
        assert index.drop(NAMESPACE, prefix_hash(1))
        assert get(index) is None

    def test_a_scan_shows_every_record_of_the_namespace(self, index: PruneIndex) -> None:
        for number in range(1, 1201):
            index.publish(chunk(number), {FIELD: shard(), OTHER_FIELD: shard()}, ttl_s=LONG_S)
        index.publish(chunk(5000, OTHER), {FIELD: shard()}, ttl_s=LONG_S)
        found = {record.prefix_hash: record for record in index.scan(NAMESPACE)}
        assert set(found) == {prefix_hash(number) for number in range(1, 1201)}
        assert all(len(record.shards) == 2 for record in found.values())

    def test_a_scan_outlives_what_it_removes(self, index: PruneIndex) -> None:
        for number in range(1, 11):
            index.publish(chunk(number), {FIELD: shard()}, ttl_s=LONG_S)
        for record in index.scan(NAMESPACE):
            index.drop(NAMESPACE, record.prefix_hash)
        assert list(index.scan(NAMESPACE)) == []

    def test_namespaces_are_those_with_records_in_order(self, index: PruneIndex) -> None:
        assert index.namespaces() == []
        index.publish(chunk(1, OTHER), {FIELD: shard()}, ttl_s=LONG_S)
        index.publish(chunk(2, OTHER), {FIELD: shard()}, ttl_s=LONG_S)
        index.publish(chunk(1), {FIELD: shard()}, ttl_s=LONG_S)
        index.lease("a lease is no record", "me", ttl_ms=LONG_S * 1000)
        assert index.namespaces() == [NAMESPACE, OTHER]

    def test_of_many_who_lease_one_wins(self, index: PruneIndex) -> None:
        won = at_once(
            [partial(index.lease, "x", str(n), ttl_ms=LONG_S * 1000) for n in range(THREADS)]
        )
        assert sorted(map(bool, won)) == [False] * (THREADS - 1) + [True]

    def test_the_holder_of_a_lease_gets_it_again(self, index: PruneIndex) -> None:
        assert index.lease("x", "me", ttl_ms=LONG_S * 1000)
        assert index.lease("x", "me", ttl_ms=LONG_S * 1000)
        assert not index.lease("x", "you", ttl_ms=LONG_S * 1000)
        assert index.lease("y", "you", ttl_ms=LONG_S * 1000)

    def test_a_lease_ends_by_itself(self, index: PruneIndex, clock: ManualClock) -> None:
        assert index.lease("x", "me", ttl_ms=self.short_s * 1000)
        self.pass_time(clock, self.short_s)
        assert index.lease("x", "you", ttl_ms=LONG_S * 1000)

    def test_only_the_holder_gives_a_lease_back(self, index: PruneIndex) -> None:
        index.lease("x", "me", ttl_ms=LONG_S * 1000)
        index.release("x", "you")
        assert not index.lease("x", "you", ttl_ms=LONG_S * 1000)
        index.release("x", "me")
        index.release("x", "me")
        assert index.lease("x", "you", ttl_ms=LONG_S * 1000)

    def test_malformed_records_are_absent_and_can_be_replaced(self, index: PruneIndex) -> None:
        index.publish(chunk(2), {FIELD: shard()}, ttl_s=LONG_S)
        self.put_garbage(index, 1)
        assert index.lookup(NAMESPACE, [prefix_hash(1), prefix_hash(9)]) == [None, None]
        hashes = [prefix_hash(n) for n in (1, 2, 9)]
        assert index.find(NAMESPACE, hashes, [FIELD]) == [None, {FIELD: shard()}, None]
        assert index.find(NAMESPACE, hashes, [FIELD, OTHER_FIELD]) == [None, {FIELD: shard()}, None]
        assert [record.prefix_hash for record in index.scan(NAMESPACE)] == [prefix_hash(2)]
        assert not index.forget(NAMESPACE, prefix_hash(1), FIELD, shard())
        index.touch(NAMESPACE, [prefix_hash(1), prefix_hash(2)], ttl_s=LONG_S)
        index.publish(chunk(1), {FIELD: shard()}, ttl_s=LONG_S)
        record = get(index)
        assert record is not None
        assert record.shards == {FIELD: shard()}

    def test_a_healthy_index_passes_its_check(self, index: PruneIndex) -> None:
        index.check()

    def test_closing_twice_is_closing(self, index: PruneIndex) -> None:
        index.close()
        index.close()
