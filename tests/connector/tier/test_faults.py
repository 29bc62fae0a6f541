"""A secondary tier whose agent or stores are slow, full, gone or lie: never an exception, never a
wait."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext

from objkv.agent import client
from objkv.agent.messages import Commit
from objkv.assembly import agent
from objkv.assembly.backends import Backends
from objkv.errors import ConfigError
from tests.connector.tier.world import Engine, offload_key, row
from tests.contracts.flaky import FlakyStore
from tests.index.flaky_index import FlakyIndex
from tests.support.waiting import PATIENCE_S, wait_until

HIT, MISS = LookupResult.HIT, LookupResult.MISS


class World:
    """Replicas, each on a node of its own, over one folder whose stores fail on request."""

    def __init__(self, engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engines
        self.bulks: list[FlakyStore] = []
        self.indexes: list[FlakyIndex] = []
        self.gate = threading.Event()
        opened: Callable[..., Backends] = agent.open_backends

        def flaky(*args: Any, **kwargs: Any) -> Backends:
            backends = opened(*args, **kwargs)
            self.bulks.append(FlakyStore(backends.bulk))
            self.indexes.append(FlakyIndex(backends.index))
            return replace(backends, bulk=self.bulks[-1], index=self.indexes[-1])

        monkeypatch.setattr(agent, "open_backends", flaky)
        # On a busy machine an agent that works takes longer than an engine would wait for it.
        opens = client.open_socket
        monkeypatch.setattr(client, "open_socket", lambda call_s: opens(PATIENCE_S))
        self._patch = monkeypatch

    def hang(self, engine: Engine) -> list[int]:
        """Have an engine's agent not answer who hands over a chunk, until the gate is open. Returns
        the bytes of each chunk that came, which grows."""
        saves, came = engine.agent.node.saves, list[int]()
        commit = saves.commit

        def late(outbox: Any, one: Commit, replica: bytes) -> Any:
            came.append(one.nbytes)
            self.gate.wait(60)
            return commit(outbox, one, replica)

        self._patch.setattr(saves, "commit", late)
        return came


@pytest.fixture
def world(engines: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    yield (world := World(engines, monkeypatch))
    world.gate.set()


@pytest.mark.parametrize(
    ("nbytes", "flipped"),
    [(0, None), (8_191, None), (None, 100), (None, 8_000)],
    ids=["empty", "short", "header", "pages"],
)
def test_a_damaged_payload_is_a_miss(
    world: World, tmp_path: Path, nbytes: int | None, flipped: int | None
) -> None:
    writer, reader = world.engine(), world.engine()
    writer.save(1)
    (file,) = (tmp_path / "chunks").rglob("*.safetensors")
    payload = bytearray(file.read_bytes()[:nbytes])
    if flipped is not None:
        payload[flipped] ^= 1
    file.write_bytes(payload)
    assert reader.ask(1) == [MISS]
    assert reader.counted("load_corrupt") == 1


def test_a_key_that_is_gone_fails_alone_and_its_record_is_forgotten(
    world: World, tmp_path: Path
) -> None:
    writer = world.engine()
    reader = world.engine({"enable_kv_events": True}, enable_kv_cache_events=True)
    writer.save(1)
    (gone,) = (tmp_path / "chunks").rglob("*.safetensors")
    writer.save(2, 3)
    gone.unlink()
    request = reader.begin()
    keys = [offload_key(n) for n in (1, 2, 3)]
    assert reader.find(request, keys) == [MISS, HIT, HIT]
    assert reader.read(request, keys[2]) == row(3)
    assert reader.counted("load_ghosts") == 1
    (event,) = [e for e in reader.manager.take_events() if e.medium.value == "STORAGE"]
    assert (list(event.keys), event.removed) == ([keys[0]], True)
    third = world.engine()
    assert third.ask(1, 2, 3) == [MISS, HIT, HIT]
    assert third.counted("load_ghosts") == 0


def test_a_slow_load_is_a_miss_after_its_deadline_and_writes_nothing_later(world: World) -> None:
    writer, reader = world.engine(), world.engine({"load_deadline_ms": 50})
    writer.save(1)
    assert reader.ask(2) == [MISS]  # what else it asks of the store at its start is over
    world.bulks[1].hold(world.gate)
    request = reader.begin()
    assert reader.find(request, [offload_key(1)]) == [MISS]
    assert reader.counted("load_deadlines") == 1
    np.asarray(reader.view)[:] = 7  # the row is somebody else's now
    world.gate.set()
    reader.tier.shutdown()  # waits for its threads
    assert (np.asarray(reader.view) == 7).all()


def test_a_slow_save_ends_at_its_deadline_and_frees_its_rows(world: World) -> None:
    engine = world.engine({"save_deadline_ms": 50}, rows=2)
    world.hang(engine)
    for numbers in ((1, 2), (3, 4)):  # the rows can be given to others
        engine.compute(engine.begin(), {offload_key(n): row(n) for n in numbers})
        engine.settle()  # although the agent does not answer
    assert engine.counted("save_deadlines") == 4
    world.gate.set()


def test_a_bug_in_a_submission_ends_its_job_and_reaches_no_engine(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(*_: object) -> None:
        raise RuntimeError("a bug")

    engine = world.engine({"save_deadline_ms": 50})
    monkeypatch.setattr(engine.tier._writer, "write", bug)
    monkeypatch.setattr(engine.tier._lookups, "submit", bug)
    engine.compute(engine.begin(), {offload_key(1): row(1)})
    engine.settle()
    assert engine.counted("save_deadlines") == 1


def test_a_tier_without_its_agent_misses_and_drops(world: World) -> None:
    writer, reader = world.engine(), world.engine()
    writer.save(1)
    reader.lose_agent()
    assert reader.ask(1) == [MISS]
    reader.compute(reader.begin(), {offload_key(2): row(2)})
    reader.settle()
    assert reader.counted("lookup_errors") > 0
    assert reader.counted("save_errors") == 1


def begin_load(reader: Engine) -> ReqContext:
    """Of the first key, by a request which still runs."""
    request = reader.begin()

    def begun() -> bool:
        reader.end_step()
        return reader.manager.lookup(offload_key(1), request) is LookupResult.HIT_PENDING

    wait_until(begun, "the load to begin")
    return request


def test_a_reset_does_not_wait_for_the_store(world: World) -> None:
    writer, reader = world.engine(), world.engine()
    writer.save(1)
    world.bulks[1].hold(world.gate)
    reader.compute(reader.begin(), {offload_key(5): row(5)})
    begin_load(reader)
    reader.end_step()
    wait_until(lambda: "get_into" in world.bulks[1].calls, "the store to be asked")
    assert reader.manager.has_pending_work()
    reader.manager.reset_cache()  # asserts that no job is left
    np.asarray(reader.view)[:] = 7
    world.gate.set()
    reader.tier.shutdown()
    assert (np.asarray(reader.view) == 7).all()


@pytest.mark.slow
def test_a_shutdown_while_busy_is_bounded_and_lets_go_of_vllms_memory(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    engine = world.engine({"drain_deadline_ms": 1})
    world.hang(engine)
    engine.compute(engine.begin(), {offload_key(n): row(n) for n in range(4)})
    region = engine.manager.primary_tier._mmap_region
    memory = region.mmap_obj
    engine.manager.shutdown()
    assert memory.closed
    assert "tier given up at shutdown what=saves chunks=4" in caplog.text


def test_jobs_that_end_after_the_shutdown_fail(world: World) -> None:
    engine = world.engine()
    engine.tier.shutdown()
    engine.save(1)
    assert engine.ask(2) == [MISS]


def test_a_load_of_a_request_that_ended_still_ends(world: World) -> None:
    writer, reader = world.engine(), world.engine()
    writer.save(1)
    request = begin_load(reader)
    reader.end(request)
    reader.settle()
    assert not reader.manager.has_pending_work()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"bulk_urll": "x"}, "bulk_url"),
        ({"locality": "HERE"}, "locality"),
        ({"settings": {"adapters": 1}}, "settings"),
    ],
)
def test_a_wrong_option_is_told_at_the_start(
    world: World, options: dict[str, Any], word: str
) -> None:
    with pytest.raises(ConfigError, match=word):
        world.engine(options)


def test_what_a_later_vllm_hands_to_its_tiers_is_no_option(world: World) -> None:
    engine = world.engine({"something_new": object()})
    engine.save(1)
    assert engine.counted("saves") == 1
