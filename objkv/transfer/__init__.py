"""Moves payloads between the cache and the engine: plans, slabs, lanes and threads."""
