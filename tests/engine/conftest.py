"""What engine tests share: a time limit for the first test of a scenario, and vLLM."""

import importlib.util
import os
from pathlib import Path

import pytest

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
