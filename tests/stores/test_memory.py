"""``MemoryStore`` keeps what every store promises."""

import pytest

from objkv.stores.memory import MemoryStore
from tests.contracts.store_contract import StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()
