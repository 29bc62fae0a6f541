"""What every index promises of pins; part of ``IndexContract``."""

from objkv.index.base import PruneIndex
from objkv.testing.clock import ManualClock
from objkv.testing.index_samples import (
    FIELD,
    LONG_S,
    NAMESPACE,
    OTHER_FIELD,
    chunk,
    get,
    prefix_hash,
    shard,
)
from objkv.testing.timed_contract import TimedContract


class PinContract(TimedContract):
    """Held to by every ``PruneIndex``; fixtures as in ``IndexContract``."""

    def test_a_pinned_record_tells_until_when(self, index: PruneIndex, clock: ManualClock) -> None:
        index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
        record = get(index)
        assert record is not None
        assert (record.pinned_until_s, record.pinned) == (0, False)
        until_s = int(clock()) + LONG_S
        assert index.pin(NAMESPACE, prefix_hash(1), until_s=until_s, ttl_s=LONG_S)
        (record,) = index.scan(NAMESPACE)
        assert (record.pinned_until_s, record.pinned) == (until_s, True)

    def test_pinned_records_live_until_their_pin_ends(
        self, index: PruneIndex, clock: ManualClock
    ) -> None:
        """Whatever is published and touched meanwhile: that does not shorten it."""
        index.publish(chunk(), {FIELD: shard()}, ttl_s=self.short_s)
        until_s = int(clock()) + 3 * self.short_s
        assert index.pin(NAMESPACE, prefix_hash(1), until_s=until_s, ttl_s=self.short_s)
        index.publish(chunk(), {OTHER_FIELD: shard()}, ttl_s=self.short_s)
        index.touch(NAMESPACE, [prefix_hash(1)], ttl_s=self.short_s)
        self.pass_time(clock, 2 * self.short_s)
        record = get(index)
        assert record is not None
        assert record.pinned
        self.pass_time(clock, 2 * self.short_s)
        assert get(index) is None

    def test_a_record_that_outlives_its_pin_is_not_pinned_any_more(
        self, index: PruneIndex, clock: ManualClock
    ) -> None:
        index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
        until_s = int(clock()) + self.short_s
        assert index.pin(NAMESPACE, prefix_hash(1), until_s=until_s, ttl_s=LONG_S)
        self.pass_time(clock, 2 * self.short_s)
        record = get(index)
        assert record is not None
        assert (record.pinned_until_s, record.pinned) == (0, False)
        index.touch(NAMESPACE, [prefix_hash(1)], ttl_s=self.short_s)

    def test_a_pin_does_not_shorten_a_life(self, index: PruneIndex, clock: ManualClock) -> None:
        index.publish(chunk(), {FIELD: shard()}, ttl_s=self.short_s)
        assert index.pin(NAMESPACE, prefix_hash(1), until_s=int(clock()) + 1, ttl_s=LONG_S)
        self.pass_time(clock, 2 * self.short_s)
        assert get(index) is not None

    def test_unpinned_records_expire(self, index: PruneIndex, clock: ManualClock) -> None:
        index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
        until_s = int(clock()) + LONG_S
        index.pin(NAMESPACE, prefix_hash(1), until_s=until_s, ttl_s=LONG_S)
        assert index.pin(NAMESPACE, prefix_hash(1), until_s=0, ttl_s=self.short_s)
        record = get(index)
        assert record is not None
        assert not record.pinned
        self.pass_time(clock, self.short_s)
        assert get(index) is None
