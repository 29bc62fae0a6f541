"""A simulated fleet: what hit rates, Redis, S3 and time to first token become as replicas grow.

``python benchmarks/fleet/run.py`` prints it, ``docs/scaling.md`` reads it, ``costs.toml`` holds
what was measured or estimated. Nothing here touches a network, a GPU or objkv's own stores.
"""
