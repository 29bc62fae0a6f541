"""The simulated device as a fixture. Import it by name in a conftest, so that pytest finds it."""

import os
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.device import simulated


@pytest.fixture
def sim() -> Iterator[ModuleType]:
    """The controls of the simulated device, ``tests.device.simulated``. At the end no fault may be
    left, and all settings are undone."""
    try:
        simulated.load()
    except simulated.NoCompilerError as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(missing))
    simulated.reset()
    yield simulated
    error = simulated.take_error()
    simulated.reset()
    assert not error, error
