"""What the tests of examples share: a model."""

import importlib.util
from pathlib import Path

import pytest

from tests.examples import tiny
from tests.support.needs import need


@pytest.fixture(scope="session")
def model() -> Path:
    """The folder of a tiny model; where vLLM is missing the test is skipped, in CI it fails."""
    need("vLLM is not installed" if importlib.util.find_spec("vllm") is None else None)
    return tiny.make()
