"""Stores: backends that hold payloads, immutable bytes under a key."""
