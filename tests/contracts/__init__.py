"""Contract tests for stores and indexes, and fakes that pass them."""
