"""The connector as vLLM calls it: asleep, nothing touches its paged cache."""

from copy import copy
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput

from objkv.config import Config
from objkv.connector.hooks import release_worker
from objkv.connector.kv import connector as kv
from objkv.connector.kv.connector import ObjKVConnector
from objkv.connector.kv.metadata import StepPlan, StepReport
from objkv.connector.kv.worker import WorkerSide
from objkv.errors import ConfigError
from tests.support.paged_cache import BLOCKS, CHUNK, GROUP, Replica, paged_group, stores, wait_until
from tests.support.sides import breaks, request, scheduler_side, step, worker_side


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
        connector.worker, connector._link, connector._asleep = None, None, False
        connector._engine = None
        connector._shares, connector._vllm_config, connector._geometry = True, None, None
        connector._config = Config()
        connector.recorder = connector._accepted = None
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
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(monkeypatch)
    world.connector.register_kv_caches(world.caches)
    return world


def bytes_of(world: World) -> bytes:
    return b"".join(c.float().numpy().tobytes() for c in world.caches.values())


def test_asleep_a_load_fails_and_touches_nothing_and_awake_again_it_loads(world: World) -> None:
    """vLLM schedules nothing then; if it did, it would hear of the failure, and not wait."""
    before = bytes_of(world)
    world.connector.unregister_kv_caches()
    [side] = world.opened
    assert not side.loader._thread.is_alive()
    received, failed = world.load()
    assert len(received) == 1
    assert failed == set(range(9, 9 + BLOCKS))
    assert bytes_of(world) == before
    world.connector.restore_kv_caches()
    assert world.load()[1] == set()
    assert bytes_of(world) != before
    assert len(world.opened) == 2


def test_if_it_cannot_take_the_cache_again_it_goes_on_without_objkv(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.connector.unregister_kv_caches()
    monkeypatch.setattr(kv, "open_worker_side", lambda *_: 1 / 0)
    world.connector.restore_kv_caches()
    assert world.load()[1] == set(range(9, 9 + BLOCKS))


def test_an_engine_without_groups_matches_and_saves_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Such as one that only encodes, with the settings of its fleet. No store is opened."""
    caplog.set_level("INFO", "objkv")
    extra = {"bulk_url": "s3://nowhere", "index_url": "rediss://nowhere"}
    transfer = SimpleNamespace(kv_connector_extra_config=extra, engine_id="e")
    config: Any = SimpleNamespace(kv_transfer_config=transfer)
    ring = SimpleNamespace(kv_cache_spec=SimpleNamespace(prefix_cacheable=False))
    for groups in ([], [ring]):
        cache: Any = SimpleNamespace(kv_cache_groups=groups)
        roles = KVConnectorRole.WORKER, KVConnectorRole.SCHEDULER
        worker, scheduler = (ObjKVConnector(config, role, cache) for role in roles)
        worker.register_kv_caches({})
        asked = request()
        scheduler.on_new_request(asked)
        assert scheduler.get_num_new_matched_tokens(asked, 0) == (0, False)
        scheduler.update_state_after_alloc(asked, None, 0)  # type: ignore[arg-type]
        plan = scheduler.build_connector_meta(step({"r": 64}, [1]))
        assert plan == StepPlan()
        worker.bind_connector_metadata(plan)
        worker.start_load_kv(None)  # type: ignore[arg-type]
        worker.wait_for_save()
        assert not worker.get_transfer_results({"r"}).finished_sending
        assert worker.build_connector_worker_meta() is None
        scheduler.update_connector_output(KVConnectorOutput())
        assert scheduler.request_finished_all_groups(asked, ()) == (False, None)
        assert not list(scheduler.take_events())
        assert scheduler.reset_cache()
        assert not scheduler.has_pending_block_frees()
        worker.shutdown()
        scheduler.shutdown()
    told = [one for one in caplog.records if one.name.startswith("objkv")]
    assert [one.levelname for one in told] == ["INFO"] * 2, caplog.text


# One process, several engines: vLLM keeps one worker connector.


class Kept:
    """A worker connector that vLLM keeps."""

    def __init__(self, config: Any) -> None:
        self._vllm_config, self.ended = config, 0

    def shutdown(self) -> None:
        self.ended += 1


def two_engines() -> list[Any]:
    """Configurations of two engines, which may be given one transfer configuration."""
    given = object()
    return [SimpleNamespace(kv_transfer_config=given, cache_config=object()) for _ in range(2)]


def test_the_worker_of_an_engine_that_fails_to_start_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, other = two_engines()
    kept = Kept(mine)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", kept)
    release_worker(other)
    assert kept.ended == 0, "another engine may still run"
    release_worker(copy(mine))  # as a connector inside another one has it
    release_worker(mine)
    assert kept.ended == 1
    assert not kv_transfer_state.has_kv_transfer_group()


@pytest.mark.parametrize("role", [KVConnectorRole.WORKER, KVConnectorRole.SCHEDULER])
def test_an_engine_that_objkv_refuses_leaves_no_worker_behind(
    monkeypatch: pytest.MonkeyPatch, role: KVConnectorRole
) -> None:
    def refuse(*_: Any, **_more: Any) -> None:
        raise ConfigError("no")

    transfer = SimpleNamespace(
        kv_connector_extra_config={"bulk_url": "file:///dev/null/kv"}, engine_id="e"
    )
    device = SimpleNamespace(device_type="cpu")
    config: Any = SimpleNamespace(
        kv_transfer_config=transfer, device_config=device, cache_config=object()
    )
    kept = Kept(config)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", kept)
    group: Any = SimpleNamespace(kv_cache_spec=SimpleNamespace())
    cache: Any = SimpleNamespace(kv_cache_groups=[group])
    monkeypatch.setattr(kv, "AgentLink", MagicMock())
    for name in ("read_geometry", "warn_of_outer_policy", "replica_of", "events_enabled"):
        monkeypatch.setattr(kv, name, lambda *_: None)
    for name in ("open_scheduler_side", "open_worker_side"):
        monkeypatch.setattr(kv, name, refuse)
    with pytest.raises(ConfigError):
        ObjKVConnector(config, role, cache).register_kv_caches({})
    assert kept.ended == 1


def test_the_cache_of_another_engine_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as after an engine that failed in vLLM itself. Its stores and blocks are others."""
    [side] = world.opened
    mine, other = two_engines()
    world.connector._engine = mine.cache_config
    monkeypatch.setattr(kv, "get_current_vllm_config_or_none", lambda: other)
    with pytest.raises(ConfigError, match="another engine in this process"):
        world.connector.register_kv_caches({})
    assert world.opened == [side]
    assert world.load()[1] == set(), "it serves its own engine as before"


# A bug in objkv costs a miss.


def test_blocks_that_failed_are_evicted_whatever_else_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise another request could find them in vLLM's prefix cache."""
    connector: Any = object.__new__(ObjKVConnector)
    connector.scheduler = side = scheduler_side()
    evicted: list[set[int]] = []
    connector._kv_cache_manager = SimpleNamespace(evict_blocks=evicted.append)
    breaks(monkeypatch, side, "requests.save_again")
    monkeypatch.setattr(kv, "free_failed", lambda *_: 1 / 0)
    report = StepReport(failed={"r"})
    output = KVConnectorOutput(kv_connector_worker_meta=report, invalid_block_ids={4})
    connector.update_connector_output(output)
    assert evicted == [{4}]
