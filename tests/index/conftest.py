from collections.abc import Iterator

import pytest

from tests.support.servers.redis import RedisServer, valkey_server


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One Valkey for all tests, which flush it."""
    with valkey_server(tmp_path_factory.mktemp("valkey")) as server:
        yield server
