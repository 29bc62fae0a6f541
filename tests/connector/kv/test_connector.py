"""The connector as vLLM calls it: asleep, nothing touches its paged cache."""

from collections.abc import Iterator
from typing import Any

import pytest

from objkv.config import Config
from objkv.connector.kv import connector as kv
from objkv.connector.kv.connector import ObjKVConnector
from objkv.connector.kv.metadata import StepPlan
from objkv.connector.kv.worker import WorkerSide
from tests.support.paged_cache import BLOCKS, CHUNK, GROUP, Replica, paged_group, stores, wait_until
from tests.support.sides import worker_side


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
        monkeypatch.setattr(kv, "open_cache", lambda *_: None)
        connector: Any = object.__new__(ObjKVConnector)
        connector._worker, connector._asleep = None, False
        connector._vllm_config = connector._geometry = None
        connector._config = Config()
        connector._backends = connector._recorder = None
        self.connector = connector

    def _open(self, *_: Any, **_more: Any) -> WorkerSide:
        side = worker_side(self.store, self.index, caches=self.caches)
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

        wait_until(told)
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
