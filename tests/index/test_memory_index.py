import pytest

from objkv.index.base import PruneIndex
from tests.contracts.clock import ManualClock
from tests.contracts.index_contract import IndexContract
from tests.contracts.memory_index import MemoryIndex


class TestMemoryIndex(IndexContract):
    @pytest.fixture
    def index(self, clock: ManualClock) -> PruneIndex:
        return MemoryIndex(clock=clock)
