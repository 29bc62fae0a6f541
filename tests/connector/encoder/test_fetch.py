"""Memory for outputs that come all at once: who waits for it, who gets it, who gives up."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.connector.encoder.world import (
    EMBEDS,
    WIDTH,
    Limits,
    Place,
    Replica,
    replica,
    request,
    saved,
)

ITEM = 2 * EMBEDS * WIDTH


def room_for(outputs: int) -> int:
    """Bytes."""
    return outputs * ITEM


def until(second: Replica, what: Callable[[], bool]) -> None:
    """Empty steps, as vLLM's."""
    while not what():
        second.step()


def parked(second: Replica) -> int:
    """How many requests wait for memory."""
    return len(second.fetcher.queue)


def test_a_burst_waits_for_memory_that_the_requests_before_give_back(place: Place) -> None:
    """vLLM asks for all of its waiting requests in one step."""
    names = [f"image-{i}" for i in range(12)]
    saved(place, *names)
    with replica(place, limits=Limits(held_bytes_max=room_for(3))) as second:
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


def full(place: Place, second: Replica) -> Any:
    """A request that is ready and not scheduled; "y" of another waits for its memory."""
    holder = request("holder", "x")
    second.wait(holder)
    assert not second.side.is_ready(request("b", "y"), 0)
    until(second, lambda: parked(second) == 1)
    return holder


@pytest.fixture
def limits(place: Place) -> Limits:
    saved(place, "x", "y")
    return Limits(held_bytes_max=room_for(1), deadline_s=5.0)


def test_the_wait_for_memory_ends_at_the_deadline(place: Place, limits: Limits) -> None:
    with replica(place, limits=limits) as second:
        full(place, second)
        seen = request("b", "y")
        second.clock.advance(4.9)
        assert not second.side.is_ready(seen, 0)
        second.clock.advance(0.2)
        assert second.see(seen) == ["y"]
        assert second.count("load_deadlines") == 1
        assert parked(second) == 0


def test_a_large_request_is_not_overtaken_while_it_waits(place: Place) -> None:
    saved(place, *"wxyz")
    with replica(place, limits=Limits(held_bytes_max=room_for(2), deadline_s=5.0)) as second:
        holder, large, small = request("a", "x"), request("b", "y", "z"), request("c", "w")
        second.wait(holder)
        for seen in (large, small, small):
            assert not second.side.is_ready(seen, 0)
        assert list(second.fetcher.queue) == ["b", "c"]
        second.clock.advance(4.0)
        assert not second.side.is_ready(request("d", "w"), 0)
        second.clock.advance(1.0)  # vLLM may ask for it no more
        until(second, lambda: second.side.is_ready(request("d", "w"), 0))
        assert second.see(large) == ["y", "z"]


def test_who_is_aborted_while_it_waits_for_memory_leaves_nothing(
    place: Place, limits: Limits
) -> None:
    with replica(place, limits=limits) as second:
        holder = full(place, second)
        second.side.finish(request("b", "y"))
        assert parked(second) == 0
        assert second.see(holder) == []
        assert second.count("loads") == 1
        assert second.fetcher.held_bytes == 0


def test_what_never_fits_is_not_waited_for(place: Place) -> None:
    saved(place, "x")
    with replica(place, limits=Limits(held_bytes_max=room_for(1) - 1)) as second:
        assert second.see(request("b", "x")) == ["x"]
        assert second.count("load_refused") == 1
