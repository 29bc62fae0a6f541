"""Replicas of one test share stores."""

import pytest

from tests.connector.encoder.world import Place


@pytest.fixture
def place() -> Place:
    return Place()
