"""Chunks and shards to publish in tests of indexes and of what uses them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from objkv.index.base import ChunkEntry, PruneIndex, Record, ShardRecord

NAMESPACE = "0123456789abcdef0123456789abcdef"
OTHER = "fedcba9876543210fedcba9876543210"
FIELD = "0.L0-2_H0-4"
OTHER_FIELD = "0.L0-2_H4-8"
LONG_S = 1_000
"""A time to live that no test outlives."""


def prefix_hash(number: int) -> bytes:
    """A prefix hash of its own for every number."""
    return number.to_bytes(20, "big")


def chunk(number: int = 1, namespace: str = NAMESPACE) -> ChunkEntry:
    """The entry of chunk ``number``, which follows chunk ``number - 1``."""
    return ChunkEntry(
        namespace=namespace,
        prefix_hash=prefix_hash(number),
        parent_hash=prefix_hash(number - 1),
        token_start=(number - 1) * 256,
        token_end=number * 256,
    )


def shard(nbytes: int = 4096) -> ShardRecord:
    """A shard record that differs from those of other sizes."""
    return ShardRecord(
        nbytes=nbytes,
        raw_bytes=nbytes - 1,
        codec="none",
        hot=nbytes % 2 == 0,
        header_checksum=f"{nbytes:032x}",
        created_s=1_700_000_000,
    )


def get(index: PruneIndex, number: int = 1, namespace: str = NAMESPACE) -> Record | None:
    """The record of chunk ``number``."""
    return index.lookup(namespace, [prefix_hash(number)])[0]


def at_once(calls: list[Callable[[], object]]) -> list[object]:
    """The results of all calls, started together, each in its own thread."""
    barrier = Barrier(len(calls))

    def run(call: Callable[[], object]) -> object:
        barrier.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))
