"""Payloads that nobody wants any more, and those that somebody else still wants."""

from collections.abc import Iterator
from dataclasses import replace
from threading import Event
from time import monotonic

import pytest

from objkv.agent.arena_cache import CachedPayload
from objkv.agent.memory.arena import CellState
from objkv.errors import TransferError
from objkv.stores.base import Arrived
from tests.agent.consistency import is_consistent
from tests.agent.world import PATIENCE_S, Node
from tests.contracts.memory_store import MemoryStore
from tests.support.samples import TOKENS
from tests.support.waiting import wait_until


class SlowStore(MemoryStore):
    """Gives the first bytes of a payload, and the rest when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = Event(), Event()
        self.gets = 0

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        self.gets += 1
        assert arrived is not None
        arrived(0)
        self.begun.set()
        while not self.go.wait(0.005):
            arrived(0)
        return super().get_into(key, buffer, arrived, start)


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node(store=SlowStore(), threads=1)
    yield node
    store_of(node).go.set()
    node.close()
    assert is_consistent(node.arena_cache)
    assert node.arena_cache.leased() == 0


def store_of(node: Node) -> SlowStore:
    assert isinstance(node.store, SlowStore)
    return node.store


def settled(one: CachedPayload) -> CellState:
    wait_until(lambda: one.state is not CellState.FILLING)
    return one.state


def test_a_fetch_that_nobody_wants_any_more_leaves_its_thread(node: Node) -> None:
    first, second, third = node.save(TOKENS)
    (one,) = node.open(first)
    assert store_of(node).begun.wait(PATIENCE_S)
    (queued,) = node.open(second)
    for gone in (one, queued):
        node.arena_cache.release(gone)
    assert settled(one) is CellState.FAILED
    store_of(node).go.set()
    (other,) = node.open(third)
    assert settled(other) is CellState.READY
    assert store_of(node).gets == 2, "the queued one is not fetched"
    node.arena_cache.release(other)
    assert node.recorder.value("load_errors") == 0


def test_queued_payloads_that_nobody_wants_make_room_for_others(node: Node) -> None:
    node.core._limits = replace(node.core._limits, queue_max=2)
    busy, *abandoned, fourth, fifth = node.save(list(range(100, 100 + 16 * 5)))
    (one,) = node.open(busy)
    assert store_of(node).begun.wait(PATIENCE_S)
    for gone in node.open(*abandoned):
        node.arena_cache.release(gone)
    others = node.open(fourth, fifth)
    store_of(node).go.set()
    assert [settled(one), *map(settled, others)] == [CellState.READY] * 3
    assert store_of(node).gets == 3, "they are not fetched"
    for lease in (one, *others):
        node.arena_cache.release(lease)


def test_who_came_later_is_not_bound_by_the_first_deadline(node: Node) -> None:
    """A load between steps that joins one within a step."""
    wanted = node.save(TOKENS)[:1]
    inner, failed = node.cache.get_into, Event()

    def fails_once(*args: object, **more: object) -> int | None:
        if not failed.is_set():
            failed.set()
            assert joined.wait(PATIENCE_S)
            wait_until(lambda: monotonic() > ends)
            raise TransferError("late")
        return inner(*args, **more)  # type: ignore[arg-type]

    joined = Event()
    node.cache.get_into = fails_once  # type: ignore[method-assign,assignment]
    store_of(node).go.set()
    ends = monotonic() + 2.0
    first = node.open(*wanted, deadline_s=2.0)
    assert failed.wait(PATIENCE_S)
    second = node.open(*wanted)
    joined.set()
    assert settled(second[0]) is CellState.READY
    for lease in (*first, *second):
        node.arena_cache.release(lease)
