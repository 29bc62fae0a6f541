"""The worker's side: tensors of its own, saves that are bounded, and what it tells."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any

import pytest
import torch

from objkv.connector.encoder.items import EncoderOutput, EncoderPlan, EncoderReport
from objkv.transfer.paging import DTYPE_NAMES
from tests.connector.encoder.world import (
    ANSWERS_S,
    EMBEDS,
    IDENTITY,
    WIDTH,
    Place,
    Replica,
    output_of,
    replica,
    request,
    saved,
)

NAME = b"n" * 20


def plan(**names: bytes) -> EncoderPlan:
    """A step that encodes outputs with these names."""
    form = EMBEDS, WIDTH, "BF16"
    saves = {key: EncoderOutput(IDENTITY.namespace(), name, *form) for key, name in names.items()}
    return EncoderPlan(saves=saves)


def test_two_ranks_are_given_the_same_and_neither_shares_memory(
    place: Place, second: Replica
) -> None:
    saved(place, "x")
    seen = request("b", "x")
    second.wait(seen)
    assert second.side.has_item("x")
    second.side.allocate(seen, 0)
    brought, caches = second.plan(1), [dict[str, torch.Tensor](), dict[str, torch.Tensor]()]
    for cache in caches:
        second.worker.load(brought, cache)
    one, other = (cache["x"] for cache in caches)
    one.zero_()
    assert torch.equal(other, output_of("x"))


@pytest.mark.parametrize(
    "encoded",
    [
        torch.zeros(EMBEDS + 1, WIDTH, dtype=torch.bfloat16),
        torch.zeros(1, EMBEDS, WIDTH, dtype=torch.bfloat16),
        torch.zeros(EMBEDS, WIDTH, dtype=torch.float32),
        torch.zeros(EMBEDS, WIDTH, dtype=torch.float64),
        torch.zeros(EMBEDS, 10 * WIDTH, dtype=torch.bfloat16),
    ],
)
def test_what_nobody_could_verify_later_is_not_saved(place: Place, encoded: torch.Tensor) -> None:
    with replica(place, form={"item_bytes_max": 2 * EMBEDS * WIDTH}) as first:
        first.worker.save(plan(x=NAME), {"x": encoded}, "x")
        # What no plan names is not looked at: vLLM encodes an image of its own when it starts.
        first.worker.save(plan(), {"x": output_of("x")}, "x")
        first.drain()
        assert first.count("save_unsupported") == 1
    assert place.payloads() == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_value_survives(place: Place, dtype: torch.dtype) -> None:
    """Those that are no numbers too, and rows that do not lie next to each other."""
    values = torch.randn(2 * EMBEDS, WIDTH).to(dtype)[::2]
    values[0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    form = {"dtype": DTYPE_NAMES[dtype]}
    with replica(place, form=form) as first:
        seen = request("a", "x")
        first.wait(seen)
        assert not first.side.has_item("x")
        first.side.allocate(seen, 0)
        first.worker.save(first.plan(1), {"x": values}, "x")
        first.drain()
    with replica(place, form=form) as second:
        assert second.see(request("b", "x")) == []
        found = second.cache["x"]
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), values.contiguous().view(torch.uint8))


@contextmanager
def held(first: Replica, count: int) -> Iterator[None]:
    """Save ``count`` outputs, the first of which is not copied before the end."""
    gate, copy, begun = Event(), first.copies.to_host, Event()

    def wait(*args: Any) -> None:
        begun.set()
        gate.wait(ANSWERS_S)
        copy(*args)

    first.copies.to_host = wait  # type: ignore[method-assign]
    for number in range(count):
        first.worker.save(plan(x=bytes([number]) * 20), {"x": output_of("x")}, "x")
        assert begun.wait(ANSWERS_S)
    yield
    gate.set()
    first.drain()


def test_a_full_queue_is_a_drop(place: Place) -> None:
    with replica(place, save_held_bytes_max=4 * 2 * EMBEDS * WIDTH) as first:
        with held(first, 10):
            assert first.count("save_drops") == 6
        assert first.saved == 4
        assert first.worker._held_bytes == 0


def test_a_save_that_waited_too_long_is_dropped(place: Place) -> None:
    with replica(place, save_deadline_ms=5_000) as first:
        with held(first, 5):
            first.clock.advance(5.1)
        assert (first.saved, first.count("save_drops")) == (1, 4)


def test_at_its_end_a_worker_waits_for_its_saves(place: Place) -> None:
    first = Replica(place)
    for number in range(8):
        first.worker.save(plan(x=bytes([number]) * 20), {"x": output_of("x")}, "x")
    first.close()
    first.close()
    assert len(place.payloads()) == 8


@pytest.mark.parametrize("holds_back", [False, True])
def test_what_workers_counted_is_told_by_the_scheduler(place: Place, *, holds_back: bool) -> None:
    """Outputs that the agent holds back count too, with their bytes."""
    with replica(place, holds_back=holds_back) as first:
        first.see(request("a", "x"))
        report = first.worker.take_report()
        assert report is not None
        sent: EncoderReport = pickle.loads(pickle.dumps(report))
        both = sent.aggregate(EncoderReport({"saves_accepted": 2.0, "load_seconds_max": 99.0}))
        output: Any = type("EncoderOutput", (), {"ec_connector_worker_meta": both})
        first.side.update(output)
        numbers = first.side.take_numbers()
        assert (numbers["saves_accepted"], numbers["load_seconds_max"]) == (3, 99.0)
        assert numbers["save_accepted_bytes"] > 2 * EMBEDS * WIDTH
        assert first.side.take_numbers() == {}
