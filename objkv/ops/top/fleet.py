"""A fleet at one moment: replicas and node agents from two scrapes each, and what is stored.

Values are per second between the scrapes, or totals since each process started.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from time import monotonic
from types import TracebackType
from typing import Any, Final, Self

from objkv.agent.http.metrics import PREFIX as _AGENT
from objkv.errors import StoreError
from objkv.index.base import ReadIndex
from objkv.ops.top.scrape import MetricsSource, Scrape

_REPLICA: Final = "vllm_objkv_"
_REFUSALS: Final = ("admission_refused", "admission_cut", "load_refused", "lookup_refused")
_MISSES: Final = ("load_failures", "lookup_errors", "lookup_deadlines")
_DROPS: Final = ("save_drops", "saves_shed", "save_over_quota", "save_errors")
_AT_ONCE_MAX: Final = 16
_USAGE_EVERY_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Flow:
    """What replicas did; can be summed over replicas."""

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
    """Current requests, never per second."""
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


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """Which payloads of a namespace a node's agent saves to the bucket."""

    namespace: str
    """Empty: of all, because the settings alone decide."""
    saves: str
    """``all`` or ``reused``."""
    break_even: float | None
    """How often a saved chunk must be read again to pay; None while it is not known."""

    def __str__(self) -> str:
        share = "" if self.break_even is None else f" {self.break_even:.2f}"
        return f"{self.namespace[:8]} saves {self.saves}{share}".strip()


@dataclass(frozen=True, slots=True)
class AgentRow:
    """One node's agent. What is not a level is 0 after the first scrape."""

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
    held_back_payloads: float = 0.0
    """Payloads that no store has so far."""
    held_back_bytes: float = 0.0
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
    policies: tuple[SavePolicy, ...] = ()
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


@dataclass(frozen=True, slots=True)
class StoredTotals:
    """What is stored, according to the index."""

    nbytes: int
    payloads: int
    namespaces: int


@dataclass(frozen=True, slots=True)
class View:
    """Everything shown at one moment."""

    rows: tuple[ReplicaRow, ...]
    total: Flow
    stored: StoredTotals | None
    problem: str | None
    """Why the index did not say what is stored."""
    agents: tuple[AgentRow, ...]


def replica_row(name: str, before: Scrape | None, now: Scrape) -> ReplicaRow:
    """Return a replica's row; ``before`` is its last successful scrape."""
    if now.problem is not None:
        return ReplicaRow(name, "down", now.problem, Flow())
    if not any(key.startswith(_REPLICA) for key in now.values):
        return ReplicaRow(name, "no objkv", "its metrics contain no objkv metrics", Flow())
    change = _Change(before, now, _REPLICA)
    query, local = change.total("query_tokens"), change.total("local_hit_tokens")
    hot, bulk = change.total("hit_hot_tokens"), change.total("hit_bulk_tokens")
    flow = Flow(
        # Preempted requests are counted twice, so the difference may be negative.
        computed_tokens=max(0.0, query - local - hot - bulk),
        local_tokens=local,
        hot_tokens=hot,
        bulk_tokens=bulk,
        load_bytes=change.total("load_bytes"),
        save_bytes=change.total("save_accepted_bytes"),
        refusals=change.total(*_REFUSALS),
        misses=change.total(*_MISSES),
        drops=change.total(*_DROPS),
        lookups=change.of("lookup_seconds_count"),
        lookup_seconds=change.of("lookup_seconds_sum"),
        loads=change.of("load_seconds_count"),
        load_seconds=change.of("load_seconds_sum"),
        running=now.values.get("vllm_num_requests_running", 0.0),
        waiting=now.values.get("vllm_num_requests_waiting", 0.0),
    )
    switched = now.values.get(f"{_REPLICA}admission_switched", 0.0) > 0
    return ReplicaRow(name, change.state, None, flow, switched)


def agent_row(name: str, before: Scrape | None, now: Scrape) -> AgentRow:
    """Return an agent's row; ``before`` is its last successful scrape."""
    if now.problem is not None:
        return AgentRow(name, "down", now.problem)
    if f"{_AGENT}arena_bytes" not in now.values:
        return AgentRow(name, "no agent", "its metrics are not those of an agent")
    change = _Change(before, now, _AGENT)
    is_open, puts_all = f"{_AGENT}breaker_open_", f"{_AGENT}puts_all:"
    levels = {
        "arena_bytes": "arena_bytes",
        "free_bytes": "arena_free_bytes",
        "leased_bytes": "leased_bytes",
        "clients": "clients",
        "held_back_payloads": "unsaved_payloads",
        "held_back_bytes": "unsaved_bytes",
    }
    counters = ("hits", "disk_hits", "fills", "load_bytes", "save_bytes", "no_room")
    policies = tuple(
        SavePolicy(
            namespace := key.removeprefix(puts_all),
            "all" if value else "reused",
            now.values.get(f"{_AGENT}break_even:{namespace}"),
        )
        for key, value in now.values.items()
        if key.startswith(puts_all)
    )
    opened = [key for key, value in now.values.items() if key.startswith(is_open) and value]
    values: dict[str, Any] = {
        field: now.values.get(f"{_AGENT}{metric}", 0.0) for field, metric in levels.items()
    }
    values |= {name: change.total(name) for name in counters}
    breakers = tuple(key.removeprefix(is_open) for key in opened)
    return AgentRow(name, change.state, policies=policies, breakers_open=breakers, **values)


class _Change:
    """How much counters have grown, per second of the interval."""

    def __init__(self, before: Scrape | None, now: Scrape, prefix: str) -> None:
        self._now, self._prefix = now.values, prefix
        self._before: Mapping[str, float] = {}
        self._seconds = 1.0
        self.state = "up"
        if before is None or now.at_s <= before.at_s:
            self.state, self._before = "new", now.values
            return
        self._seconds = now.at_s - before.at_s
        # Counters that decreased were reset: their values now are the growth since the restart.
        if any(
            now.values.get(key, 0.0) < value
            for key, value in before.values.items()
            if key.startswith(prefix) and key.endswith(("_total", "_count"))
        ):
            self.state = "restarted"
        else:
            self._before = before.values

    def of(self, name: str) -> float:
        key = self._prefix + name
        return max(0.0, self._now.get(key, 0.0) - self._before.get(key, 0.0)) / self._seconds

    def total(self, *names: str) -> float:
        return sum(self.of(f"{name}_total") for name in names)


def total_of(rows: Iterable[ReplicaRow]) -> Flow:
    """Return the sum over all replicas."""
    return sum((row.flow for row in rows), Flow())


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
        self._usage: Future[StoredTotals] | None = None
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
        rows = tuple(replica_row(*one) for one in found[: len(self._replicas)])
        agents = tuple(agent_row(*one) for one in found[len(self._replicas) :])
        stored, problem = None, None
        if self._usage is not None and (since_start or self._usage.done()):
            try:
                stored = self._usage.result()
            except StoreError as exc:
                problem = f"the index does not answer: {exc}"
        return View(rows, total_of(rows), stored, problem, agents)


def _usage(index: ReadIndex) -> StoredTotals:
    usages = index.usage()
    nbytes, payloads = sum(one.nbytes for one in usages), sum(one.payloads for one in usages)
    return StoredTotals(nbytes, payloads, len(usages))
