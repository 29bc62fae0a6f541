"""Saves through a lane whose copies are made later than they are given, as on a GPU, into a store
that fails now and then: what is stored is what the blocks held, and every chunk is accounted for.
"""

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from threading import Condition, Thread

import pytest
import torch

from objkv.codec.payload import frame_pages, open_payload, read_header
from objkv.errors import StoreUnavailable
from objkv.index.memory import MemoryIndex
from objkv.stores.base import Buffer
from objkv.stores.memory import MemoryStore
from objkv.transfer.lanes import HostBlocks, HostLane
from objkv.transfer.plan import SaveMove, SavePlan
from objkv.transfer.saver import SaveLimits, Saver
from tests.transfer.world import NAMESPACE, PATIENCE_S, Replica, wait_until

STEPS = 30
ENDS = ("saves", "save_drops", "save_errors", "save_existed", "save_repeats")


class LateMark:
    def __init__(self, lane: "LateGathers", number: int) -> None:
        self._lane = lane
        self._number = number
        self._asked = False

    def done(self) -> bool:
        if self._asked:  # when it was given, none is done
            self._lane.allow(self._number)
        self._asked = True
        return self._is_done()

    def wait(self) -> None:
        with self._lane.changed:
            assert self._lane.changed.wait_for(self._is_done, PATIENCE_S)

    def hold_compute(self) -> None:
        self._lane.allow(self._number)
        self.wait()

    def _is_done(self) -> bool:
        return self._lane.copied >= self._number


class LateGathers(HostLane):
    """A thread makes the copies, in their order, when the forward thread asks for them: no sooner
    than it must, so that whoever does not ask lets them come too late."""

    def __init__(self) -> None:
        self.changed = Condition()
        self.given = self.copied = 0
        self._allowed = 0
        self._left = deque[tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]] | None]()
        self._thread = Thread(target=self._copy, daemon=True)
        self._thread.start()

    def gather(
        self, cache: torch.Tensor, placed: torch.Tensor, pages: Sequence[torch.Tensor]
    ) -> None:
        with self.changed:
            self.given += 1
            self._left.append((cache, placed, pages))
            self.changed.notify_all()

    def mark(self) -> LateMark:
        return LateMark(self, self.given)

    def allow(self, number: int) -> None:
        with self.changed:
            self._allowed = max(self._allowed, number)
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self._allowed += 1
            self._left.append(None)
            self.changed.notify_all()
        self._thread.join()

    def _copy(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self._left and self.copied < self._allowed)
                work = self._left.popleft()
            if work is None:
                return
            super().gather(*work)
            with self.changed:
                self.copied += 1
                self.changed.notify_all()


