"""Memory for outputs that come all at once: who waits for it, who gets it, who gives up."""

from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objkv.agent.payloads import PayloadTransfer, ReadOutcome
from objkv.background import Steps, at_once
from objkv.connector.encoder.fetch import EncoderFetcher, State
from objkv.connector.encoder.items import EncoderOutput
from objkv.index.base import ShardRecord
from objkv.telemetry import MemoryRecorder
from tests.connector.encoder.world import (
    EMBEDS,
    IDENTITY,
    WIDTH,
    Limits,
    Place,
    Replica,
    replica,
    request,
    saved,
)
from tests.contracts.clock import ManualClock

RECORD = ShardRecord(10, 10, True, False, "0" * 16, 1)
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


class Index:
    """An index, and an agent that reads what it has, when they are told to."""

    def __init__(self) -> None:
        self.lookups: list[Steps[None]] = []
        self.reads: list[PayloadTransfer] = []
        self.unfinished = 0

    def find(self, _namespace: str, hashes: list[bytes], fields: list[str]) -> Steps[Any]:
        yield None
        return [{fields[0]: RECORD} if hashes[0][0] % 4 else None]

    def touch(self, *_args: Any, **_more: Any) -> None:
        pass

    def run(self, job: Callable[[], Steps[None] | None]) -> bool:
        if (work := job()) is not None:
            self.lookups.append(work)
        return True

    def read(self, payloads: list[PayloadTransfer]) -> None:
        self.reads += payloads

    def look(self) -> None:
        for one in [one for one in self.reads if not one.is_needed]:
            self.reads.remove(one)
            one.end(ReadOutcome.UNWANTED, 0)

    def close(self, *_args: Any) -> None:
        pass


class Crowd:
    """Requests and their outputs, as threads move them in any order."""

    def __init__(self, nbytes_max: int, requests: list[set[int]], sizes: list[int]) -> None:
        self.nbytes_max, index = nbytes_max, Index()
        config = Limits().config()
        fetcher = EncoderFetcher(
            cast("Any", index),
            cast("Any", index),
            config,
            MemoryRecorder(),
            held_bytes_max=nbytes_max,
            clock=ManualClock(),
        )
        fetcher._thread.close(0.0)
        fetcher._thread = cast("Any", index)
        self.index, self.fetcher = index, fetcher
        self.requests = {
            f"r{i}": [output(image, sizes[image]) for image in sorted(images)]
            for i, images in enumerate(requests)
        }

    def moves(self) -> list[Callable[[], None]]:
        """What can happen next besides vLLM's asking."""
        lookups = [lambda one=one: self.look_up(one) for one in self.index.lookups]
        reads = [lambda one=one: self.read(one) for one in self.index.reads]
        return [*lookups, *reads]

    def look_up(self, work: Steps[None]) -> None:
        self.index.lookups.remove(work)
        at_once(work)

    def read(self, one: PayloadTransfer) -> None:
        self.index.reads.remove(one)
        is_right = one.claim.key.prefix_hash[0] % 3 != 0
        if is_right:
            one.take_pages([memoryview(bytes(one.layers[0].nbytes))])
        one.end(ReadOutcome.READ if is_right else ReadOutcome.CORRUPT, 0)

    def step(self) -> bool:
        """vLLM asks for all of its requests, and runs the first that is ready; whether one was."""
        ready = [name for name, wanted in self.requests.items() if self.fetcher.want(name, wanted)]
        assert self.fetcher.held_bytes <= self.nbytes_max
        if not ready:
            return False
        wanted = self.requests.pop(ready[0])
        for one in wanted:
            if self.fetcher.state(one) is State.HELD:
                assert len(self.fetcher.pop_pages(one)) == one.layer.nbytes
            else:
                self.fetcher.forget(one)
        self.fetcher.drop(ready[0], wanted)
        return True


def output(image: int, rows: int) -> EncoderOutput:
    return EncoderOutput(IDENTITY.namespace(), bytes([image]) * 20, rows, 1, "U8")


@given(st.data())
def test_whoever_wants_what_somebody_can_always_go_on(data: st.DataObject) -> None:
    """Without the deadline, which is for stores."""
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=8, max_size=8))
    images = st.sets(st.integers(0, 7), min_size=1, max_size=4)
    requests = data.draw(st.lists(images, min_size=1, max_size=6))
    crowd = Crowd(data.draw(st.integers(1, 12)), requests, sizes)
    while crowd.requests:
        has_run = crowd.step() or crowd.step()  # one may free memory after another has asked
        moves = crowd.moves()
        assert has_run or moves
        if moves:
            data.draw(st.sampled_from(moves))()
    while moves := crowd.moves():
        moves[0]()
    assert crowd.fetcher.held_bytes == len(crowd.fetcher.queue) == 0
