"""Fixtures of the simulated device."""

from collections.abc import Iterator

import pytest
import torch

from tests.device.fixtures import loaded_sim, sim

__all__ = ["loaded_sim", "sim"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """PyTorch's own threads spin while they wait for each other, on cores that streams need."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