class UnsteadyStore(MemoryStore):
    """Fails before a put, or loses the answer after it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def put_if_absent(self, key: str, value: Buffer) -> bool:
        luck = self._random.random()
        if luck < 0.15:
            raise StoreUnavailable("did not arrive")
        written = super().put_if_absent(key, value)
        if luck < 0.3:
            raise StoreUnavailable("the answer was lost")
        return written


@pytest.mark.parametrize("codec", ["none", "lz4", "blosclz4"])
@pytest.mark.parametrize("drains", [True, False])
def test_what_is_stored_is_what_the_blocks_held(codec: str, drains: bool) -> None:
    choice = random.Random(len(codec))
    store = UnsteadyStore(len(codec))
    replica, lane = Replica(store, MemoryIndex(), seed=1, slabs=4), LateGathers()
    limits = SaveLimits(2, 6, PATIENCE_S, codec, "w")
    saver = Saver(
        replica.cache,
        {0: replica.paged},
        replica.save_slabs,
        lane=lane,
        limits=limits,
        recorder=replica.recorder,
    )
    held = defaultdict[str, list[list[bytes]]](list)
    asked = 0
    for step in range(STEPS):
        for cache in replica.caches:  # as soon as the step before may be forgotten
            cache.copy_(torch.randn(cache.shape).round())
        namespace = f"{step // 2:0{len(NAMESPACE)}x}"  # some chunks are saved twice
        chunks = choice.sample(range(4), choice.randint(1, 3))
        moves = [replica.move(c, 1 + 2 * i, base=c) for i, c in enumerate(chunks)]
        for move in moves:
            ids = list(move.block_ids)
            pages = [bytes(c[ids].view(torch.uint8).numpy().data) for c in replica.caches]
            held[replica.path(move.chunk).replace(NAMESPACE, namespace)].append(pages)
        saves = tuple(SaveMove(move, "0" * 64, None) for move in moves)
        saver.gather((SavePlan(f"r{step}", namespace, saves),))
        asked += len(saves)
        if step % 2:
            saver.fence()
        else:
            wait_until(lambda request=f"r{step}": saver.left_device(request))
    if drains:
        assert saver.drain(PATIENCE_S)
    saver.close(0.0)
    wait_until(lambda: replica.save_slabs.leased == 0)
    wait_until(lambda: sum(map(replica.recorder.value, ENDS)) == asked)
    for entry in store.scan(""):
        payload = store.get(entry.key)
        assert payload is not None
        header = read_header(payload)
        assert open_payload(payload, header.claim, replica.paged.layers) == header
        stored = []
        for i, nbytes in enumerate(replica.paged.layer_bytes):
            stored.append(bytes(frame_pages(header, i, payload, memoryview(bytearray(nbytes)))))
        assert stored in held[entry.key]
    lane.close()
    replica.close()


class PassesWhenWaited(HostLane):
    """Its copies are made when somebody waits for them."""

    def __init__(self) -> None:
        self.left: list[tuple[torch.Tensor, HostBlocks, Sequence[torch.Tensor]]] = []

    def gather(
        self, cache: torch.Tensor, placed: HostBlocks, pages: Sequence[torch.Tensor]
    ) -> None:
        self.left.append((cache, placed, pages))

    def mark(self) -> "WaitedMark":
        return WaitedMark(self)

    def let_pass(self) -> None:
        left, self.left = self.left, []
        for work in left:
            super().gather(*work)


class WaitedMark:
    def __init__(self, lane: PassesWhenWaited) -> None:
        self._lane = lane
        self._asked = False

    def done(self) -> bool:
        if self._asked:  # when it was given, none is done
            self._lane.let_pass()
        self._asked = True
        return not self._lane.left

    def wait(self) -> None:
        self._lane.let_pass()

    def hold_compute(self) -> None:
        """The model waits, nobody else."""


class NobodyWaits:
    """Stands for the threads: what is queued stays so, and is left at the end."""

    waiting = 0
    is_closed = False
    is_shedding = False

    def __init__(self, *, takes: bool) -> None:
        self.takes = takes
        self.left: list[object] = []

    def put(self, items: Iterable[object]) -> bool:
        self.left += items
        return self.takes

    def close(self, _seconds: float, give_up: Callable[[Iterable[object]], object]) -> None:
        give_up(self.left)


@pytest.mark.parametrize("takes", [True, False])
def test_no_slab_is_given_back_and_no_block_let_go_of_before_its_copies_have_passed(
    *, takes: bool
) -> None:
    """What is given up at the end may still be on its way out of its blocks, whose memory goes next
    where the engine sleeps."""
    replica, lane = Replica(MemoryStore(), MemoryIndex(), seed=1, slabs=4), PassesWhenWaited()
    limits = SaveLimits(1, 6, PATIENCE_S, "none", "w")
    saver = Saver(
        replica.cache,
        {0: replica.paged},
        replica.save_slabs,
        lane=lane,
        limits=limits,
        recorder=replica.recorder,
    )
    saver.close(0.0)
    saver._pool = NobodyWaits(takes=takes)  # type: ignore[assignment]
    released: list[int] = []
    take_back = replica.save_slabs.take_back

    def watched(memory: torch.Tensor) -> None:
        released.append(len(lane.left))
        take_back(memory)

    replica.save_slabs.take_back = watched  # type: ignore[method-assign]
    saves = tuple(SaveMove(replica.move(c, 1), "0" * 64, None) for c in range(2))
    dropped = saver.gather((SavePlan("r", NAMESPACE, saves),))
    assert len(dropped) == (0 if takes else 2)
    if takes:
        assert lane.left
        saver.close(0.0)
    assert released == [0, 0]
    assert not lane.left
    replica.close()


class HangsForEver(WaitedMark):
    def done(self) -> bool:
        return False

    def wait(self) -> None:
        raise AssertionError("nobody may wait without a bound")


def test_a_slab_that_a_hung_device_may_still_write_is_never_given_back() -> None:
    replica, lane = Replica(MemoryStore(), MemoryIndex(), seed=1, slabs=4), PassesWhenWaited()
    lane.mark = lambda: HangsForEver(lane)  # type: ignore[method-assign]
    saver = Saver(
        replica.cache,
        {0: replica.paged},
        replica.save_slabs,
        lane=lane,
        limits=SaveLimits(1, 6, PATIENCE_S, "none", "w"),
        recorder=replica.recorder,
    )
    saver.close(0.0)
    saver._pool = NobodyWaits(takes=True)  # type: ignore[assignment]
    saves = tuple(SaveMove(replica.move(c, 1), "0" * 64, None) for c in range(2))
    assert saver.gather((SavePlan("r", NAMESPACE, saves),)) == set()
    saver.close(-10.0)  # the time to look is over
    assert replica.save_slabs.leased == 2
    assert replica.save_slabs.adds_up
    assert replica.recorder.value("save_drops") == 2
    replica.close()
