"""Both ends in memory."""

import pytest

from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore


@pytest.fixture
def bulk() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def index() -> MemoryIndex:
    return MemoryIndex()
