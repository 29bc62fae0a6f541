"""``ReadOnlyIndex``: a replica with the rights of a reader sends nothing that needs others."""

import pytest

from objkv.errors import StoreUnavailable
from objkv.index.memory import MemoryIndex
from objkv.index.readonly import ReadOnlyIndex
from objkv.testing.index_contract import FIELD, LONG_S, NAMESPACE, chunk, get, prefix_hash, shard
from tests.index.flaky_index import FlakyIndex


@pytest.fixture
def inner() -> FlakyIndex:
    return FlakyIndex(MemoryIndex())


def test_what_is_there_is_found_and_nothing_is_changed(inner: FlakyIndex) -> None:
    inner.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
    before, asked = get(inner), len(inner.calls)
    index = ReadOnlyIndex(inner)
    index.publish(chunk(2), {FIELD: shard()}, ttl_s=LONG_S)
    index.touch(NAMESPACE, [prefix_hash(1)], ttl_s=LONG_S)
    assert index.forget(NAMESPACE, prefix_hash(1), FIELD, shard()) is False
    assert index.lease("x", "me", ttl_ms=60_000) is False
    index.release("x", "me")
    assert len(inner.calls) == asked
    assert get(index) == before
    assert [record.prefix_hash for record in index.scan(NAMESPACE)] == [prefix_hash(1)]
    assert index.find(NAMESPACE, [prefix_hash(1)], [FIELD]) == [{FIELD: shard()}]


def test_it_is_checked_by_reading(inner: FlakyIndex) -> None:
    index = ReadOnlyIndex(inner)
    index.check()
    inner.error = StoreUnavailable("down")
    with pytest.raises(StoreUnavailable, match="down"):
        index.check()
