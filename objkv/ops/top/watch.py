"""Watches a fleet: scrapes all replicas and node agents in parallel and reads the index from time
to time. A round takes at most the deadline of one scrape, whichever of them are down."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event, Lock, Thread
from time import monotonic
from types import TracebackType
from typing import Final, Self

from objkv.errors import StoreError
from objkv.index.base import ReadIndex
from objkv.ops.top.nodes import NodeRow, node_of
from objkv.ops.top.rates import Flow, ReplicaRow, row_of, total_of
from objkv.ops.top.scrape import MetricsSource, Scrape

LOOK_EVERY_S: Final = 30.0
_AT_ONCE_MAX = 16
_HISTORY = 60
_JOIN_S = 5.0


@dataclass(frozen=True, slots=True)
class StoredTotals:
    """Stored totals with their source."""

    nbytes: float
    payloads: float
    namespaces: float
    told_by: str
    """``exporter`` or ``index``."""


@dataclass(frozen=True, slots=True)
class View:
    """Everything shown at one moment."""

    rows: tuple[ReplicaRow, ...]
    total: Flow
    hit_rates: tuple[float | None, ...]
    """Hit rates of the whole fleet, oldest first."""
    stored: StoredTotals | None
    ends: tuple[tuple[str, bool], ...]
    """Backends reported by the exporter, and whether each is up."""
    problems: tuple[str, ...]
    """Failures of exporter and index, one sentence each."""
    nodes: tuple[NodeRow, ...] = ()
    """Node agents, if any are watched."""


class FleetWatch:
    """A context manager. The index is read in the background within its block only."""

    def __init__(
        self,
        replicas: Sequence[MetricsSource],
        exporter: MetricsSource | None = None,
        index: ReadIndex | None = None,
        *,
        agents: Sequence[MetricsSource] = (),
        look_every_s: float = LOOK_EVERY_S,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._replicas = tuple(replicas)
        self._exporter = exporter
        self._agents = tuple(agents)
        self._index = index
        self._look_every_s = look_every_s
        self._clock = clock
        self._last: dict[MetricsSource, Scrape] = {}
        self._hit_rates: deque[float | None] = deque(maxlen=_HISTORY)
        self._lock = Lock()
        self._usage: StoredTotals | None = None
        self._look_problem: str | None = None
        self._ended = Event()
        self._crew = ThreadPoolExecutor(_AT_ONCE_MAX, thread_name_prefix="objkv-top")
        self._looker = Thread(target=self._look_again, name="objkv-top-index", daemon=True)

    def __enter__(self) -> Self:
        if self._index is not None:
            self._looker.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._looker.is_alive():
            self._looker.join(_JOIN_S)
        self._crew.shutdown(wait=True, cancel_futures=True)
        for source in self._sources():
            source.close()

    def tick(self) -> View:
        """Scrape every source once. Blocks until the slowest answers, at most for the deadline of a
        scrape."""
        sources = self._sources()
        scrapes = dict(zip(sources, self._crew.map(MetricsSource.scrape, sources), strict=True))
        rows = [row_of(*self._compared(one, scrapes[one])) for one in self._replicas]
        nodes = [node_of(*self._compared(one, scrapes[one])) for one in self._agents]
        total = total_of(rows)
        if any(row.state in ("up", "restarted") for row in rows):
            self._hit_rates.append(total.hit_rate)
        told = scrapes[self._exporter] if self._exporter is not None else None
        return self._view(tuple(rows), total, told, tuple(nodes))

    def _sources(self) -> list[MetricsSource]:
        return [*self._replicas, *self._agents, *filter(None, [self._exporter])]

    def _compared(self, source: MetricsSource, now: Scrape) -> tuple[str, Scrape | None, Scrape]:
        """Return a source's name, its last successful scrape before ``now``, and ``now``."""
        before = self._last.get(source)
        if now.problem is None:
            self._last[source] = now
        return source.name, before, now

    def look_now(self) -> None:
        """Read the index once. Never raises."""
        assert self._index is not None
        try:
            usages = self._index.usage()
            stored = StoredTotals(
                sum(usage.nbytes for usage in usages),
                sum(usage.payloads for usage in usages),
                len(usages),
                "index",
            )
        except StoreError as exc:
            with self._lock:
                self._look_problem = f"the index does not answer: {exc}"
            return
        with self._lock:
            self._usage, self._look_problem = stored, None

    def _look_again(self) -> None:
        while not self._ended.is_set():
            self.look_now()
            self._ended.wait(self._look_every_s)

    def _view(
        self,
        rows: tuple[ReplicaRow, ...],
        total: Flow,
        told: Scrape | None,
        nodes: tuple[NodeRow, ...],
    ) -> View:
        with self._lock:
            stored, problem = self._usage, self._look_problem
        problems = [problem] if problem else []
        ends: tuple[tuple[str, bool], ...] = ()
        if told is not None and told.problem is not None:
            problems.append(f"the exporter does not answer: {told.problem}")
        elif told is not None:
            start = "objkv_up:"
            ends = tuple(
                (key.removeprefix(start), value > 0)
                for key, value in sorted(told.values.items())
                if key.startswith(start)
            )
            stored = _stored(told) or stored
        rates = tuple(self._hit_rates)
        return View(rows, total, rates, stored, ends, tuple(problems), nodes)


def _stored(told: Scrape) -> StoredTotals | None:
    values = told.values
    if "objkv_stored_bytes" not in values:
        return None
    return StoredTotals(
        values["objkv_stored_bytes"],
        values.get("objkv_stored_payloads", 0.0),
        values.get("objkv_namespaces", 0.0),
        "exporter",
    )
