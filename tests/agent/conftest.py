from collections.abc import Callable, Iterator

import pytest

from tests.agent.world import Node, making
from tests.support.servers.fixtures import client, valkey

__all__ = ["client", "valkey"]


@pytest.fixture
def make() -> Iterator[Callable[..., Node]]:
    with making(Node) as make:
        yield make


@pytest.fixture
def node() -> Iterator[Node]:
    with making(Node) as make:
        node = make().listen()
        yield node
    assert node.arena_cache.leased() == 0
