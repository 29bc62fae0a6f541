"""What engine tests share: a time limit, vLLM, and a folder whose agents end."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agents import end_agents

HERE = Path(__file__).parent
TIMEOUT_S = 3_600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without vLLM these tests are skipped, but not in CI."""
    absent = importlib.util.find_spec("vllm") is None and not os.environ.get("CI")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
            if absent:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A test's own; agents whose stores are in it do not outlive the test."""
    yield tmp_path
    end_agents(str(tmp_path))
