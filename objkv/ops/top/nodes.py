"""Rows of node agents from two scrapes of their metrics. Pure arithmetic."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from objkv.agent.http.metrics import PREFIX
from objkv.ops.top.scrape import Scrape


@dataclass(frozen=True, slots=True)
class NodePuts:
    """What a node's agent puts of a namespace into the bucket."""

    namespace: str
    """Empty: of all, because the settings alone decide."""
    puts: Literal["all", "reused"]
    break_even: float | None
    """How often a saved chunk must be read again to pay; None while it is not known."""

    def __str__(self) -> str:
        share = "" if self.break_even is None else f" {self.break_even:.2f}"
        return f"{self.namespace[:8]} puts {self.puts}{share}".strip()


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node's agent. Rates are per second of the last interval, 0 after the first scrape."""

    name: str
    """Its socket."""
    state: str
    """``up``, ``down``, ``new`` (scraped once so far), ``restarted`` or ``no agent``."""
    problem: str | None = None
    arena_bytes: float = 0.0
    free_bytes: float = 0.0
    leased_bytes: float = 0.0
    clients: float = 0.0
    """Connections of replicas."""
    hits: float = 0.0
    """Payloads read from the arena."""
    disk_hits: float = 0.0
    """Payloads read back from the node's disk."""
    fills: float = 0.0
    """Payloads that had to be fetched, from wherever."""
    load_bytes: float = 0.0
    """Bytes fetched from stores."""
    save_bytes: float = 0.0
    no_room: float = 0.0
    """Payloads not fetched because the arena was full of leased ones."""
    prefetches: float = 0.0
    """Since the agent's start, like the next two."""
    prefetch_used: float = 0.0
    prefetch_unused: float = 0.0
    puts: tuple[NodePuts, ...] = ()
    breakers_open: tuple[str, ...] = ()

    @property
    def hit_rate(self) -> float | None:
        """The share of requested payloads that were in the arena; None if none was requested."""
        asked = self.hits + self.fills
        return self.hits / asked if asked else None

    @property
    def used_share(self) -> float | None:
        """The share of the arena that payloads take; None without an arena."""
        return 1 - self.free_bytes / self.arena_bytes if self.arena_bytes else None


_LEVELS: Final = {
    "arena_bytes": "arena_bytes",
    "free_bytes": "arena_free_bytes",
    "leased_bytes": "leased_bytes",
    "clients": "clients",
    "prefetches": "prefetches_total",
    "prefetch_used": "prefetch_used_total",
    "prefetch_unused": "prefetch_unused_total",
}
"""Fields that are shown as they are."""
_RATES: Final = {
    "hits": "hits_total",
    "disk_hits": "disk_hits_total",
    "fills": "fills_total",
    "load_bytes": "load_bytes_total",
    "save_bytes": "save_bytes_total",
    "no_room": "no_room_total",
}
_OPEN: Final = f"{PREFIX}breaker_open_"
_COUNTED: Final = ("_total", "_count", "_sum")


def node_of(name: str, before: Scrape | None, now: Scrape) -> NodeRow:
    """Return a node's row from two scrapes; ``before`` is its last successful one."""
    if now.problem is not None:
        return NodeRow(name, "down", now.problem)
    if f"{PREFIX}arena_bytes" not in now.values:
        return NodeRow(name, "no agent", "its metrics are not those of an agent")
    levels: dict[str, Any] = {
        field: now.values.get(PREFIX + metric, 0.0) for field, metric in _LEVELS.items()
    }
    levels["puts"] = tuple(_puts(now.values))
    levels["breakers_open"] = tuple(
        key.removeprefix(_OPEN)
        for key, value in now.values.items()
        if key.startswith(_OPEN) and value
    )
    if before is None or now.at_s <= before.at_s:
        return NodeRow(name, "new", **levels)
    restarted = _is_restarted(before.values, now.values)
    old: Mapping[str, float] = {} if restarted else before.values
    seconds = now.at_s - before.at_s
    rates: dict[str, Any] = {
        field: (now.values.get(key, 0.0) - old.get(key, 0.0)) / seconds
        for field, key in ((field, PREFIX + metric) for field, metric in _RATES.items())
    }
    return NodeRow(name, "restarted" if restarted else "up", **levels, **rates)


def _puts(values: Mapping[str, float]) -> Iterator[NodePuts]:
    start = f"{PREFIX}puts_all:"
    for key, value in values.items():
        if key.startswith(start):
            name = key.removeprefix(start)
            share = values.get(f"{PREFIX}break_even:{name}")
            yield NodePuts(name, "all" if value else "reused", share)


def _is_restarted(before: Mapping[str, float], now: Mapping[str, float]) -> bool:
    """Whether a counter fell."""
    return any(
        now.get(key, 0.0) < value
        for key, value in before.items()
        if key.startswith(PREFIX) and key.endswith(_COUNTED)
    )
