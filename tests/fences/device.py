"""Memory that changes hands, and the streams that touch it: what fences are about.

A stream does what it was given in order and late, as on a GPU: each copy is made when the schedule
lets the stream go on. The model computes on a stream of its own. Blocks change hands in the order
of that stream, as vLLM's kernels follow each other on it; or at once, when their memory goes.
Every copy carries tickets: whose its blocks and its host memory were when it was planned. One that
finds them in other hands is what must never be. Host memory is a slab, or a leased part of an arena
that the device has registered.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import torch

from objkv.agent.arena_cache import CachedPayload
from objkv.transfer.lanes import Ints, Lane, PagedLayers, Recast, address_of
from objkv.transfer.loading.loader import Loader
from objkv.transfer.plan import LoadMoves, LoadPlan
from objkv.transfer.saver import Saver
from objkv.transfer.slabs import Slab, SlabPool
from tests.fences.stage import Broken, the_stage
from tests.support.arenas import CanBeLost, SpoilingArenaCache
from tests.support.inside import InsideAgent, InsideConnection

GONE = -1
"""The generation of a block whose memory is not there."""


class PlannedIds(np.ndarray):
    """Block ids of a plan, and all parts of them, with whose the blocks were then."""

    ticket: dict[int, int]

    def __array_finalize__(self, of: Any) -> None:
        if isinstance(of, PlannedIds):
            self.ticket = of.ticket


class Hands:
    """Whose each block is: a number that grows whenever it is given to somebody."""

    def __init__(self, num_blocks: int) -> None:
        self.planned = [0] * num_blocks
        """As the scheduler sees it."""
        self.now = [0] * num_blocks
        """As whoever touches the memory sees it."""
        self.touches = 0
        self.broken: list[str] = []

    def plan(self, ids: Ints) -> PlannedIds:
        """Return the same ids, which belong to whoever has the blocks now."""
        planned = ids.view(PlannedIds)
        planned.ticket = dict(zip(ids.flat, self.ticket(ids), strict=True))
        return planned

    def ticket(self, ids: Ints) -> tuple[int, ...]:
        """Of those who have these blocks now."""
        return tuple(self.planned[b] for b in ids.flat)

    def ticket_planned(self, ids: Ints) -> tuple[int, ...]:
        """Of those for whom these very ids were planned."""
        if not isinstance(ids, PlannedIds):
            self.say(f"written: blocks {ids}, for which there is no plan")
        return tuple(ids.ticket[b] for b in ids.flat)

    def touch(self, what: str, ids: Ints, ticket: tuple[int, ...]) -> None:
        """A copy reads or writes these blocks."""
        self.touches += 1
        for block, planned in zip(ids.flat, ticket, strict=True):
            if self.now[block] != planned:
                self.say(f"{what} block {block} of {planned}, which {self.now[block]} has")

    def say(self, what: str) -> NoReturn:
        self.broken.append(what)
        raise Broken(what)


class Stream:
    """Does one thing after the other, each when the schedule says so."""

    def __init__(self, name: str, *, late: bool, seconds: float = 0.0) -> None:
        """Not ``late``: at once, as on a CPU. ``seconds``: how long each thing takes."""
        self.late = late
        self._seconds = seconds
        self._given: list[Callable[[], bool] | Callable[[], None]] = []
        self.done = 0
        self._closed = False
        self.name = name
        if late:
            the_stage().spawn(name, self._run)

    @property
    def given(self) -> int:
        return len(self._given)

    def do(self, work: Callable[[], None]) -> None:
        """After all that was given before."""
        assert not self._closed
        if self.late:
            self._given += [self._take_time, work] if self._seconds else [work]
        else:
            work()

    def follow(self, other: "Stream", number: int) -> None:
        """What is given from now on comes after the other's first ``number`` things."""
        if self.late and other.done < number:
            self._given.append(lambda: other.done >= number)

    def end(self) -> None:
        self._closed = True

    def _take_time(self) -> None:
        the_stage().wait(self.name, lambda: False, self._seconds)

    def _run(self) -> None:
        stage = the_stage()
        while True:
            stage.wait(self.name, lambda: self._closed or self.done < len(self._given))
            if self.done == len(self._given):
                return
            work = self._given[self.done]
            if work() is False:
                stage.wait(self.name, work)  # type: ignore[arg-type]
            del work
            self._given[self.done] = _nothing  # nor is the memory kept that it touched
            self.done += 1


