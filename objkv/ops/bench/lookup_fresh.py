"""What a fresh process asks the index once, told as one JSON line: driven by ``bench lookup``."""

import gc
import statistics
import time
from collections.abc import Callable

from pydantic import BaseModel, ConfigDict

from objkv.errors import StoreError
from objkv.index.base import ReadIndex
from objkv.ops.bench.records import FIELD, chunk_hashes
from objkv.ops.bench.sample import NAMESPACE
from objkv.ops.bench.servers import PlainRedis

_PINGS = 200
_WARM_UPS = 20


class FreshAnswer(BaseModel):
    """Seconds in one process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    first_s: float
    """The first lookup: of a replica that has checked its index at its start, and asked nothing."""
    again_s: float
    """The median of those after it."""
    ping_s: float
    """PING over a bare socket, the median."""
    check_s: float
    """One cheap round trip by the index itself, the median."""


def ask_fresh(index: ReadIndex, redis_url: str, chunks: int) -> FreshAnswer:
    """Ask for ``chunks`` chunks, all stored. Raises ``StoreError`` if the answer is not that."""
    hashes = chunk_hashes(chunks)
    index.check()
    gc.freeze()  # as vLLM does after its start: what was imported is collected in no request
    with PlainRedis(redis_url) as plain:
        ping_s = _median(plain.ping)
    started = time.perf_counter()
    found = index.find(NAMESPACE, hashes, (FIELD,))
    first_s = time.perf_counter() - started
    if len(found) != chunks or not all(shards and shards[FIELD] for shards in found):
        raise StoreError("the index did not find what is there")
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
