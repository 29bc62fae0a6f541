"""How deep a load is: a reader follows each of these calls, and each payload pays for them."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from objkv.assembly.backends import open_backends
from objkv.cache.chunks import CacheSettings, ChunkCache
from objkv.config import Config
from objkv.telemetry import MemoryRecorder
from objkv.transfer.lanes import HostLane
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.device import ON_HOST
from tests.support.paged_cache import IN_PARTS, Replica, same_blocks
from tests.support.servers.quick_s3 import QuickS3

AT_THE_SOCKET_MAX = 17
AT_THE_BLOCK_MAX = 22


def depth(frame: FrameType | None) -> list[str]:
    """The functions from the loader's thread function to ``frame``; none outside of its threads."""
    names: list[str] = []
    while frame is not None:
        names.append(frame.f_code.co_qualname)
        if names[-1] in ("Loader._work", "Core._serve"):
            return names[::-1]
        frame = frame.f_back
    return []


class WatchedLane(HostLane):
    deepest: list[str]

    def scatter(self, *given: Any) -> None:
        found = depth(sys._getframe())
        type(self).deepest = max(type(self).deepest, found, key=len)
        super().scatter(*given)


@contextmanager
def watched_sockets() -> Iterator[list[list[str]]]:
    """How deep loaders started within this context are where they receive."""
    found: list[list[str]] = []

    def look(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__.startswith("recv") and (names := depth(frame)):
            found.append(names)

    threading.setprofile(look)
    try:
        yield found
    finally:
        threading.setprofile(None)


@ON_HOST
@pytest.mark.parametrize("sync", [False, True], ids=["between steps", "within the step"])
def test_a_load_is_few_calls_deep_at_the_socket_and_at_the_block(sync: bool) -> None:
    WatchedLane.deepest = []
    recorder, index = MemoryRecorder(), MemoryIndex()
    with QuickS3() as server, watched_sockets() as received:
        config = Config(
            bulk_url="s3://objkv-test/p",
            s3_endpoint_url=server.url,
            s3_access_key_id="test",
            s3_secret_access_key="test-test",
            index_url="sqlite:///dev/null/i",
        )
        backends = open_backends(config, recorder)
        replica = Replica(MemoryStore(), index, seed=1, lane=WatchedLane(), part_policy=IN_PARTS)
        settings = CacheSettings("r", ttl_s=3600, lease_ms=600_000, hot_save_bytes_max=0)
        ChunkCache.__init__(replica.cache, backends.bulk, None, index, settings, recorder)
        replica.save(range(2))
        assert not replica.load(range(2), first_block=9, sync=sync).failed
        replica.close()
        backends.close()
    assert same_blocks(replica.caches, [1, 2, 3, 4], replica.caches, [9, 10, 11, 12])
    at_the_socket = max(received, key=len)
    assert len(at_the_socket) <= AT_THE_SOCKET_MAX, " → ".join(at_the_socket)
    assert len(WatchedLane.deepest) <= AT_THE_BLOCK_MAX, " → ".join(WatchedLane.deepest)
