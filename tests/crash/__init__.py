"""Processes and servers killed at every step, and what is left then."""
