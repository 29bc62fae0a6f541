"""Fixtures that start real servers. Import new ones here by name, so that pytest finds them."""

from pathlib import Path

import pytest

from tests.support.servers.fixtures import (
    certificates,
    cluster,
    mortal_cluster,
    redis_alone,
    redis_tls,
    s3_prefixes,
    s3_server,
    sentinel,
    valkey,
)

__all__ = [
    "certificates",
    "cluster",
    "mortal_cluster",
    "redis_alone",
    "redis_tls",
    "s3_prefixes",
    "s3_server",
    "sentinel",
    "valkey",
]

HERE = Path(__file__).parent
TIMEOUT_S = 1_800
"""The first test of a server waits for its start, which may be tried several times."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
