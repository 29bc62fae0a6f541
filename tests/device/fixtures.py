"""The simulated device as fixtures. Import both by name in a conftest for pytest to find them."""

import gc
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.device import simulated
from tests.support.needs import need


@pytest.fixture(scope="session")
def loaded_sim() -> ModuleType:
    """``tests.device.simulated``, built and loaded. Skips without a compiler, except in CI."""
    try:
        simulated.load()
    except simulated.NoCompilerError as missing:
        need(str(missing))
    return simulated


@pytest.fixture
def sim(loaded_sim: ModuleType) -> Iterator[ModuleType]:
    """The controls of the simulated device. At the end no fault may be left, and all settings are
    undone. Cyclic garbage waits until then: slabs of an earlier test would be unlocked, and
    counted, at any moment."""
    loaded_sim.reset()
    gc.disable()
    yield loaded_sim
    gc.enable()
    error = loaded_sim.take_error()
    loaded_sim.reset()
    assert not error, error
