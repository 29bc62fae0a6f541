from collections.abc import Iterator

import pytest

from tests.agent.consistency import is_consistent
from tests.agent.world import Node
from tests.support.servers.fixtures import client, valkey

__all__ = ["client", "valkey"]


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node().listen()
    yield node
    node.close()
    assert is_consistent(node.arena_cache)
    assert node.arena_cache.leased() == 0
