"""Contract tests for stores and indexes, and fakes.

They are part of the package, so that stores and indexes of other projects can use the same tests.
"""
