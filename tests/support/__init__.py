"""What several groups of tests and the benchmarks share."""
