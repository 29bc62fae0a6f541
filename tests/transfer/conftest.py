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
    """On both, but for tests marked ``ON_HOST``."""
    chosen = {mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")}
    if "device" not in chosen:
        metafunc.parametrize("device", ["host", "simulated"], indirect=True)


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
