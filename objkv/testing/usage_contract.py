"""What every index promises of how much is stored; part of ``IndexContract``."""

from functools import partial

from objkv.index.base import ChunkEntry, PruneIndex, ShardRecord, Usage
from objkv.index.shapes import SHAPES_HASH
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


def usage(index: PruneIndex) -> dict[str, tuple[int, int]]:
    """Bytes and payloads of each namespace."""
    return {one.namespace: (one.nbytes, one.payloads) for one in index.usage()}


class UsageContract:
    """Held to by every ``PruneIndex``; fixtures as in ``IndexContract``."""

    def test_an_empty_index_uses_nothing(self, index: PruneIndex) -> None:
        assert index.usage() == []

    def test_what_is_published_is_added_up_by_namespace(self, index: PruneIndex) -> None:
        index.publish(chunk(1, OTHER), {FIELD: shard(7)}, ttl_s=LONG_S)
        index.publish(chunk(1), {FIELD: shard(100), OTHER_FIELD: shard(20)}, ttl_s=LONG_S)
        index.publish(chunk(2), {FIELD: shard(3)}, ttl_s=LONG_S)
        assert [one.namespace for one in index.usage()] == [NAMESPACE, OTHER]
        assert usage(index) == {NAMESPACE: (123, 3), OTHER: (7, 1)}

    def test_what_is_published_again_counts_once(self, index: PruneIndex) -> None:
        index.publish(chunk(), {FIELD: shard(100)}, ttl_s=LONG_S)
        index.publish(chunk(), {FIELD: shard(100)}, ttl_s=LONG_S)
        assert usage(index) == {NAMESPACE: (100, 1)}
        index.publish(chunk(), {FIELD: shard(30), OTHER_FIELD: shard(1)}, ttl_s=LONG_S)
        assert usage(index) == {NAMESPACE: (31, 2)}

    def test_what_is_forgotten_or_dropped_counts_no_longer(self, index: PruneIndex) -> None:
        for number in (1, 2, 3):
            both = {FIELD: shard(10 * number), OTHER_FIELD: shard(number)}
            index.publish(chunk(number), both, ttl_s=LONG_S)
        assert not index.forget(NAMESPACE, prefix_hash(1), FIELD, shard(11))
        assert index.forget(NAMESPACE, prefix_hash(1), FIELD, shard(10))
        assert usage(index) == {NAMESPACE: (1 + 22 + 33, 5)}
        assert index.drop(NAMESPACE, prefix_hash(2))
        assert not index.drop(NAMESPACE, prefix_hash(2))
        assert usage(index) == {NAMESPACE: (1 + 33, 3)}
        index.drop(NAMESPACE, prefix_hash(3))
        index.drop(NAMESPACE, prefix_hash(1))
        assert index.usage() == []

    def test_touches_pins_leases_and_shapes_use_nothing(self, index: PruneIndex) -> None:
        shapes = ChunkEntry(NAMESPACE, SHAPES_HASH, SHAPES_HASH, 0, 1)
        index.publish(shapes, {FIELD: ShardRecord(0, 0, "none", False, "", 0)}, ttl_s=LONG_S)
        assert index.usage() == []
        index.publish(chunk(), {FIELD: shard(5)}, ttl_s=LONG_S)
        index.touch(NAMESPACE, [prefix_hash(1)], ttl_s=LONG_S)
        index.pin(NAMESPACE, prefix_hash(1), until_s=2**33, ttl_s=LONG_S)
        index.lease("x", "me", ttl_ms=1000)
        assert usage(index) == {NAMESPACE: (5, 1)}

    def test_concurrent_publishes_are_all_added_up(self, index: PruneIndex) -> None:
        entries = [chunk(number) for number in range(1, 13)]
        at_once([partial(index.publish, one, {FIELD: shard(9)}, ttl_s=LONG_S) for one in entries])
        assert usage(index) == {NAMESPACE: (9 * 12, 12)}

    def test_setting_what_was_counted_keeps_what_is_right(self, index: PruneIndex) -> None:
        index.publish(chunk(), {FIELD: shard(100)}, ttl_s=LONG_S)
        index.set_usage(Usage(NAMESPACE, 100, 1, counted_s=1_700_000_000))
        (one,) = index.usage()
        assert (one.nbytes, one.payloads) == (100, 1)
        assert one.counted_s >= 1_700_000_000
        index.publish(chunk(2), {FIELD: shard(1)}, ttl_s=LONG_S)
        assert usage(index) == {NAMESPACE: (101, 2)}
