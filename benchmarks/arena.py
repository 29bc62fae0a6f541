"""Replay a trace through a node's arena under several eviction orders, and print what each finds.

    python -m benchmarks.arena [--trace conversation_trace.jsonl]

Each request reads the blocks of its prompt that are resident, and adds the others, which were
fetched or computed. The arena's size is a share of all different blocks. objkv's own order was
chosen on the first half of the trace, so compare the second half.
"""

import argparse
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.fleet.trace import SAMPLE_FILE, Request, read_trace
from objkv.agent.ranking import Ranking

SHARES = (0.02, 0.05, 0.1, 0.2, 0.4)


class Order(Protocol):
    """An eviction order over blocks of equal size."""

    def __init__(self, room: int) -> None: ...

    def has(self, block: Any) -> bool:
        """Whether a block is resident."""

    def use(self, block: Any) -> None:
        """A resident block is read."""

    def add(self, block: Any) -> None:
        """A block becomes resident, in place of others if there is no room."""


class Ours:
    """The order of ``objkv.agent.ranking``."""

    def __init__(self, room: int) -> None:
        self._room, self._ranking = room, Ranking(room)

    def has(self, block: Any) -> bool:
        return str(block) in self._ranking

    def use(self, block: Any) -> None:
        self._ranking.use(str(block))

    def add(self, block: Any) -> None:
        while len(self._ranking) >= self._room:
            victim = self._ranking.victim(lambda key: True)
            assert victim is not None
            self._ranking.remove(victim)
        self._ranking.add(str(block), 1)


class Lru:
    """Least recently used."""

    def __init__(self, room: int) -> None:
        self._room, self._blocks = room, OrderedDict[Any, None]()

    def has(self, block: Any) -> bool:
        return block in self._blocks

    def use(self, block: Any) -> None:
        self._blocks.move_to_end(block)

    def add(self, block: Any) -> None:
        while len(self._blocks) >= self._room:
            self._blocks.popitem(last=False)
        self._blocks[block] = None


class Tenth(Ranking):
    """S3-FIFO as its authors recommend it."""

    probation = 0.1


class OursWithTenth(Ours):
    """A tenth on probation."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._ranking = Tenth(room)


class Sieve:
    """SIEVE: a hand moves from old to new and evicts what was not read since it last passed.
    Source: Zhang et al., NSDI 2024."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._behind, self._ahead = OrderedDict[Any, bool](), OrderedDict[Any, bool]()
        """Blocks that the hand has passed, and those in front of it, the oldest first."""

    def has(self, block: Any) -> bool:
        return block in self._behind or block in self._ahead

    def use(self, block: Any) -> None:
        (self._behind if block in self._behind else self._ahead)[block] = True

    def add(self, block: Any) -> None:
        while len(self._behind) + len(self._ahead) >= self._room:
            if not self._ahead:  # from the newest back to the oldest
                self._behind, self._ahead = self._ahead, self._behind
            first, was_read = self._ahead.popitem(last=False)
            if was_read:
                self._behind[first] = False
        self._ahead[block] = False


ORDERS: dict[str, type[Order]] = {
    "objkv": Ours,
    "a tenth": OursWithTenth,
    "SIEVE": Sieve,
    "LRU": Lru,
}


def found(order: Order, requests: Sequence[Request]) -> float:
    """Return the share of all blocks that were resident when they were wanted."""
    hits = total = 0
    for request in requests:
        for block in request.blocks:
            total += 1
            if order.has(block):
                order.use(block)
                hits += 1
            else:
                order.add(block)
    return hits / total


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, default=SAMPLE_FILE)
    requests = list(read_trace(parser.parse_args().trace))
    half = len(requests) // 2
    for name, part in (("first half", requests[:half]), ("second half", requests[half:])):
        blocks = len({block for request in part for block in request.blocks})
        print(f"{name}: {blocks:,} different blocks")
        for order, kind in ORDERS.items():
            shares = [found(kind(max(1, int(share * blocks))), part) for share in SHARES]
            cells = " ".join(
                f"{size:4.0%}: {share:.3f}" for size, share in zip(SHARES, shares, strict=True)
            )
            print(f"  {order:8} {cells}")


if __name__ == "__main__":
    main()
