"""What engine tests share: a folder whose agents end."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agents import end_agents


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A test's own; agents whose stores are in it do not outlive the test."""
    yield tmp_path
    end_agents(str(tmp_path))
