"""Measure the cost of the layers between the cache and a store with one byte from the memory store.

    PYTHONPATH=<tree> python benchmarks/guard_cost.py [--rounds 7] [--calls 20000]

Prints microseconds per call, medians over rounds, for the store alone, for the bulk store as
``open_bulk`` makes it, and for ``ChunkCache.get_into`` above it. To compare two trees, alternate
runs in both.
"""

import argparse
import statistics
import time
from collections.abc import Callable

from objkv.assembly.backends import open_bulk
from objkv.cache.chunks import CacheSettings, ChunkCache
from objkv.config import load_config
from objkv.index.memory import MemoryIndex
from objkv.keys.chunk import ChunkKey
from objkv.keys.topology import Shard
from objkv.stores.memory import MemoryStore
from objkv.telemetry import MemoryRecorder

KEY = ChunkKey("0" * 32, bytes(20), 0, Shard(0, 2, 0, 2))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=20_000)
    arguments = parser.parse_args()
    config = load_config({"bulk_url": "memory:", "index_url": "memory:"}, environ={})
    recorder = MemoryRecorder()
    bulk, bare = open_bulk(config, recorder), MemoryStore()
    cache = ChunkCache(bulk, None, MemoryIndex(), CacheSettings("w", 60, 1000, 0), recorder)
    path, buffer = KEY.path(), memoryview(bytearray(1))
    for store in (bulk, bare):
        store.put(path, b"x")
    calls: dict[str, Callable[[], object]] = {
        "memory store": lambda: bare.get_into(path, buffer),
        "guarded": lambda: bulk.get_into(path, buffer),
        "cache": lambda: cache.get_into(KEY, buffer, hot=False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(arguments.rounds):
        for name, call in calls.items():
            begun = time.process_time()
            for _ in range(arguments.calls):
                call()
            seconds[name].append((time.process_time() - begun) / arguments.calls)
    medians = {name: statistics.median(taken) * 1e6 for name, taken in seconds.items()}
    for name, median in medians.items():
        above = median - medians["memory store"]
        print(f"{name:12} {median:6.2f} us, above the store {above:6.2f} us")


if __name__ == "__main__":
    main()
