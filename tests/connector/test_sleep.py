"""A replica that sleeps: while its paged cache has no memory, nothing touches it."""

from collections.abc import Iterator
from typing import Any

import pytest

from objkv.cache.chunks import CacheSettings, ChunkCache
from objkv.config import Config
from objkv.connector.kv import connector as kv
from objkv.connector.kv.connector import ObjKVConnector
from objkv.connector.kv.metadata import StepPlan
from objkv.connector.kv.worker import Rank, WorkerSide
from objkv.connector.model.groups import Geometry
from objkv.telemetry import MemoryRecorder
from tests.support.paged_cache import BLOCKS, CHUNK, GROUP, Replica, paged_group, stores
from tests.support.servers.redis import wait_until


class World:
    """A connector over two chunks that somebody saved, and every worker's side it opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.index = stores()
        self.writer = Replica(self.store, self.index, seed=1)
        self.writer.save(range(2))
        _, caches = paged_group(GROUP, chunk_tokens=CHUNK, num_blocks=32, seed=2)
        self.caches = dict(zip(GROUP.layers, caches, strict=True))
        self.opened: list[WorkerSide] = []
        monkeypatch.setattr(kv, "open_worker_side", self._open)
        connector: Any = object.__new__(ObjKVConnector)
        connector._worker, connector._asleep = None, False
        connector._vllm_config = connector._config = connector._geometry = None
        connector._backends = connector._recorder = None
        connector._writer = "w"
        self.connector = connector

    def _open(self, *_: Any) -> WorkerSide:
        recorder = MemoryRecorder()
        settings = CacheSettings("w", ttl_s=3600, lease_ms=600_000, hot_payload_bytes_max=0)
        side = WorkerSide(
            Config(pinned_bytes_max=1 << 20, load_threads=1, save_threads=1),
            Geometry((GROUP,), CHUNK, GROUP.block_size, tp_size=1),
            Rank(0, "w", batches_in_flight=1),
            ChunkCache(self.store, None, self.index, settings, recorder),
            recorder=recorder,
            kv_caches=self.caches,
        )
        self.opened.append(side)
        return side

    def load(self) -> tuple[set[str], set[int]]:
        """One load between steps, as vLLM has it done; what was told of it."""
        connector, plan = self.connector, self.writer.load_plan(range(1), 9, sync=False)
        connector.bind_connector_metadata(StepPlan(loads=(plan,)))
        connector.start_load_kv(None)
        received: set[str] = set()

        def told() -> bool:
            received.update(connector.get_transfer_results(set()).finished_recving or ())
            return bool(received)

        wait_until(told, "the load to end")
        return received, connector.get_block_ids_with_load_errors()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(monkeypatch)
    world.connector.register_kv_caches(world.caches)
    yield world
    world.writer.close()
    for side in world.opened:
        side.close()


def bytes_of(world: World) -> bytes:
    return b"".join(c.float().numpy().tobytes() for c in world.caches.values())


def test_an_awake_replica_loads(world: World) -> None:
    before = bytes_of(world)
    assert world.load()[1] == set()
    assert bytes_of(world) != before


def test_asleep_a_load_fails_and_touches_nothing(world: World) -> None:
    """vLLM schedules nothing then; if it did, it would hear of the failure, and not wait."""
    before = bytes_of(world)
    world.connector.unregister_kv_caches()
    received, failed = world.load()
    assert len(received) == 1
    assert failed == set(range(9, 9 + BLOCKS))
    assert bytes_of(world) == before


def test_awake_again_it_loads_as_before(world: World) -> None:
    world.connector.unregister_kv_caches()
    world.connector.restore_kv_caches()
    assert world.load()[1] == set()
    assert len(world.opened) == 2


def test_both_calls_may_come_twice_or_alone(world: World) -> None:
    for _ in range(2):
        world.connector.restore_kv_caches()
    assert len(world.opened) == 1
    for _ in range(2):
        world.connector.unregister_kv_caches()
    for _ in range(2):
        world.connector.restore_kv_caches()
    assert len(world.opened) == 2


def test_no_thread_of_the_sleeper_is_left(world: World) -> None:
    [side] = world.opened
    world.connector.unregister_kv_caches()
    assert not [t for t in side._loader._threads if t.is_alive()]
    assert not [t for t in side._saver._pool._pool._threads if t.is_alive()]


def test_if_it_cannot_take_the_cache_again_it_goes_on_without_objkv(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.connector.unregister_kv_caches()
    monkeypatch.setattr(kv, "open_worker_side", lambda *_: 1 / 0)
    world.connector.restore_kv_caches()
    assert world.load()[1] == set(range(9, 9 + BLOCKS))


def test_sleep_mode_is_supported_in_every_role() -> None:
    assert ObjKVConnector.supports_sleep_mode(None)  # type: ignore[arg-type]
