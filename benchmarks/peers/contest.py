"""The rounds, in which every system moves the same values in turn, and their results."""

import hashlib
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.crew import Crew, Entrant, PeerFailed

LAYERS = 32
LOOKUP_BYTES, LOOKUP_CHUNKS = 64 << 10, 128
START_S = 120.0
"""Until a worker has imported what it needs, on a busy machine."""


@dataclass(frozen=True)
class Options:
    """Of one run."""

    sizes: tuple[tuple[int, int], ...]
    """(bytes of a value, how many at once)."""
    rounds: int
    threads: int
    timeout_s: float
    """For one request to one worker."""
    environment: dict[str, str] = field(default_factory=dict)
    """Of every worker."""


@dataclass
class Row:
    """One operation of one entrant, on values of one size."""

    entrant: str
    rival: str | None
    what: str
    nbytes: int
    """Moved in a round; 0 for lookups."""
    seconds: list[float | None] = field(default_factory=list)
    """A round each; None where it failed."""

    def good(self) -> list[float]:
        """The rounds that did not fail."""
        return [s for s in self.seconds if s is not None]

    def median(self) -> float | None:
        """MB/s, or ms for lookups; None if no round was good."""
        if not (good := self.good()):
            return None
        median = statistics.median(good)
        return self.nbytes / 1e6 / median if self.nbytes else median * 1e3


@dataclass
class Result:
    """Of a whole run."""

    rows: list[Row]
    out: dict[str, str]
    """Who did not take part, or not to the end, and why."""
    failures: list[str]

    def ratio(self, row: Row) -> float | None:
        """How many times as fast objkv was: the median over rounds of this row's seconds to those
        of its rival in the same round."""
        rivals = [r for r in self.rows if r.entrant == row.rival and r.what == row.what]
        if not rivals:
            return None
        pairs = zip(row.seconds, rivals[0].seconds, strict=False)
        ratios = [a / b for a, b in pairs if a is not None and b is not None]
        return statistics.median(ratios) if ratios else None


class Contest:
    """Everybody who can take part, from the first round to the last."""

    def __init__(
        self,
        servers: dict[str, Any],
        options: Options,
        *,
        clear: Callable[[], None],
        progress: Callable[[str], object],
    ) -> None:
        self._servers = servers
        self._options = options
        self._clear = clear
        self._progress = progress
        self._result = Result([], {}, [])
        self._crews: list[Crew] = []
        self._case: dict[str, int] = {}

    def run(self, entrants: Sequence[Entrant]) -> Result:
        """All sizes, then lookups. ``clear`` empties the servers; ``progress`` gets each step."""
        folder = Path(self._servers["folder"])
        with ExitStack() as stack:
            for entrant in entrants:
                self._progress(f"{entrant.name}: starting")
                if missing := entrant.missing():
                    self._result.out[entrant.name] = missing
                    continue
                pool = stack.enter_context(Crew(entrant, folder, self._options.environment))
                self._crews.append(pool)
                self._must(pool, self._open)
            for value_bytes, values in self._options.sizes:
                self._rounds(value_bytes, values, lookups=False)
            self._rounds(LOOKUP_BYTES, LOOKUP_CHUNKS, lookups=True)
        return self._result

    def _rounds(self, value_bytes: int, values: int, *, lookups: bool) -> None:
        self._case = {"value_bytes": value_bytes, "values": values, "layers": LAYERS}
        for pool in list(self._crews):
            self._must(pool, self._prepare)
        rows = {
            pool.entrant.name: _rows(pool.entrant, value_bytes, values, lookups=lookups)
            for pool in self._crews
        }
        self._result.rows += [row for of_crew in rows.values() for row in of_crew]
        for round_number in range(self._options.rounds + 1):
            for pool in list(self._crews):
                name = pool.entrant.name
                self._progress(f"{name}: round {round_number}, {value_bytes >> 10} KiB")
                names = _names(f"{name}/{value_bytes}/{round_number}", values)
                seconds = self._turn(pool, names, round_number, lookups=lookups)
                if round_number:  # the first one warms up
                    for row, one in zip(rows[name], seconds, strict=True):
                        row.seconds.append(one)

    def _turn(
        self, pool: Crew, names: list[str], seed: int, *, lookups: bool
    ) -> tuple[float | None, ...]:
        """Seconds of put and get, or of the lookup; None for what failed."""
        timeout_s = self._options.timeout_s
        ask = partial(pool.ask, timeout_s=timeout_s, names=names)
        put = self._try(lambda: ask("writer", "put", seed=seed))
        second = None
        if put and lookups:
            second = self._try(lambda: _found(ask("reader", "lookup")))
        elif put:
            second = self._try(lambda: _same(ask("reader", "get"), put["digests"]))
        if pool.alive:
            self._try(partial(pool.ask_all, "clear", timeout_s))
        self._clear()
        if not pool.alive:
            self._crews.remove(pool)
            self._result.out[pool.entrant.name] = self._result.failures[-1]
        after = second["seconds"] if second else None
        return (after,) if lookups else (put["seconds"] if put else None, after)

    def _open(self, pool: Crew) -> None:
        pool.ask_all("open", START_S, servers=self._servers, threads=self._options.threads)

    def _prepare(self, pool: Crew) -> None:
        pool.ask_all("prepare", START_S, **self._case)

    def _try(self, call: Callable[[], Any]) -> Any:
        """What it returns; None if it failed."""
        try:
            return call()
        except PeerFailed as exc:
            self._result.failures.append(str(exc))
            return None

    def _must(self, pool: Crew, call: Callable[[Crew], None]) -> None:
        """Without this it is out."""
        try:
            call(pool)
        except PeerFailed as exc:
            self._crews.remove(pool)
            self._result.out[pool.entrant.name] = str(exc)


def _rows(entrant: Entrant, value_bytes: int, values: int, *, lookups: bool) -> tuple[Row, ...]:
    name, rival = entrant.name, entrant.rival
    if lookups:
        return (Row(name, rival, f"lookup of {values} chunks", 0),)
    size = f"{value_bytes / 2**20:g} MiB"
    total = value_bytes * values
    return (
        Row(name, rival, f"put, {size}", total),
        Row(name, rival, f"get, {size}", total),
    )


def _found(answer: dict[str, Any]) -> dict[str, Any]:
    if answer["found"] != LOOKUP_CHUNKS:
        raise PeerFailed(f"a lookup found {answer['found']} of {LOOKUP_CHUNKS}")
    return answer


def _same(answer: dict[str, Any], digests: list[str]) -> dict[str, Any]:
    if answer["digests"] != digests:
        raise PeerFailed("a get brought other bytes than were put")
    return answer


def _names(what: str, count: int) -> list[str]:
    return [
        hashlib.sha1(f"{what}/{i}".encode(), usedforsecurity=False).hexdigest()
        for i in range(count)
    ]
