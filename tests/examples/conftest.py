"""What the tests of examples share: where they are, a model, and the engines' patience."""

import importlib.util
from pathlib import Path

import pytest

from tests.examples import tiny
from tests.support.needs import need

HERE = Path(__file__).parent
TIMEOUT_S = 3_600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of this folder more time than others: some start engines."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def model() -> Path:
    """The folder of a tiny model; where vLLM is missing the test is skipped, in CI it fails."""
    need("vLLM is not installed" if importlib.util.find_spec("vllm") is None else None)
    return tiny.make()
