"""What saving may take: memory, slabs, threads, and how it ends."""

import logging
import math
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from threading import Event

import pytest
import torch

from objkv.cache.chunks import CacheSettings, ChunkCache
from objkv.codec.payload import payload_bytes_max
from objkv.index.memory import MemoryIndex
from objkv.keys.identity import GroupIdentity
from objkv.keys.prefix import prefix_hashes, root_hash, token_digest
from objkv.stores.base import Buffer, WriteStore
from objkv.stores.local import LocalStore
from objkv.stores.memory import MemoryStore
from objkv.telemetry import MemoryRecorder, NullRecorder
from objkv.testing.clock import ManualClock
from objkv.transfer import paging
from objkv.transfer.lanes import HostLane, HostMark
from objkv.transfer.plan import ChunkMove, SaveMove, SavePlan
from objkv.transfer.saver import SaveLimits, Saver
from objkv.transfer.slabs import SlabPool
from tests.transfer.paged_cache import paged_group
from tests.transfer.world import NAMESPACE, PATIENCE_S, Replica, stores, wait_until

CHUNKS, CHUNK, BLOCK = 4, 256, 32
BIG = GroupIdentity("full", None, tuple(f"l{i}" for i in range(8)), 8, 256, BLOCK)
"""8 layers of 1 MiB a chunk."""
TOKENS = list(range(CHUNKS * CHUNK))
HASHES = prefix_hashes(NAMESPACE, TOKENS, CHUNK)


class NullStore(MemoryStore):
    """Takes everything and keeps nothing."""

    def put_if_absent(self, key: str, value: Buffer) -> bool:
        return True


