"""Both ends in memory."""

import pytest

from objkv.index.memory import MemoryIndex
from objkv.stores.memory import MemoryStore


@pytest.fixture
def bulk() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def index() -> MemoryIndex:
    return MemoryIndex()
