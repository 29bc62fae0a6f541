"""What engine tests share: a marker, a longer time limit, no kept result of a failed test."""

import importlib.util
import os
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.engine.cache import LEDGER

HERE = Path(__file__).parent
TIMEOUT_S = 3_600
"""The first test of a scenario waits for all of its replicas; each has a limit of its own."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder; without vLLM they are skipped, but not in CI."""
    absent = importlib.util.find_spec("vllm") is None and not os.environ.get("CI")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
            if absent:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A result that a test did not like is not replayed."""
    report = yield
    if report.failed:
        LEDGER.forget(item.path)
    return report


def pytest_sessionfinish() -> None:
    """Of what tests did not like, the logs stay."""
    LEDGER.sweep()
