"""``MemoryStore`` keeps what every store promises."""

import pytest

from tests.contracts.memory_store import MemoryStore
from tests.contracts.store_contract import StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()
