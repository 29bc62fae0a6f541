"""Transfers are tested on the host and on the simulated device, whose operations come late.

Replicas that a test of this folder opens are closed at its end.
"""

from collections.abc import Iterator

import pytest
import torch

from tests.device.fixtures import loaded_sim, sim
from tests.support.device import HOST, caches_on
from tests.support.paged_cache import Worker

__all__ = ["loaded_sim", "sim"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests marked ``host`` bring lanes of their own, or have none."""
    host_only = metafunc.definition.get_closest_marker("host") is not None
    names = ["host"] if host_only else ["host", "simulated"]
    metafunc.parametrize("device", names, indirect=True)


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where the paged caches of the test are. Operations of the simulated device are late by
    up to a millisecond."""
    if request.param == "host":
        yield HOST
    else:
        sim = request.getfixturevalue("sim")
        sim.slow("sim:0", 0, 1000)
        with caches_on(torch.device("sim:0")):
            yield torch.device("sim:0")
            _close_all()
    _close_all()


def _close_all() -> None:
    for worker in list(Worker.opened):
        worker.close()
