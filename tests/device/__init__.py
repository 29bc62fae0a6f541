"""The simulated device, and the tests that need one."""
