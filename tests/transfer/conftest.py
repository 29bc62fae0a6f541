"""Replicas that a test of this folder opens are closed at its end."""

from collections.abc import Iterator

import pytest

from tests.support.paged_cache import Worker


@pytest.fixture(autouse=True)
def _closing() -> Iterator[None]:
    yield
    for worker in list(Worker.opened):
        worker.close()
