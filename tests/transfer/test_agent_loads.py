"""Loads from an agent's memory: right bytes or a miss, and memory is read only under a lease."""

import threading
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import pytest

from objkv.agent import client
from objkv.agent.arena_cache import CachedPayload
from objkv.agent.client import AgentConnection
from objkv.agent.server import AgentSession
from objkv.background import Alarm
from objkv.errors import TransferError
from objkv.transfer.lanes import Lane
from objkv.transfer.loading import connection as module
from objkv.transfer.loading import loader as loader_module
from objkv.transfer.plan import LoadPlan
from tests.agent.consistency import is_consistent
from tests.agent.reader import load_by_agent
from tests.agent.world import Node, WatchedStore, gated
from tests.contracts.clock import ManualClock
from tests.support.arenas import LossyConnection
from tests.support.device import ON_HOST
from tests.support.paged_cache import BLOCKS, HASHES, Replica, same_blocks
from tests.support.waiting import PATIENCE_S, at_once, wait_until
from tests.transfer.test_loader import watched
from tests.transfer.test_saver import HungLane, HungMark

pytestmark = ON_HOST


class World:
    """A replica that saved, an agent, and a replica that loads by it."""

    def __init__(self) -> None:
        self.node = Node(memory=1 << 21).listen()
        self.former: list[Node] = []
        self.writer = Replica(self.node.store, self.node.index, seed=1)
        self.writer.save(range(4))
        self.reader = self.open()

    def open(self, lane: Lane | None = None, *, verify: bool = False, **limits: Any) -> Replica:
        replica = Replica(self.node.store, self.node.index, seed=2)
        load_by_agent(replica, self.connect, lane, verify=verify, **limits)
        return replica

    def connect(self) -> AgentConnection:
        return LossyConnection(self.node.path, wants_arena=True, call_s=PATIENCE_S)

    @property
    def store(self) -> WatchedStore:
        assert isinstance(self.node.store, WatchedStore)
        return self.node.store

    def right(self, first: int = 1, chunks: int = 4, reader: Replica | None = None) -> bool:
        """Whether the reader's blocks from ``first`` on are those that were saved from 1 on."""
        ids = range(BLOCKS * chunks)
        mine = (reader or self.reader).caches
        return same_blocks(self.writer.caches, [1 + n for n in ids], mine, [first + n for n in ids])

    def resident(self, chunk: int) -> CachedPayload:
        """The payload of a chunk in the agent's memory."""
        (one,) = self.node.arena_cache.peek([self.reader.path(chunk)])
        assert one is not None
        return one

    def lose_agent(self) -> None:
        assert self.node.server is not None
        self.node.server.close()

    def restart(self) -> None:
        self.node.core.close(PATIENCE_S)
        self.lose_agent()
        old = self.node
        self.former.append(old)
        self.node = Node(memory=1 << 21, path=old.path, store=old.store, index=old.index)
        self.node.path.unlink()
        self.node.listen()


@pytest.fixture
def world() -> Iterator[World]:
    while module._KEPT:  # of devices that failed in other tests
        module._KEPT.pop().close()
    world = World()
    yield world
    world.reader.close()
    wait_until(lambda: not world.node.arena_cache.leased())
    assert is_consistent(world.node.arena_cache)
    for node in (world.node, *world.former):
        node.close()


@pytest.mark.parametrize("sync", [False, True])
def test_what_one_replica_saved_another_loads_by_the_agent(world: World, sync: bool) -> None:
    outcome = world.reader.load(range(4), 1, sync=sync)
    assert not outcome.failed_blocks
    assert world.right()
    assert world.store.gets.total() == 4
    again = world.reader.load(range(4), 17, sync=sync)
    assert not again.failed_blocks
    assert world.right(17)
    assert world.store.gets.total() == 4, "from memory"
    assert again.nbytes == outcome.nbytes > 0


