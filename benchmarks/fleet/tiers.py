"""What keeps chunks in the simulation, and the links between: each bounded, each least-used-first.

Keys are integers; equal keys are equal prefixes. Times are seconds since the start. A *unit* is
what the trace can tell apart: the chunks that end in one 512-token block, or one larger chunk.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass

from objkv.agent.ranking import Ranking


class BlockCache:
    """The prefix cache of one replica's GPUs: ``tokens_max`` tokens in blocks of the trace."""

    def __init__(self, tokens_max: int) -> None:
        self._tokens_max = tokens_max
        self._tokens = 0
        self._blocks: OrderedDict[int, int] = OrderedDict()

    def match(self, keys: list[int]) -> int:
        """Tokens of the longest prefix that is here."""
        tokens = 0
        for key in keys:
            held = self._blocks.get(key)
            if held is None:
                break
            tokens += held
        return tokens

    def add(self, keys: list[int], sizes: list[int]) -> None:
        """Keep these blocks; of one prompt, the last goes first, as in vLLM."""
        blocks = self._blocks
        for key, tokens in zip(reversed(keys), reversed(sizes), strict=True):
            if key in blocks:
                blocks.move_to_end(key)
            else:
                blocks[key] = tokens
                self._tokens += tokens
        while self._tokens > self._tokens_max:
            self._tokens -= blocks.popitem(last=False)[1]


@dataclass(slots=True)
class _Stored:
    since_s: float
    until_s: float
    chunks: int


class SharedStore:
    """Index and bulk store as one: units with a time to live.

    A hit renews the life of a unit, so the least used is also the next to expire, and one order
    serves both.
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._units: OrderedDict[int, _Stored] = OrderedDict()
        self.chunks = 0
        self.chunks_peak = 0

    def has(self, key: int, now: float) -> float | None:
        """Since when the unit can be loaded, or None. A time to come: it is being saved."""
        stored = self._units.get(key)
        return None if stored is None or stored.until_s <= now else stored.since_s

    def touch(self, key: int, now: float) -> None:
        """Count a hit: the unit lives on."""
        stored = self._units.get(key)
        if stored is not None:
            stored.until_s = now + self._ttl_s
            self._units.move_to_end(key)

    def add(self, key: int, chunks: int, since_s: float) -> None:
        """Store a unit that can be loaded from ``since_s`` on. What was not asked for in its time
        goes."""
        old = self._units.pop(key, None)
        self.chunks += chunks - (old.chunks if old else 0)
        self._units[key] = _Stored(since_s, since_s + self._ttl_s, chunks)
        while next(iter(self._units.values())).until_s <= since_s:
            self.chunks -= self._units.popitem(last=False)[1].chunks
        self.chunks_peak = max(self.chunks_peak, self.chunks)


@dataclass(slots=True)
class Held:
    """A unit that a node holds."""

    nbytes: float
    ready_s: float
    """From then on its bytes are there."""


class Shelf:
    """Memory or disk of a node, in the order of objkv's own arena."""

    def __init__(self, nbytes_max: float) -> None:
        self._nbytes_max = nbytes_max
        self._ranking = Ranking(int(nbytes_max))
        self._held: dict[int, Held] = {}
        self.nbytes = 0.0

    def get(self, key: int) -> Held | None:
        """The unit, if it is here."""
        return self._held.get(key)

    def use(self, key: int) -> None:
        """Count a read of a unit that is here."""
        self._ranking.use(str(key))

    def add(self, key: int, held: Held) -> list[tuple[int, Held]]:
        """Keep a unit that is not here; returns what had to go, which may be the unit itself."""
        if held.nbytes > self._nbytes_max:
            return [(key, held)]
        gone = []
        while self.nbytes + held.nbytes > self._nbytes_max:
            victim = self._ranking.victim(lambda _: True)
            assert victim is not None
            self._ranking.remove(victim)
            held_key = int(victim)
            gone.append((held_key, self._held.pop(held_key)))
            self.nbytes -= gone[-1][1].nbytes
        self._ranking.add(str(key), int(held.nbytes))
        self._held[key] = held
        self.nbytes += held.nbytes
        return gone


class NodeCache:
    """What one agent holds: its arena, and below it a disk. A unit that is read from the disk
    comes back to memory, and stays on the disk."""

    def __init__(self, memory_bytes: float, disk_bytes: float) -> None:
        self.memory, self.disk = Shelf(memory_bytes), Shelf(disk_bytes)
        self.disk_written = 0.0
        """Bytes."""

    def find(self, key: int) -> tuple[Held, bool] | None:
        """The unit, and whether it is in memory."""
        if (held := self.memory.get(key)) is not None:
            return held, True
        held = self.disk.get(key)
        return None if held is None else (held, False)

    def read(self, key: int, ready_s: float) -> None:
        """Count a read; a unit on the disk is in memory from ``ready_s`` on."""
        if self.memory.get(key) is not None:
            self.memory.use(key)
        elif (held := self.disk.get(key)) is not None:
            self.disk.use(key)
            self.add(key, Held(held.nbytes, ready_s))

    def add(self, key: int, new: Held) -> None:
        """Keep a unit in memory; what has to go moves to the disk."""
        if self.memory.get(key) is not None:
            return
        for old, held in self.memory.add(key, new):
            if self.disk.get(old) is None:
                self.disk.add(old, held)
                self.disk_written += held.nbytes if self.disk.get(old) is not None else 0.0


class Lane:
    """A link or a group of connections that does one thing after the other."""

    def __init__(self) -> None:
        self.free_s = 0.0
        self.busy_s = 0.0

    def start_s(self, now: float) -> float:
        """When something that comes now would begin."""
        return max(now, self.free_s)

    def take(self, now: float, work_s: float) -> float:
        """Do ``work_s`` of work; returns when it ends."""
        self.free_s = self.start_s(now) + work_s
        self.busy_s += work_s
        return self.free_s


class Gauge:
    """How busy something shared is: work per second, averaged over the last ``memory_s``."""

    def __init__(self, memory_s: float = 10.0) -> None:
        self._memory_s = memory_s
        self._level = 0.0
        self._last_s = 0.0
        self.peak = 0.0

    def add(self, now: float, work: float) -> float:
        """Count work; returns the average with it."""
        if now > self._last_s:
            self._level *= math.exp((self._last_s - now) / self._memory_s)
            self._last_s = now
        self._level += work
        average = self._level / self._memory_s
        self.peak = max(self.peak, average)
        return average
