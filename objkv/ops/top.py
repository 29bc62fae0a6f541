"""A fleet at one moment: replicas and node agents from two scrapes of their ``/metrics`` each, and
what is stored. Read-only.

Values are per second between the scrapes, or totals since each process started.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from time import monotonic
from typing import Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from objkv.config.urls import parse_endpoint
from objkv.errors import StoreError
from objkv.index.base import ReadIndex
from objkv.redact import without_secrets

ANSWER_BYTES_MAX: Final = 16 << 20
"""A server with hundreds of histograms sends about 1 MiB."""
_PROBLEM_CHARS_MAX: Final = 120
_ERRNO = re.compile(r"^\[Errno -?\d+\] ")
_AT_ONCE_MAX: Final = 16
_USAGE_EVERY_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Scrape:
    """The result of one scrape."""

    at_s: float
    """Time by the clock that rates use."""
    values: Mapping[str, float]
    """Values by name, with ``_`` for ``:``; empty if the scrape failed."""
    problem: str | None = None


class MetricsSource:
    """An endpoint with metrics: a replica, the exporter or a node agent."""

    def __init__(
        self,
        url: str,
        *,
        deadline_s: float,
        clock: Callable[[], float] = monotonic,
        socket: Path | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """``url``: the server's URL, with or without ``/metrics`` or ``/v1``.
        ``socket``: that of a node agent, to which it connects whatever host the URL names. Raises
        ``ConfigError``."""
        place = parse_endpoint(url)[1]
        path = f"/{place.path}".removesuffix("/metrics").removesuffix("/v1").rstrip("/")
        self._url = f"{place.root}{path}/metrics"
        server = parse_endpoint(f"{place.root}{path}")[1].shown.partition("://")[2]
        self.name = server.removeprefix("***@") if socket is None else str(socket)
        """Host, port and path, without a password; of a node agent the path of its socket."""
        self._deadline_s = deadline_s
        self._clock = clock
        if socket is not None:
            transport = httpx.HTTPTransport(uds=f"{socket}.http")
        self._http = httpx.Client(
            timeout=deadline_s,
            # Servers on this machine are never reached through a proxy.
            trust_env=place.is_far,
            follow_redirects=False,
            transport=transport,
        )

    def scrape(self) -> Scrape:
        """Scrape once. Never raises. Ends at the deadline, or with the first read after it."""
        began = self._clock()
        try:
            text = self._text(began)
            return Scrape(self._clock(), values_of(text))
        except httpx.HTTPError as exc:
            said = _ERRNO.sub("", str(exc)) or type(exc).__name__
        except Exception as exc:  # the parser may raise anything
            said = f"no metrics: {exc}"
        return Scrape(self._clock(), {}, without_secrets(said)[:_PROBLEM_CHARS_MAX])

    def close(self) -> None:
        self._http.close()

    def _text(self, began: float) -> str:
        with self._http.stream("GET", self._url) as answer:
            if answer.status_code != httpx.codes.OK:
                raise ValueError(f"HTTP {answer.status_code}")
            content = bytearray()
            for piece in answer.iter_bytes():
                content += piece
                if len(content) > ANSWER_BYTES_MAX:
                    raise ValueError(f"more than {ANSWER_BYTES_MAX >> 20} MiB")
                if self._clock() - began > self._deadline_s:
                    raise httpx.ReadTimeout("too slow")
        return content.decode("utf-8")


def values_of(text: str) -> dict[str, float]:
    """Return finite values summed over labels. Raises ValueError for other text."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.replace(":", "_")
            value = float(sample.value)
            if name.endswith(("_bucket", "_created")) or not isfinite(value):
                continue
            values[name] = values.get(name, 0.0) + value
    return values


@dataclass(frozen=True, slots=True)
class ServerKind:
    """Replicas or node agents: the numbers to show, from which metrics."""

    prefix: str
    stranger: str
    """The state of a server that has none of these metrics."""
    counters: Mapping[str, Sequence[str]]
    """Sums of counters, without ``_total``."""
    levels: Mapping[str, str] = field(default_factory=dict)


REPLICA: Final = ServerKind(
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
AGENT: Final = ServerKind(
    "objkv_agent_",
    "no agent",
    {name: (name,) for name in ("hits", "fills", "load_bytes", "save_bytes", "no_room")},
    {
        "arena_bytes": "arena_bytes",
        "free_bytes": "arena_free_bytes",
        "unsaved_bytes": "unsaved_bytes",
        "clients": "clients",
    },
)
_IS_OPEN: Final = "breaker_open_"


@dataclass(frozen=True, slots=True)
class TopRow:
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
class TopView:
    """Everything shown at one moment."""

    rows: tuple[TopRow, ...]
    total: Mapping[str, float]
    """Sums over the replicas."""
    hit_rate: float | None
    stored: StoredTotals | None
    """None also while the index has counted nothing: totals follow saves by seconds."""
    problem: str | None
    """Why the index did not say what is stored."""
    agents: tuple[TopRow, ...]


def hit_rate(values: Mapping[str, float]) -> float | None:
    """Return the share that objkv served of the tokens that replicas lacked; None without such."""
    asked = values["tokens"] - values["local_tokens"]
    return (values["hot_tokens"] + values["bulk_tokens"]) / asked if asked > 0 else None


def row_of(kind: ServerKind, name: str, before: Scrape | None, now: Scrape) -> TopRow:
    """Return a row; ``before`` is the last successful scrape."""
    if now.problem is not None:
        return TopRow(name, "down", now.problem)
    values = _own(kind, now)
    if not values:
        return TopRow(name, kind.stranger, f"{kind.stranger}: its metrics are others")
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
    return TopRow(name, state, None, found, tuple(key.removeprefix(_IS_OPEN) for key in opened))


def _own(kind: ServerKind, scrape: Scrape) -> dict[str, float]:
    return {
        key.removeprefix(kind.prefix): value
        for key, value in scrape.values.items()
        if key.startswith(kind.prefix)
    }


def total_of(rows: Iterable[TopRow]) -> dict[str, float]:
    """Return the sums over replicas."""
    every = [row.values for row in rows]
    return {name: sum(one.get(name, 0.0) for one in every) for name in REPLICA.counters}


class FleetWatch:
    """Scrapes all sources in parallel."""

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

    def close(self) -> None:
        """Close the sources, too."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        for source in (*self._replicas, *self._agents):
            source.close()

    def look(self, *, since_start: bool) -> TopView:
        """Return the rates since the last call, or what each process did since its start. Blocks
        for at most the deadline of a scrape; the index is asked in the background, every half
        minute, and waited for only with ``since_start``."""
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
        return TopView(rows, total, hit_rate(total), stored, problem, agents)


def _usage(index: ReadIndex) -> StoredTotals | None:
    usages = index.usage()
    nbytes, payloads = sum(one.nbytes for one in usages), sum(one.payloads for one in usages)
    return StoredTotals(nbytes, payloads, len(usages)) if payloads else None
