import pytest

from objkv.index.base import PruneIndex
from tests.contracts.clock import ManualClock
from tests.contracts.index_contract import FIELD, IndexContract, chunk, shard
from tests.contracts.memory_index import MemoryIndex


class TestMemoryIndex(IndexContract):
    @pytest.fixture
    def index(self, clock: ManualClock) -> PruneIndex:
        return MemoryIndex(clock=clock)


def test_what_expired_is_removed_when_the_index_has_grown() -> None:
    clock = ManualClock()
    index = MemoryIndex(clock=clock)
    for number in range(1000):
        index.publish(chunk(number + 1), {FIELD: shard()}, ttl_s=1)
        index.lease(f"lease {number}", "me", ttl_ms=1)
        index.sight([f"sighting {number}"], ttl_s=1)
        clock.advance(1)
    assert index._size() < 1024
