"""From ``ChunkCache`` to a backend there are few frames: each layer is one method."""

import sys
from collections.abc import Callable

import pytest

from objkv.assembly.backends import open_bulk, open_index
from objkv.cache.chunks import CacheSettings, ChunkCache
from objkv.config import load_config
from objkv.index.memory import MemoryIndex
from objkv.stores.guarded import GuardedStore
from objkv.stores.memory import MemoryStore
from objkv.telemetry import NullRecorder
from tests.codec.payloads import CLAIM
from tests.contracts.index_contract import NAMESPACE, prefix_hash
from tests.stores.guards import guard_of

FRAMES_MAX = 5
SETTINGS = CacheSettings("w", 60, 1000, 1 << 20)


def frames_to(backend: type, verb: str, call: Callable[[], object]) -> list[str]:
    """The functions on the stack from the one that ``call`` calls to ``verb`` of ``backend``."""
    code = getattr(backend, verb).__code__
    seen: list[list[str]] = []

    def look(frame: object, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code is code:  # type: ignore[attr-defined]
            names = []
            while frame.f_code is not call.__code__:  # type: ignore[attr-defined]
                names.append(frame.f_code.co_qualname)  # type: ignore[attr-defined]
                frame = frame.f_back  # type: ignore[attr-defined]
            seen.append(names[::-1])

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(before)
    (stack,) = seen
    return stack


def made(hot: MemoryStore | None = None) -> ChunkCache:
    config = load_config({"bulk_url": "memory:", "index_url": "memory:"}, environ={})
    store = GuardedStore(hot, guard_of("hot", seconds=60)) if hot else None
    return ChunkCache(
        open_bulk(config, NullRecorder()), store, MemoryIndex(), SETTINGS, NullRecorder()
    )


@pytest.mark.parametrize("start", [None, 0])
def test_a_payload_is_read_from_bulk_through_four_frames(start: int | None) -> None:
    cache, buffer = made(), memoryview(bytearray(1))
    stack = frames_to(
        MemoryStore,
        "get_into",
        lambda: cache.get_into(CLAIM.key, buffer, hot=False, arrived=print, start=start),
    )
    assert stack == [
        "ChunkCache.get_into",
        "GuardedStore.get_into",
        "Guard.call",
        "MemoryStore.get_into",
    ]


def test_a_payload_is_read_from_the_hot_store_through_five_frames() -> None:
    hot = MemoryStore()
    cache, buffer = made(hot), memoryview(bytearray(1))
    hot.put(CLAIM.key.path(), b"x")
    stack = frames_to(MemoryStore, "get_into", lambda: cache.get_into(CLAIM.key, buffer, hot=True))
    assert len(stack) <= FRAMES_MAX, stack


def test_a_lookup_passes_three_frames() -> None:
    config = load_config({"bulk_url": "memory:", "index_url": "memory:"}, environ={})
    index = open_index(config, NullRecorder())
    stack = frames_to(MemoryIndex, "find", lambda: index.find(NAMESPACE, [prefix_hash(1)], ["0.a"]))
    assert stack == ["GuardedIndex.find", "Guard.call", "MemoryIndex.find"]
