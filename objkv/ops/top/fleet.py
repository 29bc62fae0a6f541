"""A fleet at one moment: replicas and node agents from two scrapes each, and what is stored.

Values are per second between the scrapes, or totals since each process started.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from time import monotonic
from types import TracebackType
from typing import Final, Self

from objkv.errors import StoreError
from objkv.index.base import ReadIndex
from objkv.ops.top.scrape import MetricsSource, Scrape

_AT_ONCE_MAX: Final = 16
_USAGE_EVERY_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Kind:
    """Replicas or node agents: the numbers to show, from which metrics."""

    prefix: str
    stranger: str
    """The state of a server that has none of these metrics."""
    counters: Mapping[str, Sequence[str]]
    """Sums of counters, without ``_total``."""
    levels: Mapping[str, str] = field(default_factory=dict)


REPLICA: Final = Kind(
    "vllm_objkv_",
    "no objkv",
    {
        "tokens": ("query_tokens",),
        "local_tokens": ("local_hit_tokens",),
        "hot_tokens": ("hit_hot_tokens",),
        "bulk_tokens": ("hit_bulk_tokens",),
        "load_bytes": ("load_bytes",),
        "save_bytes": ("save_accepted_bytes",),
        "refused": ("admission_refused", "admission_cut"),
        "late_lookups": ("lookup_deadlines",),
        "failed_lookups": ("lookup_errors",),
        "failed_loads": ("load_failures",),
        "queue_full": ("load_refused", "lookup_refused"),
        "drops": ("save_drops", "saves_shed", "save_over_quota", "save_errors"),
    },
    {"switched": "admission_switched"},
)
AGENT: Final = Kind(
    "objkv_agent_",
    "no agent",
    {name: (name,) for name in ("hits", "fills", "load_bytes", "save_bytes", "no_room")},
    {
        "arena_bytes": "arena_bytes",
        "free_bytes": "arena_free_bytes",
        "held_back_bytes": "unsaved_bytes",
        "clients": "clients",
    },
)
_IS_OPEN: Final = "breaker_open_"


@dataclass(frozen=True, slots=True)
class Row:
    """One replica or node agent."""

    name: str
    state: str
    """``up``, ``down``, ``new`` (scraped once so far), ``restarted``, or not one of this kind."""
    problem: str | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    """By the names of its kind. Empty without metrics; counters are 0 after the first scrape."""
    breakers_open: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredTotals:
    """What is stored, according to the index."""

    nbytes: int
    payloads: int
    namespaces: int


@dataclass(frozen=True, slots=True)
class View:
    """Everything shown at one moment."""

    rows: tuple[Row, ...]
    total: Mapping[str, float]
    """Sums over the replicas."""
    hit_rate: float | None
    stored: StoredTotals | None
    """None also while the index has counted nothing: totals follow saves by seconds."""
    problem: str | None
    """Why the index did not say what is stored."""
    agents: tuple[Row, ...]


def hit_rate(values: Mapping[str, float]) -> float | None:
    """Return the share of the tokens that replicas did not have themselves, and objkv served; None
    without such tokens."""
    asked = values["tokens"] - values["local_tokens"]
    return (values["hot_tokens"] + values["bulk_tokens"]) / asked if asked > 0 else None


def row_of(kind: Kind, name: str, before: Scrape | None, now: Scrape) -> Row:
    """Return a row; ``before`` is the last successful scrape."""
    if now.problem is not None:
        return Row(name, "down", now.problem)
    values = _own(kind, now)
    if not values:
        return Row(name, kind.stranger, f"{kind.stranger}: its metrics are others")
    state, seconds, old = "up", 1.0, dict[str, float]()
    if before is None or now.at_s <= before.at_s:
        state, old = "new", values
    else:
        seconds, old = now.at_s - before.at_s, _own(kind, before)
        # Counters that decreased were reset: their values now are the growth since the restart.
        if any(key.endswith("_total") and values.get(key, 0.0) < old[key] for key in old):
            state, old = "restarted", {}
    found = {to: values.get(metric, 0.0) for to, metric in kind.levels.items()}
    for to, metrics in kind.counters.items():
        keys = [f"{metric}_total" for metric in metrics]
        grown = sum(max(0.0, values.get(key, 0.0) - old.get(key, 0.0)) for key in keys)
        found[to] = grown / seconds
    opened = [key for key, value in values.items() if key.startswith(_IS_OPEN) and value]
    return Row(name, state, None, found, tuple(key.removeprefix(_IS_OPEN) for key in opened))


def _own(kind: Kind, scrape: Scrape) -> dict[str, float]:
    return {
        key.removeprefix(kind.prefix): value
        for key, value in scrape.values.items()
        if key.startswith(kind.prefix)
    }


def total_of(rows: Iterable[Row]) -> dict[str, float]:
    """Return the sums over replicas."""
    every = [row.values for row in rows]
    return {name: sum(one.get(name, 0.0) for one in every) for name in REPLICA.counters}


class FleetWatch:
    """Scrapes all sources in parallel. A context manager that closes them."""

    def __init__(
        self,
        replicas: Sequence[MetricsSource],
        agents: Sequence[MetricsSource] = (),
        index: ReadIndex | None = None,
    ) -> None:
        self._replicas, self._agents, self._index = replicas, agents, index
        self._last: dict[MetricsSource, Scrape] = {}
        self._usage: Future[StoredTotals | None] | None = None
        """The last answer of the index, or the one that is awaited."""
        self._usage_due_s = 0.0
        self._pool = ThreadPoolExecutor(_AT_ONCE_MAX, thread_name_prefix="objkv-top")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for source in (*self._replicas, *self._agents):
            source.close()

    def totals(self) -> View:
        """Return what each process did since its start. Waits for the index, too."""
        return self._view(since_start=True)

    def tick(self) -> View:
        """Return the rates since the last call. Blocks for at most the deadline of a scrape; the
        index is asked in the background, every half minute."""
        return self._view(since_start=False)

    def _view(self, *, since_start: bool) -> View:
        if self._index is not None and monotonic() >= self._usage_due_s:
            if self._usage is None or self._usage.done():
                self._usage = self._pool.submit(_usage, self._index)
            self._usage_due_s = monotonic() + _USAGE_EVERY_S

        def scraped(source: MetricsSource) -> tuple[str, Scrape | None, Scrape]:
            now = source.scrape()
            before = Scrape(now.at_s - 1, {}) if since_start else self._last.get(source)
            if now.problem is None:
                self._last[source] = now
            return source.name, before, now

        sources = [*self._replicas, *self._agents]
        found = list(self._pool.map(scraped, sources))
        rows = tuple(row_of(REPLICA, *one) for one in found[: len(self._replicas)])
        agents = tuple(row_of(AGENT, *one) for one in found[len(self._replicas) :])
        stored, problem = None, None
        if self._usage is not None and (since_start or self._usage.done()):
            try:
                stored = self._usage.result()
            except StoreError as exc:
                problem = f"the index does not answer: {exc}"
        total = total_of(rows)
        return View(rows, total, hit_rate(total), stored, problem, agents)


def _usage(index: ReadIndex) -> StoredTotals | None:
    usages = index.usage()
    nbytes, payloads = sum(one.nbytes for one in usages), sum(one.payloads for one in usages)
    return StoredTotals(nbytes, payloads, len(usages)) if payloads else None
