"""Ordering scenarios: loads and saves next to a model's kernels, with one side slow."""
