"""Contract tests for every index, one test per promise. Subclass ``IndexContract`` and add the
fixtures.

``index`` is an empty ``PruneIndex``, and ``clock`` is the time that it uses. If the index uses the
server's own time, override ``pass_time`` to wait, and set ``short_s`` to a time that a test can
wait for. Override ``put_garbage`` to corrupt a record.
"""

from dataclasses import replace

import pytest

from objkv.index.base import ChunkEntry, Lease, PruneIndex, Record, Savings, ShardRecord, Usage
from objkv.keys.chunk import payload_path
from tests.contracts.clock import ManualClock
from tests.contracts.store_contract import at_once

LONG_S = 1_000
"""A time to live that outlasts every test."""
NAMESPACE = "0123456789abcdef0123456789abcdef"
OTHER = "fedcba9876543210fedcba9876543210"
FIELD = "0"
OTHER_FIELD = "0.L0-2_H4-8"
THREADS = 12


def prefix_hash(number: int) -> bytes:
    return number.to_bytes(20, "big")


def chunk(number: int = 1, namespace: str = NAMESPACE) -> ChunkEntry:
    """Return the entry of chunk ``number``, which follows chunk ``number - 1``."""
    return ChunkEntry(
        namespace=namespace,
        prefix_hash=prefix_hash(number),
        parent_hash=prefix_hash(number - 1),
        token_start=(number - 1) * 256,
        token_end=number * 256,
    )


def shard(nbytes: int = 4096) -> ShardRecord:
    """Return a shard record that differs from those of other sizes."""
    return ShardRecord(
        nbytes=nbytes,
        raw_bytes=nbytes - 1,
        is_plain=True,
        hot=nbytes % 2 == 0,
        header_checksum=f"{nbytes:016x}",
        created_s=1_700_000_000,
    )


def get(index: PruneIndex, number: int = 1, namespace: str = NAMESPACE) -> Record | None:
    return index.lookup(namespace, [prefix_hash(number)])[0]


def the(index: PruneIndex, number: int = 1) -> Record:
    record = get(index, number)
    assert record is not None
    return record


def usage(index: PruneIndex) -> dict[str, tuple[int, int]]:
    return {one.namespace: (one.nbytes, one.payloads) for one in index.usage()}


