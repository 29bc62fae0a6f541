from collections.abc import Iterator

import pytest

from tests.agent.world import Node


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node().listen()
    yield node
    node.close()
    assert node.residents.check()
    assert node.residents.leased() == 0
