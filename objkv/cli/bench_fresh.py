"""The fresh process of ``objkv bench lookup``: ``python -m objkv.cli.bench_fresh URL CHUNKS``.

It opens the index through ``assembly``, as a replica does, and prints one JSON line.
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable

from objkv.assembly.backends import open_index
from objkv.errors import StoreError
from objkv.index.base import ReadIndex
from objkv.ops.bench.lookup import FreshAnswer
from objkv.ops.bench.sample import FIELD, NAMESPACE, chunk_hashes
from objkv.ops.bench.servers import PlainRedis, local_config
from objkv.telemetry import NullRecorder

_PINGS = 200
_WARM_UPS = 20


def ask_fresh(index: ReadIndex, redis_url: str, chunks: int) -> FreshAnswer:
    """Look up ``chunks`` stored chunks. Raises ``StoreError`` if one is missing."""
    hashes = chunk_hashes(chunks)
    index.check()
    gc.freeze()  # as vLLM does after its start: requests never collect imported objects
    with PlainRedis(redis_url) as plain:
        ping_s = _median(plain.ping)
    started = time.perf_counter()
    found = index.find(NAMESPACE, hashes, (FIELD,))
    first_s = time.perf_counter() - started
    if len(found) != chunks or not all(shards and shards[FIELD] for shards in found):
        raise StoreError("the index did not find the published chunks")
    return FreshAnswer(
        first_s=first_s,
        again_s=_median(lambda: index.find(NAMESPACE, hashes, (FIELD,)), _WARM_UPS),
        ping_s=ping_s,
        check_s=_median(index.check),
    )


def _median(call: Callable[[], object], times: int = _PINGS) -> float:
    seconds = []
    for _ in range(_WARM_UPS + times):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[_WARM_UPS:])


def main() -> None:
    """Measure the lookups and print the durations."""
    url, chunks = sys.argv[1], int(sys.argv[2])
    index = open_index(local_config(index_url=f"{url}/0"), NullRecorder())
    print(ask_fresh(index, url, chunks).model_dump_json())
    index.close()


if __name__ == "__main__":
    main()
