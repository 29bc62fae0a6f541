"""Real servers for tests and benchmarks: on loopback, without root, gone with the process."""
