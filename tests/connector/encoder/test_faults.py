"""Whatever happens to a stored output: it is encoded, or it is the right one. Nobody waits long."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event

import pytest
import torch

from objkv.agent.memory.arena import BOARD_BYTES, PAGE
from objkv.agent.outbox import RETRY_S
from objkv.background import at_once
from objkv.codec.values import OPENING
from objkv.connector.encoder import fetch
from objkv.errors import StoreUnavailable
from tests.connector.encoder.world import (
    EMBEDS,
    WIDTH,
    Place,
    Replica,
    output_of,
    replica,
    request,
    saved,
)
from tests.support.waiting import wait_until


@contextmanager
def hanging(place: Place) -> Iterator[None]:
    """The store answers nobody before the end."""
    gate = Event()
    place.store.arrived.clear()
    place.store.hold(gate)
    yield
    gate.set()
    place.store.mend()


def test_an_agent_that_ends_takes_no_promised_output(place: Place, second: Replica) -> None:
    """Neither does one that gives its memory to another payload, or the next one."""
    saved(place, "x", "y")
    seen = request("b", "x")
    second.wait(seen)
    assert second.side.has_item("x")
    arena = second.node.arena.view
    for at in range(BOARD_BYTES, len(arena), PAGE):
        if OPENING not in bytes(arena[at : at + PAGE]):  # the agent's headers are right
            arena[at : at + PAGE] = bytes(PAGE)
    second.node.close()
    with pytest.raises(StoreUnavailable):  # as a job does without an agent
        at_once(second.calls.touch("n", [bytes(32)], ttl_s=1))
    second.restart_node()
    second.clock.advance(RETRY_S)
    assert second.see(request("c", "y")) == []
    assert second.see(seen) == []
    for name in ("x", "y"):
        assert torch.equal(second.cache[name], output_of(name))


def test_without_an_agent_outputs_are_encoded_and_nothing_waits(
    place: Place, second: Replica
) -> None:
    saved(place, "x")
    second.node.close()
    assert second.see(request("a", "x")) == ["x"]
    assert (second.count("lookup_errors"), second.count("save_errors")) == (1, 1)
    second.restart_node()
    second.clock.advance(RETRY_S)

    def is_back() -> bool:
        second.dropped("x")
        return second.see(request("b", "x")) == []

    wait_until(is_back)


def test_a_late_output_is_encoded_at_the_deadline_and_not_saved_again(place: Place) -> None:
    saved(place, "x")
    with replica(place, lookup_deadline_ms=2_500) as second:
        with hanging(place):
            seen = request("b", "x")
            assert not second.side.is_ready(seen, 0)
            assert place.store.arrived.wait(120)
            second.clock.advance(4.9)
            second.step()
            assert not second.side.is_ready(seen, 0)
            second.clock.advance(0.2)
            assert second.side.is_ready(seen, 0)
            assert not second.side.has_item("x")
            second.step(seen)
            assert second.count("load_deadlines") == 1
        second.close()
        assert second.encoded == ["x"]
        assert second.saved == second.count("save_existed") == 0
        assert second.fetcher.held_bytes == 0


def test_a_request_that_is_aborted_while_it_waits_leaves_nothing(
    place: Place, second: Replica
) -> None:
    saved(place, "x")
    with hanging(place):
        seen = request("b", "x")
        assert not second.side.is_ready(seen, 0)
        assert place.store.arrived.wait(120)
        second.side.finish(seen)
    second.close()
    assert not second.fetcher._entries
    assert second.fetcher.held_bytes == 0


def test_a_promise_that_was_not_taken_up_holds_and_its_load_comes_with_a_step_that_computes(
    place: Place, second: Replica
) -> None:
    """vLLM may have no blocks for the request. Workers may not look at the plan of an empty step,
    and vLLM has given the outputs their place."""
    saved(place, "x", "y")
    seen = request("b", "x", "y")
    for _ in range(2):
        second.wait(seen)
        assert second.side.has_item("x")
        assert second.side.has_item("y")
        assert not second.plan(1).loads
    second.wait(seen)
    for index, name in enumerate(("x", "y")):
        assert second.side.has_item(name)
        second.side.allocate(seen, index)
    assert second.fetcher.held_bytes == 0
    assert list(second.plan(0).loads) == ["x", "y"]
    assert list(second.plan(1, freed=("x",)).loads) == ["y"]
    assert not second.plan(1).loads


def test_a_full_queue_is_a_miss(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(place, *"stuvyz")
    monkeypatch.setattr(fetch, "LOOKUP_QUEUE_MAX", 4)
    with replica(place) as second, hanging(place):
        assert not second.side.is_ready(request("stuck", *"stuv"), 0)
        assert place.store.arrived.wait(120)
        seen = request("b", "y", "z")
        assert second.side.is_ready(seen, 0)
        assert not second.side.has_item("y")
        assert second.count("load_refused") == 2


# Memory for outputs that come all at once: who waits for it, who gets it, who gives up.

ITEM = 2 * EMBEDS * WIDTH


def test_a_burst_waits_for_memory_that_the_requests_before_give_back(place: Place) -> None:
    """vLLM asks for all of its waiting requests in one step."""
    names = [f"image-{i}" for i in range(12)]
    saved(place, *names)
    with replica(place, held_bytes_max=3 * ITEM) as second:
        waiting = [request(f"r-{name}", name) for name in names]
        while waiting:
            ready = [seen for seen in waiting if second.side.is_ready(seen, 0)]
            for seen in ready:
                second.wait(seen)
                second.step(seen)
                second.side.finish(seen)
                waiting.remove(seen)
            second.step()
        assert (second.encoded, second.count("hits")) == ([], 12)
        assert second.count("load_refused") == 0
        assert second.fetcher.held_bytes == 0


def test_a_large_request_is_not_overtaken_while_it_waits(place: Place) -> None:
    saved(place, *"wxyz")
    with replica(place, held_bytes_max=2 * ITEM, lookup_deadline_ms=2_500) as second:
        holder, large, small = request("a", "x"), request("b", "y", "z"), request("c", "w")
        second.wait(holder)
        for seen in (large, small, small):
            assert not second.side.is_ready(seen, 0)
        assert list(second.fetcher.queue) == ["b", "c"]
        second.clock.advance(4.0)
        assert not second.side.is_ready(request("d", "w"), 0)
        second.clock.advance(1.0)  # vLLM may ask for it no more
        second.wait(request("d", "w"))
        assert second.see(large) == ["y", "z"]
        assert second.count("load_deadlines") == 2


def test_who_is_aborted_while_it_waits_for_memory_leaves_nothing(place: Place) -> None:
    saved(place, "x", "y")
    with replica(place, held_bytes_max=ITEM, lookup_deadline_ms=2_500) as second:
        holder, parked = request("holder", "x"), request("b", "y")
        second.wait(holder)
        assert not second.side.is_ready(parked, 0)
        while list(second.fetcher.queue) != ["b"]:
            second.step()
        second.side.finish(parked)
        assert not second.fetcher.queue
        assert second.see(holder) == []
        assert second.count("loads") == 1
        assert second.fetcher.held_bytes == 0


def test_what_never_fits_is_not_waited_for(place: Place) -> None:
    saved(place, "x")
    with replica(place, held_bytes_max=ITEM - 1) as second:
        assert second.see(request("b", "x")) == ["x"]
        assert second.count("load_refused") == 1
