"""Fixtures of the simulated device."""

from tests.device.fixtures import loaded_sim, sim

__all__ = ["loaded_sim", "sim"]
