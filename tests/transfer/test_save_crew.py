"""Threads that save what a queue holds: in order, to the end, and whatever a save does."""

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event

import pytest

from objkv.errors import LeftAlone, StoreBusy, StoreError
from objkv.telemetry import MemoryRecorder
from objkv.testing.clock import ManualClock
from objkv.transfer.background import SaveCrew
from tests.transfer.world import PATIENCE_S, wait_until


class Item:
    def __init__(self, path: str) -> None:
        self.path = path


@contextmanager
def crew(save: Callable[[Item], None], recorder: MemoryRecorder) -> Iterator[SaveCrew[Item]]:
    one = SaveCrew("saves", 1, save, recorder)
    yield one
    one.close(PATIENCE_S, list)


def test_what_is_put_is_saved_in_order() -> None:
    saved: list[str] = []
    with crew(lambda item: saved.append(item.path), MemoryRecorder()) as one:
        assert one.put([Item("a"), Item("b")])
        assert one.put([Item("c")])
        assert one.drain(PATIENCE_S)
        assert saved == ["a", "b", "c"]
        assert str(one) == "0 waiting, 0 under way"


def test_errors_are_counted_and_told_once_and_the_next_save_begins(
    caplog: pytest.LogCaptureFixture,
) -> None:
    faults: list[Exception | None] = [StoreError("no"), StoreError("no"), KeyError("x"), None]

    def save(_: Item) -> None:
        if (fault := faults.pop(0)) is not None:
            raise fault

    recorder = MemoryRecorder()
    with caplog.at_level(logging.WARNING), crew(save, recorder) as one:
        one.put(Item(f"chunk-{i}") for i in range(4))
        assert one.drain(PATIENCE_S)
    assert recorder.value("save_errors") == 3
    assert caplog.text.count("saves failing") == 1
    assert "saves failed unexpectedly key=chunk-2" in caplog.text
    assert caplog.text.count("saves working again") == 1


def test_closing_hands_back_what_no_thread_has_taken_and_takes_no_more() -> None:
    asked, go = Event(), Event()

    def save(_: Item) -> None:
        asked.set()
        assert go.wait(PATIENCE_S)

    one: SaveCrew[Item] = SaveCrew("saves", 1, save, MemoryRecorder())
    one.put([Item("a"), Item("b"), Item("c")])
    assert asked.wait(PATIENCE_S)
    left: list[Item] = []
    one.close(0.0, left.extend)
    assert [item.path for item in left] == ["b", "c"]
    assert one.is_closed
    assert not one.put([Item("d")])
    go.set()
    one.close(PATIENCE_S, left.extend)
    assert len(left) == 2
    assert one.drain(0.0)


def test_an_item_that_was_saved_is_not_kept_until_the_next_one() -> None:
    with crew(lambda _: None, MemoryRecorder()) as one:
        item = Item("a")
        seen = weakref.ref(item)
        one.put([item])
        del item
        wait_until(lambda: gc.collect() >= 0 and seen() is None)


@pytest.mark.parametrize("refusal", [LeftAlone("open"), StoreBusy("503")])
def test_saves_give_way_for_a_moment_to_a_store_that_wants_none(
    refusal: StoreError, caplog: pytest.LogCaptureFixture
) -> None:
    clock, faults = ManualClock(), [refusal]

    def save(_: Item) -> None:
        if faults:
            raise faults.pop()

    recorder = MemoryRecorder()
    one = SaveCrew("saves", 1, save, recorder, clock=clock)
    one.put([Item("a")])
    wait_until(lambda: recorder.value("saves_shed") == 1)
    wait_until(lambda: one.is_shedding)
    clock.advance(0.09)
    assert one.is_shedding
    clock.advance(0.02)
    assert not one.is_shedding
    assert recorder.value("save_errors") == 0
    assert caplog.text == ""  # the breaker says it
    one.close(PATIENCE_S, list)
