"""What every index promises of ``find``; part of ``IndexContract``."""

from dataclasses import replace

import pytest

from objkv.index.base import PruneIndex
from objkv.testing.clock import ManualClock
from objkv.testing.index_samples import (
    FIELD,
    LONG_S,
    NAMESPACE,
    OTHER,
    OTHER_FIELD,
    chunk,
    prefix_hash,
    shard,
)
from objkv.testing.timed_contract import TimedContract


class FindContract(TimedContract):
    """Held to by every ``PruneIndex``; fixtures as in ``IndexContract``."""

    def test_finding_keeps_the_order_and_the_repetitions_of_its_question(
        self, index: PruneIndex
    ) -> None:
        for number in (1, 2, 3):
            index.publish(chunk(number), {FIELD: shard(number)}, ttl_s=LONG_S)
        found = index.find(NAMESPACE, [prefix_hash(n) for n in (3, 9, 1, 3)], [FIELD])
        assert [shards and shards[FIELD].nbytes for shards in found] == [3, None, 1, 3]

    def test_finding_of_nothing_finds_nothing(self, index: PruneIndex) -> None:
        index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
        assert index.find(NAMESPACE, [], [FIELD]) == []
        assert index.find(NAMESPACE, [prefix_hash(1)], []) == [None]

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
        """However late a reader of the mapping decodes it."""
        kinds = [shard(1), replace(shard(), codec="", header_checksum=""), shard(10**17), shard(99)]
        for number, kind in enumerate(kinds):
            index.publish(chunk(number + 1), {FIELD: kind, OTHER_FIELD: shard()}, ttl_s=LONG_S)
        hashes = [prefix_hash(number + 1) for number in range(len(kinds))]
        found = index.find(NAMESPACE, hashes, [FIELD, OTHER_FIELD])
        for shards, record in zip(found, index.lookup(NAMESPACE, hashes), strict=True):
            assert shards is not None
            assert record is not None
            assert (len(shards), FIELD in shards, "1.x" in shards) == (2, True, False)
            assert (shards.get(FIELD), shards.get("1.x")) == (record.shards[FIELD], None)
            assert dict(shards) == dict(record.shards)

    @pytest.mark.parametrize("fields", [[FIELD], [FIELD, OTHER_FIELD]])
    def test_three_thousand_hashes_are_found_at_once(
        self, index: PruneIndex, fields: list[str]
    ) -> None:
        for number in range(0, 3000, 100):
            index.publish(chunk(number + 1), {FIELD: shard(number + 1)}, ttl_s=LONG_S)
        found = index.find(NAMESPACE, [prefix_hash(n + 1) for n in range(3000)], fields)
        sizes = {n: shards[FIELD].nbytes for n, shards in enumerate(found) if shards}
        assert sizes == {n: n + 1 for n in range(0, 3000, 100)}
        assert len(found) == 3000

    def test_what_expired_or_was_forgotten_is_not_found(
        self, index: PruneIndex, clock: ManualClock
    ) -> None:
        index.publish(chunk(1), {FIELD: shard()}, ttl_s=self.short_s)
        index.publish(chunk(2), {FIELD: shard(), OTHER_FIELD: shard()}, ttl_s=LONG_S)
        hashes = [prefix_hash(1), prefix_hash(2)]
        assert None not in index.find(NAMESPACE, hashes, [FIELD])
        index.forget(NAMESPACE, prefix_hash(2), FIELD, shard())
        self.pass_time(clock, self.short_s)
        assert index.find(NAMESPACE, hashes, [FIELD]) == [None, None]
        assert index.find(NAMESPACE, hashes, [OTHER_FIELD]) == [None, {OTHER_FIELD: shard()}]
        assert index.find(OTHER, hashes, [OTHER_FIELD]) == [None, None]