class IndexContract:
    short_s = 100
    """A time to live that ends within ``pass_time``, but not during any other part of a test."""

    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock()

    def pass_time(self, clock: ManualClock, seconds: float) -> None:
        clock.advance(seconds)

    def put_garbage(self, index: PruneIndex, number: int) -> None:
        """Store something under chunk ``number`` that objkv never writes, if other programs could
        do so."""

    def test_what_was_published_is_found_and_nothing_else(self, index: PruneIndex) -> None:
        index.publish(chunk(7), {FIELD: shard()}, ttl_s=LONG_S)
        assert index.lookup(NAMESPACE, [prefix_hash(1), prefix_hash(2)]) == [None, None]
        assert index.lookup(NAMESPACE, []) == index.find(NAMESPACE, [], [FIELD]) == []
        assert index.find(NAMESPACE, [prefix_hash(7)], []) == [None]
        assert get(index, 7, OTHER) is None
        assert index.find(OTHER, [prefix_hash(7)], [FIELD]) == [None]
        assert list(index.scan(OTHER)) == []
        assert get(index, 7) == Record(
            prefix_hash=prefix_hash(7),
            parent_hash=prefix_hash(6),
            token_start=6 * 256,
            token_end=7 * 256,
            shards={FIELD: shard()},
        )

    def test_answers_keep_the_order_and_the_repetitions_of_their_question(
        self, index: PruneIndex
    ) -> None:
        for number in (1, 2, 3):
            index.publish(chunk(number), {FIELD: shard(number)}, ttl_s=LONG_S)
        hashes = [prefix_hash(n) for n in (3, 9, 1, 3)]
        records = index.lookup(NAMESPACE, hashes)
        assert [record and record.shards[FIELD].nbytes for record in records] == [3, None, 1, 3]
        found = index.find(NAMESPACE, hashes, [FIELD])
        assert [shards and shards[FIELD].nbytes for shards in found] == [3, None, 1, 3]

    def test_publishing_again_adds_and_replaces_fields_and_each_counts_once(
        self, index: PruneIndex
    ) -> None:
        for _ in range(2):
            index.publish(chunk(), {FIELD: shard(1), OTHER_FIELD: shard(2)}, ttl_s=LONG_S)
            assert usage(index) == {NAMESPACE: (3, 2)}
        index.publish(chunk(), {OTHER_FIELD: shard(3), "1.L0-1_H0-1": shard(4)}, ttl_s=LONG_S)
        assert usage(index) == {NAMESPACE: (8, 3)}
        assert the(index).shards == {
            FIELD: shard(1),
            OTHER_FIELD: shard(3),
            "1.L0-1_H0-1": shard(4),
        }

    def test_concurrent_publishes_of_different_shards_all_stay_and_count(
        self, index: PruneIndex
    ) -> None:
        fields = [f"0.L0-2_H{head}-{head + 1}" for head in range(THREADS)]
        at_once(THREADS, lambda n: index.publish(chunk(), {fields[n]: shard(9)}, ttl_s=LONG_S))
        assert set(the(index).shards) == set(fields)
        assert usage(index) == {NAMESPACE: (9 * THREADS, THREADS)}

    def test_a_record_expires(self, index: PruneIndex, clock: ManualClock) -> None:
        index.publish(chunk(), {FIELD: shard()}, ttl_s=self.short_s)
        assert get(index) is not None
        assert index.find(NAMESPACE, [prefix_hash(1)], [FIELD]) == [{FIELD: shard()}]
        self.pass_time(clock, self.short_s)
        assert get(index) is None
        assert index.find(NAMESPACE, [prefix_hash(1)], [FIELD]) == [None]
        assert list(index.scan(NAMESPACE)) == []
        assert index.namespaces() == []

    def test_what_expired_does_not_come_back_with_a_later_publish(
        self, index: PruneIndex, clock: ManualClock
    ) -> None:
        index.publish(chunk(), {FIELD: shard()}, ttl_s=self.short_s)
        index.touch(NAMESPACE, [prefix_hash(1)], ttl_s=self.short_s)
        self.pass_time(clock, self.short_s)
        index.publish(chunk(), {OTHER_FIELD: shard()}, ttl_s=LONG_S)
        record = the(index)
        assert (set(record.shards), record.hits) == ({OTHER_FIELD}, 0)

    def test_a_missing_or_expired_record_can_be_neither_forgotten_nor_pinned_nor_dropped(
        self, index: PruneIndex, clock: ManualClock
    ) -> None:
        for _ in ("missing", "expired"):
            until_s = int(clock()) + LONG_S
            assert not index.forget(NAMESPACE, prefix_hash(1), FIELD, shard())
            assert not index.pin(NAMESPACE, prefix_hash(1), until_s=until_s, ttl_s=LONG_S)
            index.touch(NAMESPACE, [prefix_hash(1)], ttl_s=LONG_S)
            assert not index.drop(NAMESPACE, prefix_hash(1))
            assert get(index) is None
            index.publish(chunk(), {FIELD: shard()}, ttl_s=self.short_s)
            self.pass_time(clock, self.short_s)

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
        assert (the(index, 1).hits, the(index, 2).hits, get(index, 3)) == (2, 1, None)
        assert the(index).touched_s > 0

    def test_publishing_again_keeps_hits_and_pin(
        self, index: PruneIndex, clock: ManualClock
    ) -> None:
        index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
        index.touch(NAMESPACE, [prefix_hash(1)], ttl_s=LONG_S)
        index.pin(NAMESPACE, prefix_hash(1), until_s=int(clock()) + LONG_S, ttl_s=LONG_S)
        index.publish(chunk(), {OTHER_FIELD: shard()}, ttl_s=LONG_S)
        record = the(index)
        assert (record.hits, record.pinned) == (1, True)

    def test_forgetting_compares(self, index: PruneIndex) -> None:
        index.publish(chunk(), {FIELD: shard(), OTHER_FIELD: shard()}, ttl_s=LONG_S)
        rewritten = replace(shard(), header_checksum="f" * 32)
        assert not index.forget(NAMESPACE, prefix_hash(1), FIELD, rewritten)
        assert not index.forget(NAMESPACE, prefix_hash(1), "9.L0-2_H0-4", shard())
        assert not index.forget(NAMESPACE, prefix_hash(2), FIELD, shard())
        assert index.forget(NAMESPACE, prefix_hash(1), FIELD, shard())
        assert not index.forget(NAMESPACE, prefix_hash(1), FIELD, shard())
        assert set(the(index).shards) == {OTHER_FIELD}
        assert index.find(NAMESPACE, [prefix_hash(1)], [FIELD]) == [None]

    def test_of_many_who_forget_a_field_one_succeeds(self, index: PruneIndex) -> None:
        index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
        found = at_once(THREADS, lambda _: index.forget(NAMESPACE, prefix_hash(1), FIELD, shard()))
        assert found.count(True) == 1

    def test_a_record_without_fields_disappears_with_its_hits_and_pin(
        self, index: PruneIndex, clock: ManualClock
    ) -> None:
        """Neither counts when forgetting."""
        index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
        index.touch(NAMESPACE, [prefix_hash(1)], ttl_s=LONG_S)
        index.pin(NAMESPACE, prefix_hash(1), until_s=int(clock()) + LONG_S, ttl_s=LONG_S)
        assert index.forget(NAMESPACE, prefix_hash(1), FIELD, shard())
        assert get(index) is None
        assert index.namespaces() == []
        index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
        record = the(index)
        assert (record.hits, record.pinned) == (0, False)

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
        index.lease("a lease without a record", "me", ttl_ms=LONG_S * 1000)
        assert index.namespaces() == [NAMESPACE, OTHER]

    def test_of_many_who_lease_one_wins(self, index: PruneIndex) -> None:
        won = at_once(THREADS, lambda n: index.lease("x", str(n), ttl_ms=LONG_S * 1000))
        assert won.count(True) == 1

    def test_a_lease_ends_by_itself_unless_its_holder_renews_it(
        self, index: PruneIndex, clock: ManualClock
    ) -> None:
        assert index.lease("x", "me", ttl_ms=self.short_s * 1000)
        assert index.lease("y", "me", ttl_ms=self.short_s * 1000)
        assert index.lease("y", "me", ttl_ms=LONG_S * 1000)
        assert not index.lease("x", "you", ttl_ms=LONG_S * 1000)
        self.pass_time(clock, self.short_s)
        assert index.lease("x", "you", ttl_ms=LONG_S * 1000)
        assert not index.lease("y", "you", ttl_ms=1000)

    def test_only_the_holder_gives_a_lease_back(self, index: PruneIndex) -> None:
        index.lease("x", "me", ttl_ms=LONG_S * 1000)
        index.release("x", "you")
        assert not index.lease("x", "you", ttl_ms=LONG_S * 1000)
        index.release("x", "me")
        index.release("x", "me")
        assert index.lease("x", "you", ttl_ms=LONG_S * 1000)

    def test_a_payload_that_is_published_gives_its_saver_s_lease_back(
        self, index: PruneIndex
    ) -> None:
        one, *others = (payload_path(NAMESPACE, prefix_hash(n), FIELD) for n in (1, 2, 3))
        for name in (one, *others, "x"):
            assert index.lease(name, "me", ttl_ms=LONG_S * 1000)
        shards = {FIELD: shard(5)}
        index.publish(chunk(1), shards, ttl_s=LONG_S)
        index.publish(chunk(1), shards, ttl_s=LONG_S, lease=Lease(one, "you"))
        assert not index.lease(one, "you", ttl_ms=LONG_S * 1000)
        index.publish(chunk(1), shards, ttl_s=LONG_S, lease=Lease(one, "me"))
        assert index.lease(one, "you", ttl_ms=LONG_S * 1000)
        assert usage(index) == {NAMESPACE: (5, 1)}
        for name in (*others, "x"):
            assert not index.lease(name, "you", ttl_ms=LONG_S * 1000)

    def test_a_payload_is_seen_again_from_its_second_sighting_on(self, index: PruneIndex) -> None:
        assert index.record_sightings([], ttl_s=LONG_S) == []
        assert index.record_sightings(["a", "b"], ttl_s=LONG_S) == [False, False]
        assert index.record_sightings(["c", "b", "c"], ttl_s=LONG_S) == [False, True, True]
        assert index.record_sightings(["a", "b", "c", "d"], ttl_s=LONG_S) == [
            True,
            True,
            True,
            False,
        ]
        names = [str(number) for number in range(1000)]
        assert index.record_sightings(names, ttl_s=LONG_S) == [False] * 1000
        assert index.record_sightings(names, ttl_s=LONG_S) == [True] * 1000

    def test_of_many_who_see_a_payload_one_is_the_first(self, index: PruneIndex) -> None:
        seen = at_once(THREADS, lambda _: index.record_sightings(["x"], ttl_s=LONG_S))
        assert sorted(seen) == [[False]] + [[True]] * (THREADS - 1)

    def test_a_sighting_is_forgotten_some_time_after_the_last(
        self, index: PruneIndex, clock: ManualClock
    ) -> None:
        index.record_sightings(["x", "y"], ttl_s=self.short_s)
        assert index.record_sightings(["y"], ttl_s=LONG_S) == [True]
        self.pass_time(clock, self.short_s)
        assert index.record_sightings(["x", "y"], ttl_s=LONG_S) == [False, True]

    def test_a_sighting_is_neither_a_record_nor_a_lease(self, index: PruneIndex) -> None:
        index.publish(chunk(1), {FIELD: shard(5)}, ttl_s=LONG_S)
        names = [f"{NAMESPACE}/{prefix_hash(n).hex()}/{FIELD}" for n in (1, 2)]
        assert index.record_sightings(names, ttl_s=LONG_S) == [False, False]
        hashes = [prefix_hash(2)]
        assert index.lookup(NAMESPACE, hashes) == [None]
        assert index.find(NAMESPACE, hashes, [FIELD]) == [None]
        assert [record.prefix_hash for record in index.scan(NAMESPACE)] == [prefix_hash(1)]
        assert index.namespaces() == [NAMESPACE]
        assert usage(index) == {NAMESPACE: (5, 1)}
        assert index.savings() == []
        index.touch(NAMESPACE, hashes, ttl_s=LONG_S)
        assert not index.drop(NAMESPACE, prefix_hash(2))
        assert not index.pin(NAMESPACE, prefix_hash(2), until_s=2**33, ttl_s=LONG_S)
        assert index.lease(names[0], "me", ttl_ms=LONG_S * 1000)
        index.release(names[0], "me")
        index.drop(NAMESPACE, prefix_hash(1))
        assert index.record_sightings(names, ttl_s=LONG_S) == [True, True]

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
        assert the(index).shards == {FIELD: shard()}

    def test_a_healthy_index_passes_its_check_and_can_be_closed_twice(
        self, index: PruneIndex
    ) -> None:
        index.check()
        index.close()
        index.close()

    # ``find``

    def test_only_the_fields_that_are_asked_for_are_found(self, index: PruneIndex) -> None:
        both = {FIELD: shard(1), OTHER_FIELD: shard(2)}
        index.publish(chunk(1), {**both, "1.L0-1_H0-1": shard(3)}, ttl_s=LONG_S)
        index.publish(chunk(2), {OTHER_FIELD: shard(4)}, ttl_s=LONG_S)
        index.publish(chunk(3), {"1.L0-1_H0-1": shard(5)}, ttl_s=LONG_S)
        hashes = [prefix_hash(n) for n in (1, 2, 3, 4)]
        assert index.find(NAMESPACE, hashes, [FIELD]) == [{FIELD: shard(1)}, None, None, None]
        found = index.find(NAMESPACE, hashes, [OTHER_FIELD, FIELD, OTHER_FIELD])
        assert found == [both, {OTHER_FIELD: shard(4)}, None, None]

    def test_what_is_found_is_what_is_looked_up(self, index: PruneIndex) -> None:
        """However late the caller decodes the mapping."""
        compressed = replace(shard(), is_plain=False, header_checksum="")
        for number, kind in enumerate((shard(1), compressed, shard(10**17), shard(99)), 1):
            index.publish(chunk(number), {FIELD: kind, OTHER_FIELD: shard()}, ttl_s=LONG_S)
        hashes = [prefix_hash(number) for number in range(1, 5)]
        found = index.find(NAMESPACE, hashes, [FIELD, OTHER_FIELD])
        for shards, record in zip(found, index.lookup(NAMESPACE, hashes), strict=True):
            assert shards is not None
            assert record is not None
            assert (len(shards), FIELD in shards, "1.x" in shards) == (2, True, False)
            assert (shards.get(FIELD), shards.get("1.x")) == (record.shards[FIELD], None)
            assert dict(shards) == dict(record.shards)

    def test_three_thousand_hashes_are_found_at_once(self, index: PruneIndex) -> None:
        numbers = range(1, 3000, 100)
        for number in numbers:
            index.publish(chunk(number), {FIELD: shard(number)}, ttl_s=LONG_S)
        hashes = [prefix_hash(n) for n in range(3000)]
        looked_up = [record and record.shards for record in index.lookup(NAMESPACE, hashes)]
        for fields in ([FIELD], [FIELD, OTHER_FIELD]):
            found = index.find(NAMESPACE, hashes, fields)
            sizes = {n: shards[FIELD].nbytes for n, shards in enumerate(found) if shards}
            assert sizes == {n: n for n in numbers}
            assert found == looked_up

    # pins

    def test_pinned_records_live_until_their_pin_ends(
        self, index: PruneIndex, clock: ManualClock
    ) -> None:
        """Publishing and touching meanwhile do not shorten it."""
        until_s = int(clock()) + 3 * self.short_s
        for number in (1, 2):
            index.publish(chunk(number), {FIELD: shard()}, ttl_s=self.short_s)
            assert index.pin(NAMESPACE, prefix_hash(number), until_s=until_s, ttl_s=self.short_s)
        index.publish(chunk(1), {OTHER_FIELD: shard()}, ttl_s=self.short_s)
        index.touch(NAMESPACE, [prefix_hash(2)], ttl_s=self.short_s)
        self.pass_time(clock, 2 * self.short_s)
        assert the(index, 1).pinned
        assert the(index, 2).pinned
        self.pass_time(clock, 2 * self.short_s)
        assert get(index, 1) is None
        assert get(index, 2) is None

    def test_a_record_is_pinned_until_its_pin_ends_and_may_outlive_it(
        self, index: PruneIndex, clock: ManualClock
    ) -> None:
        index.publish(chunk(), {FIELD: shard()}, ttl_s=self.short_s)
        assert (the(index).pinned_until_s, the(index).pinned) == (0, False)
        until_s = int(clock()) + self.short_s
        assert index.pin(NAMESPACE, prefix_hash(1), until_s=until_s, ttl_s=LONG_S)
        (record,) = index.scan(NAMESPACE)
        assert (record.pinned_until_s, record.pinned) == (until_s, True)
        self.pass_time(clock, 2 * self.short_s)
        record = the(index)
        assert (record.pinned_until_s, record.pinned) == (0, False)
        index.touch(NAMESPACE, [prefix_hash(1)], ttl_s=self.short_s)

    def test_unpinned_records_expire(self, index: PruneIndex, clock: ManualClock) -> None:
        index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
        until_s = int(clock()) + LONG_S
        index.pin(NAMESPACE, prefix_hash(1), until_s=until_s, ttl_s=LONG_S)
        assert index.pin(NAMESPACE, prefix_hash(1), until_s=0, ttl_s=self.short_s)
        assert not the(index).pinned
        self.pass_time(clock, self.short_s)
        assert get(index) is None

    # usage: how much is stored

    def test_what_is_published_is_added_up_by_namespace(self, index: PruneIndex) -> None:
        assert index.usage() == []
        index.publish(chunk(1, OTHER), {FIELD: shard(7)}, ttl_s=LONG_S)
        index.publish(chunk(1), {FIELD: shard(100), OTHER_FIELD: shard(20)}, ttl_s=LONG_S)
        index.publish(chunk(2), {FIELD: shard(3)}, ttl_s=LONG_S)
        index.touch(NAMESPACE, [prefix_hash(1)], ttl_s=LONG_S)
        index.pin(NAMESPACE, prefix_hash(1), until_s=2**33, ttl_s=LONG_S)
        index.lease("x", "me", ttl_ms=1000)
        assert [one.namespace for one in index.usage()] == [NAMESPACE, OTHER]
        assert usage(index) == {NAMESPACE: (123, 3), OTHER: (7, 1)}

    def test_what_is_forgotten_or_dropped_counts_no_longer(self, index: PruneIndex) -> None:
        for number in (1, 2, 3):
            both = {FIELD: shard(10 * number), OTHER_FIELD: shard(number)}
            index.publish(chunk(number), both, ttl_s=LONG_S)
        assert not index.forget(NAMESPACE, prefix_hash(1), FIELD, shard(11))
        assert index.forget(NAMESPACE, prefix_hash(1), FIELD, shard(10))
        assert usage(index) == {NAMESPACE: (1 + 22 + 33, 5)}
        index.pin(NAMESPACE, prefix_hash(2), until_s=2**33, ttl_s=LONG_S)
        assert index.drop(NAMESPACE, prefix_hash(2))
        assert get(index, 2) is None
        assert not index.drop(NAMESPACE, prefix_hash(2))
        assert usage(index) == {NAMESPACE: (1 + 33, 3)}
        index.drop(NAMESPACE, prefix_hash(3))
        index.drop(NAMESPACE, prefix_hash(1))
        assert index.usage() == []

    # savings: what loads saved

    def test_savings_are_added_up_by_namespace_and_month(self, index: PruneIndex) -> None:
        assert index.savings() == []
        first = Savings(NAMESPACE, "2026-10", 1, 512, 512, 90_000, 7_000)
        index.credit(first)
        index.credit(Savings(NAMESPACE, "2026-11", 1, 64))
        index.credit(replace(first, loads=2, compute_gpu_us=10_000))
        index.credit(Savings(OTHER, "2026-11", loads=1))
        assert index.savings() == [
            Savings(NAMESPACE, "2026-10", 3, 1_024, 1_024, 100_000, 14_000),
            Savings(NAMESPACE, "2026-11", 1, 64),
            Savings(OTHER, "2026-11", 1),
        ]
        assert index.usage() == []
        assert index.namespaces() == []

    def test_setting_what_was_counted_keeps_what_is_right(self, index: PruneIndex) -> None:
        index.publish(chunk(), {FIELD: shard(100)}, ttl_s=LONG_S)
        index.set_usage(Usage(NAMESPACE, 100, 1, counted_s=1_700_000_000))
        (one,) = index.usage()
        assert (one.nbytes, one.payloads) == (100, 1)
        assert one.counted_s >= 1_700_000_000
        index.publish(chunk(2), {FIELD: shard(1)}, ttl_s=LONG_S)
        assert usage(index) == {NAMESPACE: (101, 2)}