def test_a_thread_that_has_no_room_for_more_sleeps(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_WINDOW_BYTES", 1)
    gate, loader = gated(world.node), world.reader.loader
    waits = watched(
        monkeypatch, AgentConnection, "wait", lambda _, seconds, also: (loader.link.leased, seconds)
    )
    loader.submit(world.reader.load_plan(range(4), 1))
    wait_until(lambda: any(leased for leased, _ in waits))
    gate.set()
    assert not world.reader.outcome().failed_blocks
    assert world.right()
    assert min(seconds for leased, seconds in waits if leased) > 0
    assert max(waits)[0] == 1


def test_a_step_goes_before_what_waits(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "WINDOW", 1)
    gate, order = threading.Event(), list[str]()

    def on_get(key: str) -> None:
        order.append(key)
        assert gate.wait(PATIENCE_S)

    world.store.on_get = on_get
    slow = world.reader.load_plan(range(3), 1)
    world.reader.loader.submit(slow)
    wait_until(lambda: bool(order))
    fast = world.reader.load_plan(range(3, 4), 20, sync=True)
    world.reader.loader.submit(LoadPlan("step", fast.namespace, fast.moves, sync=True))
    gate.set()
    (step,) = world.reader.loader.take_finished(sync=True)
    assert not step.failed_blocks
    assert order[1] == world.reader.path(3)
    assert not world.reader.outcome().failed_blocks
    assert world.right(chunks=3)


def test_a_payload_of_another_chunk_in_the_arena_is_refused(world: World) -> None:
    assert not world.reader.load(range(4), 1).failed_blocks
    one, two, memory = world.resident(1), world.resident(2), world.node.arena.view
    memory[one.offset :][: one.nbytes] = memory[two.offset :][: two.nbytes]
    outcome = world.reader.load(range(4), 1)
    assert min(outcome.failed_blocks) == 1 + BLOCKS
    assert outcome.rejected
    assert world.reader.loader.take_finished(sync=False) == [], "told once"


def hand_out(monkeypatch: pytest.MonkeyPatch, number: int, **other: int) -> None:
    """The agent answers an opening with another place or length of its payload ``number``."""
    lease = AgentSession.lease

    def wrong(session: AgentSession, wanted: Any, **how: Any) -> Any:
        answers = lease(session, wanted, **how)
        answers[number] = answers[number]._replace(**other)
        return answers

    monkeypatch.setattr(AgentSession, "lease", wrong)


@pytest.mark.parametrize("sync", [False, True])
def test_a_stale_offset_of_equal_layout_never_loads_another_prompt(
    world: World, sync: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not world.reader.load(range(4), 1).failed_blocks
    hand_out(monkeypatch, 2, offset=world.resident(3).offset)
    before = world.reader.snapshot()
    outcome = world.reader.load(range(4), 17, sync=sync)
    assert outcome.failed_blocks == frozenset(range(21, 25))
    assert {prefix_hash for _, prefix_hash in outcome.rejected} == {HASHES[2]}
    assert world.right(17, chunks=2)
    assert same_blocks(before, range(21, 25), world.reader.caches, range(21, 25))
    assert world.reader.recorder.value("load_corrupt") == 1
    path = world.reader.path(2)
    wait_until(lambda: world.node.arena_cache.contains_ready([path]) == [False])


@pytest.mark.parametrize("change", [-4096, 4096, 1 << 40])
def test_a_payload_of_another_length_than_its_layout_is_refused(
    world: World, change: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not world.reader.load(range(4), 1).failed_blocks
    hand_out(monkeypatch, 1, nbytes=world.resident(1).nbytes + change)
    assert min(world.reader.load(range(4), 17).failed_blocks) == 17 + BLOCKS
    assert world.right(17, chunks=1)


def test_numbers_of_an_agent_mean_nothing_to_the_next(world: World) -> None:
    assert not world.reader.load(range(4), 1).failed_blocks
    layouts = world.reader.loader.link.layouts  # type: ignore[attr-defined]
    ((key, layout),) = layouts.items()
    layouts[key] = wrong = copy(layout)
    wrong.starts = layout.starts[::-1].copy()
    world.restart()
    wait_until(lambda: not world.reader.load(range(4), 1).failed_blocks)
    assert world.right()


@pytest.mark.parametrize("sync", [False, True])
def test_a_byte_that_flips_in_the_arena_is_found_by_a_reader_that_verifies(
    world: World, sync: bool
) -> None:
    assert not world.reader.load(range(4), 1).failed_blocks
    path, one = world.reader.path(1), world.resident(1)
    world.node.arena.view[one.offset + one.nbytes - 1] ^= 1
    assert not world.reader.load(range(4), 1).failed_blocks, "by default the agent is trusted"
    careful = world.open(verify=True)
    outcome = careful.load(range(4), 1, sync=sync)
    assert min(outcome.failed_blocks) == 1 + BLOCKS
    assert outcome.rejected
    assert careful.recorder.value("load_corrupt") == 1
    wait_until(lambda: world.node.arena_cache.contains_ready([path]) == [False])
    assert world.right(chunks=1, reader=careful)
    assert not careful.load(range(1), 1).failed_blocks
    careful.close()


def reading(world: World, lane: Lane) -> Replica:
    slow = world.open(lane)
    slow.loader.submit(slow.load_plan(range(4), 1))
    wait_until(lambda: slow.loader.link.leased == 4 and slow.loader.in_flight == 0)
    return slow


def test_no_memory_is_given_back_that_the_lane_still_reads(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, looks = threading.Event(), list[int]()

    def passes_later() -> bool:
        looks.extend([1] * gate.is_set())
        return len(looks) >= 3

    slow = reading(world, HungLane(HungMark(passes_later)))
    lost = slow.loader.link.agent
    closed = watched(monkeypatch, AgentConnection, "close", lambda agent: (agent, len(looks)))
    world.lose_agent()
    wait_until(lambda: slow.loader.link.agent is None)
    gate.set()
    wait_until(lambda: lost in [agent for agent, _ in closed])
    assert next(count for agent, count in closed if agent is lost) >= 3
    monkeypatch.undo()
    slow.close()
    world.restart()


def test_a_load_ends_with_its_agent_and_not_with_its_deadline(world: World) -> None:
    gate, loader = gated(world.node), world.reader.loader
    for name, sync in (("between", False), ("step", True)):
        loader.submit(replace(world.reader.load_plan(range(4), 1, sync=sync), request_id=name))
    wait_until(lambda: loader.link.leased == 8)  # the loader knows that all are under way
    world.lose_agent()
    try:
        (step,) = at_once(lambda: loader.take_finished(sync=True))
        wait_until(lambda: loader.in_flight == 0, bound_s=20.0)
    finally:
        gate.set()
        loader.cancel("step")
        loader.cancel("between")
    (between,) = loader.take_finished(sync=False)
    assert step.failed_blocks == between.failed_blocks == frozenset(range(1, 9))
    assert world.reader.recorder.value("load_errors") == 8


def fail() -> bool:
    raise RuntimeError("illegal address")


def keeps_memory(count: int) -> bool:
    """Whether so many arenas stay mapped: nothing shows until when the device reads."""
    kept = [agent.arena.fd >= 0 for agent in module._KEPT] == [True] * count
    while module._KEPT:
        module._KEPT.pop().close()  # the process ends
    return kept


def test_a_device_that_fails_keeps_its_memory_and_ends_no_thread(world: World) -> None:
    lane = HungLane()
    lane.mark = fail  # type: ignore[method-assign,assignment]
    broken = world.open(lane)
    for _ in range(2):
        assert broken.load(range(4), 1).failed_blocks
        wait_until(lambda: broken.loader.link.agent is not None)
    broken.close()
    assert keeps_memory(2)


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_device_that_fails_while_it_reads_keeps_the_memory(world: World, is_lost: bool) -> None:
    gate = threading.Event()
    broken = reading(world, HungLane(HungMark(lambda: gate.is_set() and fail())))
    if is_lost:
        world.lose_agent()
        wait_until(lambda: broken.loader.link.agent is None)
    gate.set()
    wait_until(lambda: bool(module._KEPT))
    broken.loader._jobs.clear()  # the engine ends
    broken.close()
    assert keeps_memory(1)
    if is_lost:
        world.restart()


@pytest.mark.parametrize("moment", ["before", "within"])
def test_loads_are_misses_while_there_is_no_agent_and_go_on_with_the_next(
    world: World, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "REACH_MAX_S", 0.1)
    if moment == "within":
        gate = gated(world.node)
        world.reader.loader.submit(world.reader.load_plan(range(4), 1))
        wait_until(lambda: bool(world.store.gets))
        threading.Timer(0.01, gate.set).start()
        world.restart()
        assert world.reader.outcome().failed_blocks
        world.store.on_get = lambda key: None
    else:
        world.restart()
    wait_until(lambda: not world.reader.load(range(4), 1).failed_blocks)
    assert world.right()


def test_without_an_agent_the_thread_pauses_whatever_the_reason(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, wait_for, clock = list[str](), client.wait_for, ManualClock(0.0)

    def waited(alarms: Sequence[Alarm], seconds: float, **connected: Any) -> bool:
        if connected:  # another loader has its agent
            return wait_for(alarms, seconds, **connected)
        done.append("wait" if seconds > 0 else "spin")
        clock.advance(seconds)
        return wait_for(alarms, 0.001)

    def fails(_: World) -> AgentConnection:
        done.append("connect")
        raise TransferError("at first") if len(done) == 1 else MemoryError

    monkeypatch.setattr(client, "monotonic", clock)
    monkeypatch.setattr(client, "wait_for", waited)
    monkeypatch.setattr(World, "connect", fails)
    replica = world.open()
    wait_until(lambda: done.count("connect") > 3)
    replica.close()
    assert "connect connect" not in " ".join(done)


def test_a_thread_that_cannot_be_prepared_loads_all_the_same(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Without it each load would end at its deadline."""

    class Lost(Lane):
        def adopt_thread(self) -> None:
            raise RuntimeError("no device")

    lost = world.open(Lost())
    assert not at_once(lambda: lost.load(range(4), 1)).failed
    assert world.right(reader=lost)
    assert "load thread not prepared" in caplog.text
    lost.close()


def test_a_closed_loader_takes_and_cancels_nothing(world: World) -> None:
    closed = world.open()
    closed.close()
    closed.loader.close()
    closed.loader.cancel("r")
    assert closed.load(range(4), 1).failed_blocks


def test_payloads_that_cannot_be_asked_for_are_misses_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> list[bytes]:
        raise ValueError("no identities")

    monkeypatch.setattr(loader_module, "identities", fails)
    outcome = world.reader.load(range(4), 1)
    assert len(outcome.failed_blocks) == 4 * BLOCKS
    assert not outcome.rejected
    assert "loads failed unexpectedly" in caplog.text
    monkeypatch.undo()
    wait_until(lambda: not world.reader.load(range(4), 17).failed_blocks)
    assert world.right(17)
