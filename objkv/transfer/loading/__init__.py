"""Loads: plans become fetched, verified pages in their blocks."""