def _nothing() -> None:
    pass


@dataclass
class Mark:
    """After the first ``number`` things of a stream."""

    stream: Stream
    number: int
    compute: Stream
    owners: Sequence[int] = ()
    """Who has each block when a save is planned."""

    def done(self) -> bool:
        the_stage().pause("mark")
        return self.stream.done >= self.number

    def wait(self) -> None:
        the_stage().wait("copies", lambda: self.stream.done >= self.number)

    def hold_compute(self) -> None:
        self.compute.follow(self.stream, self.number)


class WatchedLane(Lane):
    """A lane whose copies are made late, and looked at."""

    def __init__(
        self, stream: Stream, hands: Hands, compute: Stream, *, loads: bool = False
    ) -> None:
        """``loads``: it writes only to blocks that were planned."""
        self.stream = stream
        self.per_span = stream.late  # as device lanes are
        self._loads = loads
        self._hands, self._compute = hands, compute
        self._owners: Sequence[int] = ()
        self.saved: Any = None
        """The step whose copies are being submitted. If it is dropped, it does not matter what they
        read."""

    def mark_compute(self) -> Any:
        owners = tuple(self._hands.planned)
        return Mark(self._compute, self._compute.given, self._compute, owners)

    def follow(self, mark: Any) -> None:
        self.stream.follow(mark.stream, mark.number)
        self._owners = mark.owners

    def scatter(
        self,
        memory: memoryview,
        starts: Ints,
        layers: PagedLayers,
        ids: Ints,
        recast: Recast | None = None,
    ) -> None:
        sizes = np.broadcast_to(layers.frame_bytes(ids.shape[1], recast), starts.shape)
        places = list(zip((starts + address_of(memory)).flat, sizes.flat, strict=True))
        tickets = [self._ticket(*place) for place in places]
        hands = self._hands
        ticket = (hands.ticket_planned if self._loads else hands.ticket)(ids)

        def copy() -> None:
            self._hands.touch("written:", ids, ticket)
            if tickets != [self._ticket(*place) for place in places]:
                self._hands.say("pages are written from memory that somebody else has")
            Lane.scatter(self, memory, starts, layers, ids, recast)

        the_stage().pause("scatter")
        self.stream.do(copy)

    def gather(self, layers: PagedLayers, ids: Ints, memory: memoryview, starts: Ints) -> None:
        places = (starts + address_of(memory)).tolist()
        slabs = [WatchedPool.ticket(place) for place in places]
        ticket = tuple(self._owners[block] for block in ids.flat)
        saved = self.saved

        def copy() -> None:
            if saved is None or not saved.is_dropped:
                self._hands.touch("read:", ids, ticket)
            if slabs != [WatchedPool.ticket(place) for place in places]:
                self._hands.say("pages are read into a slab that somebody else has")
            Lane.gather(self, layers, ids, memory, starts)

        the_stage().pause("gather")
        self.stream.do(copy)

    def _ticket(self, address: int, nbytes: int) -> Any:
        """Of whoever has this host memory."""
        if (of_slab := WatchedPool.ticket(address)) is not None:
            return of_slab
        of_lease = WatchedInside.ticket(address, nbytes)
        if of_lease is None and self._loads:  # pages are checked from other memory
            self._hands.say("pages are in memory that nobody has leased")
        return of_lease

    def mark(self) -> Any:
        return Mark(self.stream, self.stream.given, self._compute)


class _PlannedMoves(LoadMoves):
    def __init__(self, moves: LoadMoves, hands: Hands) -> None:
        super().__init__(*moves.__reduce__()[1])
        self._block_ids = hands.plan(self._block_ids)


class WatchedLoader(Loader):
    """A loader of plans whose blocks are whose they are when they are submitted."""

    def __init__(self, hands: Hands, *given: Any, **named: Any) -> None:
        self._hands = hands
        super().__init__(*given, **named)

    def submit(self, plan: LoadPlan, after: Any = None) -> None:
        super().submit(replace(plan, moves=_PlannedMoves(plan.moves, self._hands)), after)


class WatchedSaver(Saver):
    _lane: Any

    def _gather(self, step: Any) -> None:
        self._lane.saved = step
        super()._gather(step)


