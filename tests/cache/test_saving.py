"""Background saves: what becomes of an item, its lease and its memory."""

from collections.abc import Iterator
from typing import cast

import pytest

from objkv.cache.chunks import ChunkCache, SaveOutcome
from objkv.cache.saving import SavePool
from objkv.cache.speed import LinkSpeed
from objkv.codec.payload import Claim, Header
from objkv.errors import StoreBusy, StoreUnavailable
from objkv.keys.chunk import ChunkKey
from objkv.stores.base import Buffer
from objkv.telemetry import MemoryRecorder
from tests.cache.test_chunks import HEADER, PAYLOAD
from tests.codec.payloads import CLAIM
from tests.contracts.clock import ManualClock


class Item:
    claim = CLAIM

    def __init__(self, deadline: float = 10.0) -> None:
        self.deadline, self.released = deadline, 0

    def encode(self) -> tuple[memoryview, Header]:
        return memoryview(PAYLOAD), HEADER

    def release(self) -> None:
        self.released += 1


class Target:
    def __init__(self) -> None:
        self.seal, self.link = None, LinkSpeed()
        self.error: Exception | None = None
        self.is_free = True
        self.calls: list[str] = []

    def has_room(self) -> bool:
        return True

    def begin_save(self, key: ChunkKey, *, puts: bool = False) -> bool:
        return True

    def end_save(self, key: ChunkKey) -> None:
        self.calls.append("end")

    def take_lease(self, key: ChunkKey) -> bool:
        self.calls.append("lease")
        return self.is_free

    def release_lease(self, key: ChunkKey) -> None:
        self.calls.append("release")

    def save(self, claim: Claim, payload: Buffer, header: Header) -> SaveOutcome:
        self.calls.append("save")
        if self.error is not None:
            raise self.error
        return SaveOutcome.SAVED


class World:
    def __init__(self) -> None:
        self.target, self.recorder, self.clock = Target(), MemoryRecorder(), ManualClock(0.0)
        self.late: list[Item] = []
        self.pool: SavePool[Item] = SavePool(
            "saves",
            1,
            cast("ChunkCache", self.target),
            self.recorder,
            late=self.late.append,
            clock=self.clock,
        )

    def save(self, item: Item) -> list[str]:
        before = len(self.target.calls)
        assert self.pool.put([item])
        assert self.pool.drain(30.0)
        assert item.released == 1
        return self.target.calls[before:]


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.pool.close(1.0, give_up=lambda _: None)


def test_a_save_is_made_under_its_lease(world: World) -> None:
    assert world.save(Item()) == ["lease", "save", "release", "end"]
    assert world.recorder.value("saves") == 1


def test_a_late_item_is_dropped(world: World) -> None:
    item = Item(deadline=world.clock())
    assert world.save(item) == ["end"]
    assert world.late == [item]


def test_a_chunk_that_another_process_saves_is_left_to_it(world: World) -> None:
    world.target.is_free = False
    assert world.save(Item()) == ["lease", "end"]
    assert world.recorder.value("save_leased_elsewhere") == 1


def test_a_failed_save_gives_back_all_that_it_had(world: World) -> None:
    world.target.error = StoreUnavailable("gone")
    assert world.save(Item()) == ["lease", "save", "release", "end"]
    assert world.recorder.value("save_errors") == 1


def test_saves_pause_after_a_busy_answer(world: World) -> None:
    world.target.error = StoreBusy("503")
    world.save(Item())
    world.target.error = None
    assert world.save(Item()) == ["end"]
    world.clock.advance(1.0)
    assert "save" in world.save(Item())
    assert world.recorder.value("saves_shed") == 2
