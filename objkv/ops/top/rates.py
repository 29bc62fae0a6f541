"""Rates and shares of a replica between two scrapes. Pure arithmetic."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Final

from objkv.ops.top.scrape import Scrape

_PREFIX: Final = "vllm_objkv_"
_SWITCHED: Final = f"{_PREFIX}admission_switched"
_REFUSALS: Final = ("admission_refused", "admission_cut", "load_refused", "lookup_refused")
_MISSES: Final = ("load_failures", "lookup_errors", "lookup_deadlines")
_DROPS: Final = ("save_drops", "saves_shed", "save_over_quota", "save_errors")


@dataclass(frozen=True, slots=True)
class Flow:
    """Values per second over an interval; can be summed over replicas."""

    computed_tokens: float = 0.0
    local_tokens: float = 0.0
    hot_tokens: float = 0.0
    bulk_tokens: float = 0.0
    load_bytes: float = 0.0
    save_bytes: float = 0.0
    refusals: float = 0.0
    """Hits not loaded, because admission refused or a queue was full."""
    misses: float = 0.0
    """Failed loads and lookups."""
    drops: float = 0.0
    """Chunks not saved."""
    lookups: float = 0.0
    lookup_seconds: float = 0.0
    loads: float = 0.0
    load_seconds: float = 0.0
    running: float = 0.0
    """Current requests, not per second."""
    waiting: float = 0.0

    def __add__(self, other: "Flow") -> "Flow":
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return Flow(**sums)

    @property
    def tokens(self) -> float:
        """All prompt tokens, from any source."""
        return self.computed_tokens + self.local_tokens + self.hot_tokens + self.bulk_tokens

    @property
    def asked_tokens(self) -> float:
        """Tokens missing in the replica's own prefix cache."""
        return self.tokens - self.local_tokens

    @property
    def hit_rate(self) -> float | None:
        """The share of ``asked_tokens`` that objkv served; None without such tokens."""
        if self.asked_tokens <= 0:
            return None
        return (self.hot_tokens + self.bulk_tokens) / self.asked_tokens

    @property
    def lookup_ms(self) -> float | None:
        """Mean duration of a lookup, in ms."""
        return 1000 * self.lookup_seconds / self.lookups if self.lookups else None

    @property
    def load_ms(self) -> float | None:
        """Mean duration of a load, in ms."""
        return 1000 * self.load_seconds / self.loads if self.loads else None


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """One replica."""

    name: str
    state: str
    """``up``, ``down``, ``new`` (scraped once so far), ``restarted`` or ``no objkv``."""
    problem: str | None
    flow: Flow
    switched: bool = False
    """Whether an operator's order decides about its loads."""


def row_of(name: str, before: Scrape | None, now: Scrape) -> ReplicaRow:
    """Return the replica's row from two scrapes; ``before`` is its last successful one."""
    if now.problem is not None:
        return ReplicaRow(name, "down", now.problem, Flow())
    if not any(key.startswith(_PREFIX) for key in now.values):
        return ReplicaRow(name, "no objkv", "its metrics contain no objkv metrics", _levels(now))
    switched = now.values.get(_SWITCHED, 0.0) > 0
    if before is None or now.at_s <= before.at_s:
        return ReplicaRow(name, "new", None, _levels(now), switched)
    # Counters that decreased were reset: their values now are the growth since the restart.
    restarted = any(
        value < before.values.get(key, 0.0)
        for key, value in now.values.items()
        if key.startswith(_PREFIX) and key.endswith(("_total", "_count"))
    )
    rates = _Rates(before.values if not restarted else {}, now)
    rates.seconds = now.at_s - before.at_s
    state = "restarted" if restarted else "up"
    return ReplicaRow(name, state, None, rates.flow(), switched)


def total_of(rows: Iterable[ReplicaRow]) -> Flow:
    """Return the sum over all replicas."""
    total = Flow()
    for row in rows:
        total += row.flow
    return total


class _Rates:
    def __init__(self, before: Mapping[str, float], now: Scrape) -> None:
        self._before = before
        self._now = now
        self.seconds = 1.0

    def flow(self) -> Flow:
        query, local = self._total("query_tokens"), self._total("local_hit_tokens")
        hot, bulk = self._total("hit_hot_tokens"), self._total("hit_bulk_tokens")
        levels = _levels(self._now)
        return Flow(
            # Preempted requests are counted twice, so the difference may be negative.
            computed_tokens=max(0.0, query - local - hot - bulk),
            local_tokens=local,
            hot_tokens=hot,
            bulk_tokens=bulk,
            load_bytes=self._total("load_bytes"),
            save_bytes=self._total("save_accepted_bytes"),
            refusals=sum(map(self._total, _REFUSALS)),
            misses=sum(map(self._total, _MISSES)),
            drops=sum(map(self._total, _DROPS)),
            lookups=self._rate("lookup_seconds_count"),
            lookup_seconds=self._rate("lookup_seconds_sum"),
            loads=self._rate("load_seconds_count"),
            load_seconds=self._rate("load_seconds_sum"),
            running=levels.running,
            waiting=levels.waiting,
        )

    def _total(self, name: str) -> float:
        return self._rate(f"{name}_total")

    def _rate(self, name: str) -> float:
        key = f"{_PREFIX}{name}"
        grown = self._now.values.get(key, 0.0) - self._before.get(key, 0.0)
        return max(0.0, grown) / self.seconds


def _levels(now: Scrape) -> Flow:
    running = now.values.get("vllm_num_requests_running", 0.0)
    return Flow(running=running, waiting=now.values.get("vllm_num_requests_waiting", 0.0))
