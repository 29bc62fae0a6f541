"""A random life of loads over stores that fail and spoil: blocks hold the truth or what they held,
and once a load has ended nothing is written into its blocks."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
import torch

from objkv.errors import StoreUnavailable
from objkv.index.memory import MemoryIndex
from objkv.keys.identity import GroupIdentity
from objkv.stores.base import Arrived
from objkv.stores.memory import MemoryStore
from objkv.transfer.lanes import HostLane, Lane
from objkv.transfer.plan import LoadMove, LoadOutcome, LoadPlan
from tests.support.device import ON_HOST
from tests.support.paged_cache import BLOCKS, HASHES, IN_PARTS, NAMESPACE, LazyLane, Replica
from tests.support.waiting import wait_until

CHUNKS = 4
LAYERS = 5
GROUP = GroupIdentity(
    "full", None, tuple(f"l{i}" for i in range(LAYERS)), heads=4, content=32, block_size=32
)
NUM_BLOCKS = 48
PAYLOAD = 96 << 10
PLANS = 24


class WildStore(MemoryStore):
    """Gives values piece by piece over noise; forgets, flips, cuts short and breaks off."""

    def __init__(self, dice: Random) -> None:
        super().__init__()
        self._dice = dice

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        start = start or 0
        fate = self._dice.random()
        value = bytearray((self.get(key) or b"")[start : start + len(buffer)])
        if fate < 0.03:
            return None
        if fate < 0.06 and value:
            value[self._dice.randrange(len(value))] ^= 1 << self._dice.randrange(8)
        elif fate < 0.08:
            del value[self._dice.randrange(len(value) + 1) :]
        end = self._dice.randrange(len(value) + 1) if fate > 0.92 else len(value)
        buffer[:] = bytes([self._dice.randrange(256)]) * len(buffer)
        at, step = 0, self._dice.choice([3_000, 20_000, 1_000_000])
        while True:
            to = min(end, at + step)
            buffer[at:to] = value[at:to]
            at = to
            if arrived is not None:
                arrived(at)
            if at == end:
                break
        if end < len(value):
            raise StoreUnavailable("broke off")
        return at


class Life:
    """A replica that loads into blocks of its own choice, and what each of them must hold."""

    def __init__(self, seed: int, codec: str, lane: Callable[[], Lane]) -> None:
        self.dice = Random(seed)
        store, hot, index = WildStore(self.dice), WildStore(self.dice), MemoryIndex()
        self.writer = Replica(store, index, seed=1, codec=codec, group=GROUP)
        for pages in self.writer.caches:
            pages.round_()  # compressible
        self.writer.save(range(CHUNKS))
        for chunk in range(CHUNKS):
            hot.put(self.writer.path(chunk), store.get(self.writer.path(chunk)) or b"")
        self.reader = Replica(
            store,
            index,
            seed=2,
            group=GROUP,
            hot=hot,
            cuts=IN_PARTS,
            arena_bytes=self.dice.choice([2, 4, 8]) * PAYLOAD,
            queue_max=self.dice.choice([3, 64]),
            num_blocks=NUM_BLOCKS,
            lane=lane(),
        )
        found = index.lookup(NAMESPACE, HASHES[:CHUNKS])
        self.records = [dict(record.shards) for record in found if record is not None]
        assert len(self.records) == CHUNKS
        self.held = self.reader.snapshot()
        self.free = set(range(1, NUM_BLOCKS))
        self.plans: dict[str, LoadPlan] = {}

    def submit(self, name: str) -> None:
        first = self.dice.randrange(CHUNKS)
        chunks = range(first, self.dice.randrange(first, CHUNKS) + 1)
        mine = self.dice.sample(sorted(self.free), len(chunks) * BLOCKS)
        moves = []
        for chunk in chunks:
            cut = self.dice.randrange(2) if chunk == first else 0
            at = (chunk - first) * BLOCKS
            ids = tuple(mine[at + cut : at + BLOCKS])
            hot = self.dice.random() < 0.5
            shards = [(field, replace(r, hot=hot)) for field, r in self.records[chunk].items()]
            move = replace(self.reader.move(chunk, 1), first_block=cut, block_ids=ids)
            moves.append(LoadMove(move, tuple(shards)))
            self.free -= set(ids)
        plan = LoadPlan(name, NAMESPACE, tuple(moves), sync=self.dice.random() < 0.4)
        self.plans[name] = plan
        self.reader.loader.submit(plan)

    def step(self) -> None:
        """Layer by layer, if there is anything to wait for."""
        plans = [plan for plan in self.plans.values() if plan.sync]
        computed: dict[str, set[int]] = {plan.request_id: set() for plan in plans}
        for layer in range(LAYERS):
            self.reader.loader.wait_layer(0, layer)
            for plan in plans:
                computed[plan.request_id] |= self.untrue(plan, layer)
        for outcome in self.reader.loader.take_finished(sync=True):
            assert computed[outcome.request_id] <= outcome.failed_blocks
            self.settle(outcome)

    def untrue(self, plan: LoadPlan, layer: int) -> set[int]:
        """Blocks of the plan that do not hold what they should."""
        mine, theirs = self.reader.caches[layer], self.writer.caches[layer]
        return {
            block
            for load in plan.moves
            for i, block in enumerate(load.move.block_ids)
            if not torch.equal(
                mine[block], theirs[1 + load.move.chunk * BLOCKS + load.move.first_block + i]
            )
        }

    def settle(self, outcome: LoadOutcome) -> None:
        """What was told is so, and the blocks may go to somebody else."""
        plan = self.plans.pop(outcome.request_id)
        ids = {block for load in plan.moves for block in load.move.block_ids}
        for layer, (now, then) in enumerate(zip(self.reader.caches, self.held, strict=True)):
            untrue = self.untrue(plan, layer)
            assert untrue <= outcome.failed_blocks
            assert all(torch.equal(now[block], then[block]) for block in untrue)
            then[list(ids)] = now[list(ids)]
        self.free |= ids

    def nothing_else_was_written(self) -> None:
        ids = sorted(self.free)
        for now, then in zip(self.reader.caches, self.held, strict=True):
            assert torch.equal(now[ids], then[ids])


@ON_HOST
@pytest.mark.parametrize("lane", [HostLane, LazyLane])
@pytest.mark.parametrize("codec", ["none", "blosc"])
def test_blocks_hold_the_truth_or_what_they_held_and_nothing_comes_late(
    codec: str, lane: Callable[[], Lane]
) -> None:
    life = Life(len(codec), codec, lane)
    for number in range(PLANS):
        if len(life.free) >= CHUNKS * BLOCKS:
            life.submit(f"r{number}")
        if life.plans and life.dice.random() < 0.2:
            life.reader.loader.cancel(life.dice.choice(sorted(life.plans)))
        if life.dice.random() < 0.4:
            life.step()
        for outcome in life.reader.loader.take_finished(sync=False):
            life.settle(outcome)
    life.nothing_else_was_written()
    life.step()
    for name in sorted(life.plans)[::2]:
        life.reader.loader.cancel(name)

    def over() -> bool:
        for outcome in life.reader.loader.take_finished(sync=False):
            life.settle(outcome)
        return not life.plans

    wait_until(over)
    wait_until(lambda: life.reader.leased == 0)
    life.reader.close()
    life.writer.close()
    life.nothing_else_was_written()
    assert life.free == set(range(1, NUM_BLOCKS))
