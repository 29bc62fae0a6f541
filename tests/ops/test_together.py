"""Savers, sweepers, rebuilders and a verifier at the same time, without any time of grace."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import Event
from typing import Any

from objkv.assembly.backends import Backends
from objkv.index.base import ChunkEntry, ShardRecord
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import identity_path
from objkv.ops.backends_view import BackendsView, record_keys
from tests.contracts.damage import DamagedStore, Defects
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.crash.saving import NAMESPACE, rebuild_all, save_all, saves, sweep_all, verify_all
from tests.support.samples import view_of

LEASE_MS = 60_000
ROUNDS = 6


def test_what_is_saved_stays_whoever_sweeps_and_rebuilds_meanwhile() -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    backends = Backends(bulk, None, index)
    DamagedStore(backends).plant(Defects(good=16, orphan=8, missing=8))
    owners, ended, published, publish = count(), Event(), set[str](), index.publish

    def noted(chunk: ChunkEntry, shards: Mapping[str, ShardRecord], **how: Any) -> None:
        time.sleep(0.002)  # so that sweeps come between a payload and its record
        key = ChunkKey.of(chunk.namespace, chunk.prefix_hash, next(iter(shards)))
        published.add(key.path())
        publish(chunk, shards, **how)

    index.publish = noted  # type: ignore[method-assign]

    def view() -> BackendsView:
        return view_of(bulk, index, lease_ms=LEASE_MS, owner=f"operator-{next(owners)}")

    def saver(number: int) -> None:
        for turn in range(ROUNDS):
            wanted = saves(10_000_000 * (1 + number % 2) + turn * 1_000, 3)  # two savers of each
            save_all(backends, wanted, f"saver-{number}", lease_ms=LEASE_MS)

    def operator(work: Callable[[BackendsView], object]) -> int:
        turns = 0
        while not ended.is_set() or not turns:
            work(view())
            turns += 1
        return turns

    with ThreadPoolExecutor(9) as pool:
        operators = [pool.submit(operator, work) for work in 2 * [sweep_all, rebuild_all]]
        operators.append(pool.submit(operator, verify_all))
        try:
            list(pool.map(saver, range(4)))
        finally:
            ended.set()
        assert all(one.result() > 0 for one in operators)

    # Whoever announced a payload, nobody may have removed it or its record since.
    indexed = {
        key.path() for one in index.scan(NAMESPACE) for key in record_keys(NAMESPACE, one)
    }  # fmt: skip
    assert published
    assert published <= indexed
    assert verify_all(view()).findings == []
    sweep_all(view())
    left = {entry.key for entry in bulk.scan(NAMESPACE)}
    assert left == indexed | {identity_path(NAMESPACE)}
    assert verify_all(view()).counts["ok"] == len(indexed)