def big_plan(request: str = "r") -> SavePlan:
    moves = []
    for c in range(CHUNKS):
        first = 1 + c * CHUNK // BLOCK
        move = ChunkMove(
            chunk=c,
            group=0,
            prefix_hash=HASHES[c],
            parent_hash=HASHES[c - 1] if c else root_hash(NAMESPACE),
            token_start=c * CHUNK,
            token_end=(c + 1) * CHUNK,
            first_block=0,
            block_ids=tuple(range(first, first + CHUNK // BLOCK)),
        )
        digest = token_digest(TOKENS[c * CHUNK : (c + 1) * CHUNK])
        moves.append(SaveMove(move, digest, None))
    return SavePlan(request, NAMESPACE, tuple(moves))


def saved(store: WriteStore) -> None:
    """Save chunks of 8 MiB, all at once."""
    paged, _ = paged_group(BIG, chunk_tokens=CHUNK, num_blocks=1 + CHUNKS * CHUNK // BLOCK, seed=1)
    cache = ChunkCache(store, None, MemoryIndex(), CacheSettings("w", 60, 1000, 0), NullRecorder())
    size = payload_bytes_max(paged.layers)
    slabs = SlabPool("save", count=CHUNKS, slab_bytes=size, pinned=False)
    recorder = MemoryRecorder()
    saver = Saver(
        cache,
        {0: paged},
        slabs,
        lane=HostLane(),
        limits=SaveLimits(1, CHUNKS, PATIENCE_S, "none", "w"),
        recorder=recorder,
    )
    tracemalloc.start()
    try:
        assert saver.gather((big_plan(),)) == set()
        assert saver.drain(PATIENCE_S)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        saver.close(PATIENCE_S)
    assert recorder.value("saves") == CHUNKS
    assert peak < 256 * 1024


def test_saving_takes_no_memory_but_the_slabs() -> None:
    saved(NullStore())


def test_saving_into_a_directory_takes_no_memory_but_the_slabs(tmp_path: Path) -> None:
    saved(LocalStore(tmp_path))


@pytest.mark.parametrize(
    ("bytes_max", "at_once"), [(None, [4]), (3, [3, 1]), (2, [2, 2]), (0, [1, 1, 1, 1])]
)
def test_a_step_stages_so_many_chunks_at_once_as_fit_the_devices_memory(
    bytes_max: int | None, at_once: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = Replica(*stores(), seed=1)
    asked = []

    class Counting(HostLane):
        def gather(
            self, cache: torch.Tensor, placed: torch.Tensor, pages: Sequence[torch.Tensor]
        ) -> None:
            asked.append(len(pages))
            super().gather(cache, placed, pages)

    if bytes_max is not None:
        layer_bytes = max(replica.paged.layer_bytes)
        monkeypatch.setattr(paging, "_GATHER_BYTES_MAX", bytes_max * layer_bytes)
    monkeypatch.setattr(replica.saver, "_lane", Counting())
    assert replica.save(range(4)) == set()
    assert asked == [n for n in at_once for _ in replica.paged.layers]
    assert replica.recorder.value("saves") == 4
    replica.close()


def test_a_drop_is_counted_in_chunks_and_in_bytes() -> None:
    replica = Replica(*stores(), seed=1, slabs=1)
    with replica.save_slabs.lease():
        assert len(replica.save(range(2))) == 2
    assert replica.recorder.value("save_drops") == 2
    assert replica.recorder.value("save_drop_bytes") == 2 * replica.paged.raw_bytes
    replica.close()


@pytest.mark.parametrize("codec", ["none", "lz4", "blosc", "blosclz4"])
def test_saves_are_counted_by_the_codec_they_ended_up_with(codec: str) -> None:
    replica = Replica(*stores(), seed=1, codec=codec)
    for cache in replica.caches:
        cache.fill_(1.0)
    replica.save(range(2))
    assert replica.recorder.value(f"save_codec_{codec}") == 2
    replica.close()


class StuckStore(MemoryStore):
    """Puts hang until told."""

    def __init__(self) -> None:
        super().__init__()
        self.go = Event()
        self.asked = Event()

    def put_if_absent(self, key: str, value: Buffer) -> bool:
        self.asked.set()
        assert self.go.wait(PATIENCE_S)
        return super().put_if_absent(key, value)


def test_closing_ends_the_threads_and_gives_every_slab_back() -> None:
    replica = Replica(*stores(), seed=1)
    replica.save(range(2))
    replica.saver.close(PATIENCE_S)
    assert not any(thread.is_alive() for thread in replica.saver._pool._pool._threads)
    assert replica.save_slabs.leased == 0
    replica.loader.close()


def test_a_put_that_does_not_end_holds_up_no_shutdown_and_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = StuckStore()
    replica = Replica(store, MemoryIndex(), seed=1, slabs=4)
    gathered = SavePlan("r", NAMESPACE, tuple(_saves(replica, 3)))
    assert replica.saver.gather((gathered,)) == set()
    assert store.asked.wait(PATIENCE_S)
    with caplog.at_level(logging.WARNING):
        replica.saver.close(0.0)
    assert "saves dropped at shutdown count=3" in caplog.text
    assert "names=objkv-save-0" in caplog.text
    assert replica.recorder.value("save_drops") == 2
    assert replica.save_slabs.leased == 1, "the one that is on the wire"
    store.go.set()
    wait_until(lambda: replica.save_slabs.leased == 0)
    replica.loader.close()


@pytest.mark.parametrize(("takes_s", "is_told"), [(5.5, False), (math.inf, True)])
def test_a_device_that_does_not_end_its_copies_holds_up_no_shutdown_and_is_told(
    takes_s: float, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock(0.0)

    class SlowMark(HostMark):
        def done(self) -> bool:
            clock.advance(0.25)  # so long until it is asked again
            return clock.now_s >= takes_s

        def wait(self) -> None:
            raise AssertionError("nobody may wait without a bound")

    replica = Replica(*stores(), seed=1)
    saver = Saver(
        replica.cache,
        {0: replica.paged},
        replica.save_slabs,
        lane=HostLane(),
        limits=SaveLimits(1, 8, PATIENCE_S, "none", "w"),
        recorder=replica.recorder,
        clock=clock,
    )
    saver._last_mark = SlowMark()
    saver.close(5.0)
    assert ("does not end the copies" in caplog.text) is is_told
    assert clock.now_s == (6.0 if is_told else 5.5)
    assert not any(thread.is_alive() for thread in saver._pool._pool._threads)
    replica.close()


def test_after_closing_nothing_is_saved_and_no_slab_is_leased() -> None:
    replica = Replica(*stores(), seed=1)
    replica.saver.close(PATIENCE_S)
    dropped = replica.saver.gather((SavePlan("r", NAMESPACE, tuple(_saves(replica, 2))),))
    assert dropped == {("r", 0), ("r", 1)}
    assert replica.save_slabs.leased == 0
    replica.loader.close()


def test_a_payload_that_was_sent_from_a_slab_is_not_changed_by_the_next_one() -> None:
    """Slabs are used again: what a store was given must be stored when its put returns."""
    store, index = stores()
    writer, reader = Replica(store, index, seed=1, slabs=1), Replica(store, index, seed=2)
    for chunk in range(3):
        writer.save(range(chunk, chunk + 1), first_block=1 + 2 * chunk)
    outcome = reader.load(range(3), first_block=9)
    assert not outcome.failed
    writer.close()
    reader.close()


def _saves(replica: Replica, count: int) -> list[SaveMove]:
    moves = [replica.move(c, 1) for c in range(count)]
    return [SaveMove(move, "0" * 64, None) for move in moves]


@pytest.mark.parametrize(("far", "codecs"), [(False, {"none"}), (True, {"blosc", "blosclz4"})])
def test_auto_compresses_for_a_slow_network_and_never_without_one(
    far: bool, codecs: set[str]
) -> None:
    """What a directory's disk takes for a put says nothing about a load."""
    replica = Replica(*stores(), seed=1)
    for cache in replica.caches:
        cache.fill_(1.0)
    replica.cache.link.puts.observe(1, 1.0)
    saver = Saver(
        replica.cache,
        {0: replica.paged},
        replica.save_slabs,
        lane=HostLane(),
        limits=SaveLimits(1, 8, PATIENCE_S, "auto", "w", far=far),
        recorder=replica.recorder,
    )
    saver.gather((SavePlan("r", NAMESPACE, tuple(_saves(replica, 1))),))
    assert saver.drain(PATIENCE_S)
    saver.close(PATIENCE_S)
    assert sum(replica.recorder.value(f"save_codec_{codec}") for codec in codecs) == 1
    assert not replica.load(range(1), first_block=9).failed
    replica.close()
