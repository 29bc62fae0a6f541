"""Warming: prefixes are computed and stored before users send them."""
