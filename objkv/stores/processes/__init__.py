"""Processes that fetch values for another process."""