class WatchedPool(SlabPool):
    """Slabs that are spoiled when they are given back, and know how often they were."""

    _pools: "list[WatchedPool]"

    def __init__(self, name: str, *, fd: int = -1, **how: Any) -> None:
        super().__init__(name, fd=fd, **how)
        self.leases = {memory.data_ptr(): 0 for memory in self._free}
        self.is_outbox = fd >= 0
        """Whether its memory keeps a descriptor open, as long as there is any of it."""
        WatchedPool._pools.append(self)

    def lease(self, *given: Any, **named: Any) -> Slab:
        slab = super().lease(*given, **named)
        self.leases[slab.tensor.data_ptr()] += 1
        return slab

    def _put_back(self, memory: torch.Tensor) -> None:
        np.copyto(memory.numpy(), 0xEE)
        self.leases[memory.data_ptr()] += 1
        super()._put_back(memory)

    @classmethod
    def begin(cls) -> "list[WatchedPool]":
        """Forget the pools of earlier plays; those that are made from now on."""
        cls._pools = []
        return cls._pools

    @classmethod
    def ticket(cls, address: int) -> tuple[int, int] | None:
        """Of whoever has the slab with this address in it; None if it is in no slab."""
        for pool in cls._pools:
            for start, count in pool.leases.items():
                if start <= address < start + pool.slab_bytes:
                    return start, count
        return None


class WatchedConnection(CanBeLost, InsideConnection):
    """A connection that can be lost, as one to another process."""


class WatchedArenaCache(SpoilingArenaCache):
    def __init__(self, *given: Any, **how: Any) -> None:
        super().__init__(*given, **how)
        self._placed: dict[int, CachedPayload] = {}

    def allocate(self, one: CachedPayload, *room: int, **how: bool) -> memoryview | None:
        taken = super().allocate(one, *room, **how)
        if taken is not None:
            self._placed[one.offset] = one
        return taken

    def leased_at(self, offset: int) -> CachedPayload | None:
        for one in self._placed.values():
            if one.leases and one.offset <= offset < one.offset + one.nbytes:
                return one
        return None


class WatchedInside(InsideAgent):
    """An agent inside that knows who has which part of its arena, and what a device has
    registered of it."""

    _all: "list[WatchedInside]"

    def __init__(self, *given: Any, is_in_place: bool, register_s: float) -> None:
        """``is_in_place``: whether the device reads everything without registering it."""
        super().__init__(*given)
        self.base = np.frombuffer(self.arena.view, np.uint8).ctypes.data
        self.end = self.base + self.arena.nbytes
        self._is_in_place, self._register_s = is_in_place, register_s
        self.registered: list[tuple[int, int]] = []
        self.connections: list[WatchedConnection] = []
        self.writers: list[WatchedConnection] = []
        WatchedInside._all.append(self)

    def connect(self, *, wants_arena: bool = False, outbox: int = -1) -> Any:
        connection: Any = super().connect(wants_arena=wants_arena, outbox=outbox)
        (self.connections if wants_arena else self.writers).append(connection)
        return connection

    def give_up(self) -> None:
        """Close all memory, without a thread or a lock."""
        if self in InsideAgent.opened:
            InsideAgent.opened.remove(self)
        self.arena.close()
        for connection in self.writers:
            connection.drop_outbox()

    def register(self, address: int, nbytes: int) -> Callable[[], None]:
        the_stage().wait("register", lambda: False, self._register_s)
        part = (address, address + nbytes)
        self.registered.append(part)

        def undo() -> None:
            the_stage().pause("unlock")
            if self.arena.fd < 0:
                raise Broken("an arena was unmapped while it was registered")
            self.registered.remove(part)

        return undo

    @classmethod
    def begin(cls) -> "list[WatchedInside]":
        """Forget those of earlier plays; those that are made from now on."""
        cls._all = []
        return cls._all

    @classmethod
    def ticket(cls, address: int, nbytes: int) -> CachedPayload | None:
        """The payload that is leased there; None if none is, or the device cannot read it."""
        for inside in cls._all:
            if inside.base <= address < inside.end and inside.arena.fd >= 0:
                return inside._leased(address, address + nbytes)
        return None

    def _leased(self, start: int, end: int) -> CachedPayload | None:
        known = sum(max(0, min(end, to) - max(start, at)) for at, to in self.registered)
        if not self._is_in_place and known < end - start:
            return None
        return self.core.arena_cache.leased_at(start - self.base)
