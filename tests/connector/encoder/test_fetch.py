"""Memory for outputs that come all at once: who waits for it, who gets it, who gives up."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objkv.connector.encoder.fetch import OutputMemory, State, WantedOutput
from objkv.connector.encoder.items import EncoderOutput
from objkv.index.base import ChunkEntry
from objkv.keys.encoder import ENCODER_FIELD, encoder_hash, encoder_root
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

ITEM = 2 * EMBEDS * WIDTH


def room_for(outputs: int) -> int:
    """Bytes."""
    return outputs * ITEM


def until(second: Replica, what: Callable[[], bool]) -> None:
    """Empty steps, as vLLM's."""
    while not what():
        second.step()


def parked(second: Replica) -> int:
    """How many outputs wait for memory."""
    return waiting(second.fetcher.memory)


def waiting(memory: OutputMemory) -> int:
    """How many outputs wait."""
    return sum(one.is_needed for batch in memory._batches for one in batch)


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
        assert second.fetcher.memory.held_bytes == 0


def test_requests_that_hold_what_the_other_waits_for_do_not_wait_for_ever(place: Place) -> None:
    images = [(f"{name}-1", f"{name}-2") for name in "abcd"]
    saved(place, *(name for pair in images for name in pair))
    with replica(place, limits=Limits(held_bytes_max=room_for(2))) as second:
        waiting = [request(f"r-{pair}", *pair) for pair in images]
        for _ in images:
            until(second, lambda: any(second.side.is_ready(seen, 0) for seen in waiting))
            seen = next(seen for seen in waiting if second.side.is_ready(seen, 0))
            second.step(seen)
            second.side.finish(seen)
            waiting.remove(seen)
        assert not second.encoded
        assert second.fetcher.memory.held_bytes == parked(second) == 0


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
        assert second.saved == second.count("save_existed") == 0  # it is stored
        assert parked(second) == 0


def test_who_is_aborted_while_it_waits_for_memory_leaves_nothing(
    place: Place, limits: Limits
) -> None:
    with replica(place, limits=limits) as second:
        holder = full(place, second)
        second.side.finish(request("b", "y"))
        assert parked(second) == 0
        assert second.see(holder) == []
        assert second.count("loads") == 1
        assert second.fetcher.memory.held_bytes == 0


def test_what_never_fits_is_not_waited_for(place: Place) -> None:
    saved(place, "x")
    with replica(place, limits=Limits(held_bytes_max=room_for(1) - 1)) as second:
        assert second.see(request("b", "x")) == ["x"]
        assert second.count("load_refused") == 1
        assert second.count("save_existed") == 0


def test_any_number_may_wait_for_memory_at_the_end(place: Place, limits: Limits) -> None:
    """Each of them ended within the call that ended the one before, and there are 1,000 calls."""
    namespace, names = IDENTITY.namespace(), [f"image-{number}" for number in range(400)]
    (found,) = place.index.find(namespace, [encoder_hash(namespace, "x")], (ENCODER_FIELD,))
    assert found is not None
    for name in names:
        hashes = encoder_hash(namespace, name), encoder_root(namespace)
        place.index.publish(ChunkEntry(namespace, *hashes, 0, EMBEDS), found, ttl_s=3600)
    with replica(place, limits=limits) as second:
        holder = full(place, second)
        for name in names:
            assert not second.side.is_ready(request(f"r-{name}", name), 0)
        until(second, lambda: parked(second) == 1 + len(names))
        second.close()
        second.side.finish(holder)
        assert parked(second) == second.fetcher.memory.held_bytes == 0


class Crowd:
    """Requests and their outputs, as a fetcher with its threads moves them."""

    def __init__(self, nbytes_max: int, requests: list[set[int]], sizes: list[int]) -> None:
        self.room, self.nbytes_max = OutputMemory(nbytes_max), nbytes_max
        self.entries = {i: entry(i, sizes[i]) for i in set().union(*requests)}
        self.requests = {f"r{i}": images for i, images in enumerate(requests)}
        self.found: list[list[int]] = []
        """What each request was the first to want, to be looked up."""
        known = set[int]()
        for images in requests:
            self.found.append(sorted(images - known))
            known |= images
        self.reading: list[int] = []

    def moves(self) -> list[Callable[[], None]]:
        """What can happen next."""
        asks = [self.ask] if self.found else []
        reads = [lambda image=image: self.read(image) for image in self.reading]
        runs = [
            lambda name=name: self.run(name)
            for name, images in self.requests.items()
            if all(self.state(image) is not State.WAITING for image in images)
        ]
        return [*asks, *reads, *runs]

    def state(self, image: int) -> State:
        return self.entries[image].state if image in self.entries else State.ABSENT

    def ask(self) -> None:
        """The lookup of the next request has ended."""
        for one in self.room.ask([self.entries[image] for image in self.found.pop(0)]):
            one.state = State.STORED
        self.share()

    def read(self, image: int) -> None:
        self.reading.remove(image)
        one = self.entries[image]
        one.state = State.ABSENT if image % 3 == 0 else State.HELD
        if one.state is not State.HELD:
            self.room.free(one)
        self.share()

    def run(self, name: str) -> None:
        """Its outputs are taken, and others that wanted them have them from vLLM."""
        for image in self.requests.pop(name):
            one = self.entries.pop(image, None)
            if one is not None:
                one.state = State.ABSENT
                self.room.free(one)
        self.share()

    def share(self) -> None:
        self.reading += [one.claim.key.prefix_hash[0] for one in self.room.grant()]
        assert self.room.held_bytes <= self.nbytes_max


def entry(image: int, rows: int) -> WantedOutput:
    output = EncoderOutput(IDENTITY.namespace(), bytes([image]) * 20, rows, 1, "U8")
    return WantedOutput(output.claim, (output.layer,), 0.0, lambda *_: None)


@given(st.data())
def test_whoever_wants_what_somebody_can_always_go_on(data: st.DataObject) -> None:
    """Without the deadline, which is for stores."""
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=8, max_size=8))
    images = st.sets(st.integers(0, 7), min_size=1, max_size=4)
    requests = data.draw(st.lists(images, min_size=1, max_size=6))
    crowd = Crowd(data.draw(st.integers(1, 12)), requests, sizes)
    while crowd.requests:
        moves = crowd.moves()
        assert moves
        data.draw(st.sampled_from(moves))()
    assert crowd.room.held_bytes == waiting(crowd.room) == 0
