"""Fixtures of the simulated device."""

from tests.device.fixtures import sim

__all__ = ["sim"]
