"""A fault is a miss: the matrix, in this process.

vLLM's scheduler and objkv's connector over a toy model, and objkv's other connectors, with a real
Valkey, an S3 server, SQLite and node agents, whose faults are injected where they would happen. One
fault of each kind is quick.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

from objkv.agent.http.metrics import TOTALS
from objkv.assembly import agent, backends
from objkv.cache.switch import SWITCH_PATH
from objkv.connector.counters import COUNTERS
from objkv.net.breaker import BreakerLimits
from tests.faults import table
from tests.faults.agents import LARGE_ARENA_BYTES, AgentPlace
from tests.faults.columns import COLUMNS, Column
from tests.faults.places import Place, Servers
from tests.faults.rows import BY_NAME, MODES, ROWS, VERBS, Cell, Row
from tests.faults.toy import (
    CHUNKS,
    LARGE,
    LAYOUT,
    PAYLOAD_BYTES,
    STORED_TOKENS,
    RevisedEngine,
    ShakenEngine,
    expected,
    prompt,
)
from tests.support.waiting import wait_for

OWN_ENGINE = {
    # Clients must feel the server's own end, not that of a proxy.
    "s3-killed": True,
    "redis-killed": True,
    "redis-stalled": True,
    # Deadlines of its own.
    "s3-stalled": False,
    # Another server from then on, a file that is another, weights of their own.
    "redis-failover": False,
    "disk-full": False,
    "sqlite-removed": False,
    "sqlite-corrupt": False,
    "model-revision": False,
    # An arena of a size of its own, payloads of a size of their own.
    "agent-full": False,
    "agent-process-killed": False,
    "agent-process-frozen": False,
}
"""Rows that share no engine with others; of each, whether its clients go past the proxies."""
PATIENT: dict[str, Any] = {
    "lookup_deadline_ms": 20_000,
    "step_load_deadline_ms": 20_000,
    "pinned_bytes_max": 1 << 20,
    "drain_deadline_ms": 1_000,
}
HOUR_S = 3600.0
HOURS_S = 4 * HOUR_S
OTHERS = {"codec": "none", "drain_deadline_ms": 1_000}
"""Of the other connectors."""
PATIENCE_S = 60.0
_LOADS = {"load_deadline_ms": 2_000, "step_load_deadline_ms": 2_000, "save_deadline_ms": 2_000}
HURRIED: dict[str, dict[str, int]] = {
    "s3-stalled": _LOADS,
    "redis-stalled": _LOADS | {"lookup_deadline_ms": 500},
}
"""How long they wait where nothing comes."""
FULL = {"arena_bytes": CHUNKS * PAYLOAD_BYTES}
"""An arena with room for one prompt."""

UNEXPECTED = ("unexpectedly", "continuing without it", "not taken out", "Traceback (most")
_engines: dict[tuple[str, str], tuple[Place, ShakenEngine]] = {}


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@dataclass
class Seen:
    outcome: str = ""
    right: bool = False
    """Whether the tokens are those of a model without a connector, and all KV that was read what
    was computed for it."""
    counted: dict[str, float] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    asked: int = 0
    """Requests to the end with the fault, while it was there."""
    ended: bool = False
    """Whether the request ended while the fault was there: nobody waited for its end."""

    def check(self, cell: Cell) -> None:
        assert self.right
        assert self.ended
        assert self.outcome == cell.outcome, (self.counted, self.lines)
        if not cell.touched:
            assert self.asked == 0
        if cell.counted:
            assert self.counted.get(cell.counted, 0) >= 1, (self.counted, self.lines)
        self.check_lines(cell)

    def check_lines(self, cell: Cell) -> None:
        """That the log tells the fault, each change of state once, and nothing unforeseen."""
        for words in UNEXPECTED:
            assert not [line for line in self.lines if words in line]
        kinds = Counter(line.partition(" reason=")[0] for line in self.lines)
        repeated = {line: n for line, n in kinds.items() if n > 1 and "payload refused" not in line}
        assert not repeated, self.lines
        told = [line for line in kinds if not (cell.beside and line.startswith(cell.beside))]
        if cell.told:
            assert [line for line in told if line.startswith(cell.told)], self.lines
        elif any(SWITCH_PATH in line for line in self.lines):
            # The operator's switch is read by the clock, so it may meet the fault of any verb.
            assert not [line for line in told if not line.startswith("bulk reads ")], self.lines
        else:
            assert not told, self.lines


@pytest.fixture(scope="module", autouse=True)
def _engines_end() -> Iterator[None]:
    yield
    while _engines:
        _close(*_engines.popitem()[1])


def _close(place: Place, engine: ShakenEngine) -> None:
    place.mend()
    engine.__exit__()
    place.close()


def _shake(servers: Servers, row: Row, mode: str) -> dict[str, Seen]:
    key = (row.name if row.name in OWN_ENGINE else row.world, mode)
    if key in _engines:
        place, engine = _engines.pop(key)
    else:
        place = _open_place(servers, row)
        if row.name == "disk-full":
            place.small_disk()
        engine = _open(place, row, mode)
    worked = False
    try:
        found = _Shake(servers, row, mode, place, engine).run()
        worked = found["after"].outcome == "hit"
    finally:
        if worked and row.name not in OWN_ENGINE:
            _engines[key] = place, engine
        else:
            _close(place, engine)
    return found


def _open_place(servers: Servers, row: Row) -> Place:
    if row.world != "agent":
        return Place(servers, row.world, direct=OWN_ENGINE.get(row.name, False))
    if row.uses_process:
        return AgentPlace(servers, arena_bytes=LARGE_ARENA_BYTES, processes=1)
    return AgentPlace(servers, **FULL if row.name == "agent-full" else {})


@contextmanager
def _hasty(*pauses_s: float) -> Iterator[None]:
    """What is opened in it remembers no answers, and its breakers open at one failure, with these
    first and longest pauses."""
    with (
        patch.object(backends, "BreakerLimits", partial(BreakerLimits, 1, *pauses_s)),
        patch.object(agent, "LOOKUP_TTL_S", 0.0),
    ):
        yield


def _open(place: Place, row: Row, mode: str, revision: int = 1) -> ShakenEngine:
    settings = place.settings | PATIENT | {"load_mode": mode} | row.settings
    with _hasty(HOUR_S, HOUR_S):
        if row.is_theirs:
            return RevisedEngine(revision, place.folder, **settings)
        if row.uses_process:
            settings |= {"pinned_bytes_max": 8 << 20}
            return ShakenEngine(place.folder, layout=LARGE, **settings)
        return ShakenEngine(place.folder, **settings)


class _Shake:
    def __init__(
        self, servers: Servers, row: Row, mode: str, place: Place, engine: ShakenEngine
    ) -> None:
        self._servers = servers
        self._row = row
        self._mode = mode
        self._place = place
        self._engine = engine
        self._lines = Lines()
        self._counted: Counter[str] = Counter()
        self._prompts = iter([prompt(next(servers.numbers)) for _ in range(6)])
        self._tokens: list[int] = []

    def run(self) -> dict[str, Seen]:
        logger = logging.getLogger("objkv")
        logger.addHandler(self._lines)
        self._theirs = _open(self._place, self._row, self._mode, 2) if self._row.is_theirs else None
        try:
            return {
                "lookup": self._shaken(self._lookup),
                "load": self._shaken(self._load),
                "save": self._shaken(self._save),
                "after": self._after(),
            }
        finally:
            logger.removeHandler(self._lines)
            if self._theirs is not None:
                self._theirs.__exit__()

    def _shaken(self, verb: Callable[[Seen, list[int]], None]) -> Seen:
        self._tokens = tokens = next(self._prompts)
        self._settle()
        self._place.prepare(self._row.name)
        is_stored = verb == self._load or (verb == self._lookup and not self._row.is_theirs)
        # What is asked for has to be stored, and nobody left alone; that saves fail is told anew
        # once one did not.
        healthy = tokens if is_stored else next(self._prompts)
        self._engine.answer(healthy)
        self._settle()
        # A server that is back is tried by one call first, and others are not made meanwhile.
        assert self._comes_back(healthy)
        if self._row.is_fetched and verb == self._load:
            assert isinstance(self._place, AgentPlace)
            self._place.empty()
            self._settle()
            self._engine.answer(next(self._prompts))  # all parts have found the new agent
            self._settle()
        self._lines.lines.clear()
        self._count()
        self._counted.clear()
        self._elsewhere = self._place.numbers()
        seen = Seen()
        verb(seen, tokens)
        self._last = tokens
        return seen

    def _note(self, seen: Seen, counted: str) -> None:
        """What was told of it: threads that nobody waits for may tell a little later."""
        wait_for(lambda: not counted or self._all_counted().get(counted, 0) > 0)
        seen.counted = self._all_counted()
        seen.lines = list(self._lines.lines)

    def _all_counted(self) -> dict[str, float]:
        """Also by a node agent, unless it is away, or has begun anew."""
        now = self._place.numbers().items()
        elsewhere = {name: value - self._elsewhere.get(name, 0) for name, value in now}
        return dict(self._count()) | elsewhere

    def _lookup(self, seen: Seen, tokens: list[int]) -> None:
        """The fault is there until the lookup is answered."""
        mend = self._inject()
        before = self._asked()

        def mend_at_load() -> None:
            assert wait_for(self._engine.is_idle)
            seen.outcome, seen.ended = "hit", True
            seen.asked = self._asked() - before
            mend()
            self._pass_time()

        self._engine.at_load = mend_at_load
        self._answer(seen, tokens)
        if not seen.ended:
            self._engine.at_load = None
            seen.outcome, seen.ended = "miss", True
            seen.asked = self._asked() - before
            mend()
        self._note(seen, self._row.lookup.counted)

    def _load(self, seen: Seen, tokens: list[int]) -> None:
        """The fault comes when the lookup was answered, and is there until the request ends."""
        undo: list[Callable[[], None]] = []
        before: list[int] = []

        def inject() -> None:
            assert wait_for(self._engine.is_idle)
            undo.append(self._inject())
            before.append(self._asked())

        self._engine.at_load = inject
        self._engine.sync_loads.clear()
        self._count()
        self._answer(seen, tokens)
        seen.ended = True
        seen.asked = self._asked() - before[0]
        failed = wait_for(lambda: self._count()["loads"] > 0) and self._counted["load_failures"]
        seen.outcome = "miss" if failed else "hit"
        assert self._engine.sync_loads[:1] == [self._mode == "layerwise"]
        if self._row.name != "s3-stalled":  # which frees nobody before it is over
            assert wait_for(self._engine.is_idle)
        undo[0]()
        self._note(seen, self._row.load.counted)

    def _save(self, seen: Seen, tokens: list[int]) -> None:
        """The fault is there while the prompt is computed and saved; then somebody asks for it."""
        mend = self._inject()
        before = self._place.spoiled()
        self._answer(seen, tokens)
        seen.ended = True
        self._engine.save_all()
        self._place.settle()
        seen.asked = self._place.spoiled() - before
        mend()
        self._note(seen, self._row.save.counted)
        is_kept = self._engine.kept() > 0
        self._settle()
        if is_kept:
            self._put_kept(tokens, int(seen.counted.get("saves_accepted", 0)))
        is_stored = self._is_stored(tokens)
        seen.outcome = ("kept" if is_kept else "saved") if is_stored else "drop"

    def _put_kept(self, tokens: list[int], chunks: int) -> None:
        """Requests of this node find the ``chunks`` that its agent took, which has it save them. A
        server that is back is tried by one save first."""
        loaded = self._engine.answer(tokens, fetches=False).loaded
        assert loaded == chunks * LAYOUT.chunk_tokens
        for _ in range(CHUNKS + 1):
            self._settle()
            if not self._engine.kept():
                break
            self._engine.answer(tokens, fetches=False)

    def _after(self) -> Seen:
        """The fault is over: what was lost is computed and saved again, and then it is there."""
        self._lines.lines.clear()
        seen, tokens = Seen(right=True, ended=True, outcome="miss"), self._last
        self._settle()
        if self._comes_back(tokens):
            seen.outcome = "hit"
        self._note(seen, "")
        return seen

    def _inject(self) -> Callable[[], None]:
        return self._inject_theirs() if self._row.is_theirs else self._place.inject(self._row.name)

    def _inject_theirs(self) -> Callable[[], None]:
        """The other revision asks for the same: it computes all of it, and saves it beside ours."""
        theirs, before = self._theirs, set(self._place.payloads())
        assert theirs is not None

        def answered() -> int:
            answer = theirs.answer(self._tokens)
            assert answer.tokens == expected(self._tokens)
            theirs.save_all()
            theirs.forget()
            return answer.loaded

        assert answered() == 0
        saved = set(self._place.payloads()) - before
        assert len(saved) == CHUNKS
        self._place.watch({path.partition("/")[0] for path in saved})

        def undo() -> None:
            before = self._asked()
            assert answered() == STORED_TOKENS
            assert self._asked() > before  # it would be seen if ours asked
            self._place.mend()

        return undo

    def _asked(self) -> int:
        """What is watched is spoiled by nothing but being counted."""
        return self._place.spoiled() if self._row.is_theirs else self._place.asked()

    def _answer(self, seen: Seen, tokens: list[int]) -> None:
        seen.right = self._engine.answer(tokens).tokens == expected(tokens)

    def _is_stored(self, tokens: list[int]) -> bool:
        self._count()
        self._counted.clear()
        answer = self._engine.answer(tokens)
        assert answer.tokens == expected(tokens)
        wait_for(lambda: self._count()["loads"] > 0 or not self._counted["hit_tokens"])
        return answer.loaded == STORED_TOKENS and not self._counted["load_failures"]

    def _is_stored_now(self, tokens: list[int]) -> bool:
        stored = self._is_stored(tokens)
        self._settle()
        return stored

    def _comes_back(self, tokens: list[int]) -> bool:
        """Each request finds out of one chunk at least that it is gone. An agent leaves its store
        alone for some milliseconds, by a clock that cannot be moved."""
        if self._row.world == "agent":
            return wait_for(lambda: self._is_stored_now(tokens))
        return any(self._is_stored_now(tokens) for _ in range(CHUNKS + 1))

    def _settle(self) -> None:
        """Nothing under way, nothing in the engine's own cache, no server left alone."""
        self._engine.save_all()
        self._place.settle()
        self._engine.forget()
        assert wait_for(self._engine.is_idle)
        assert wait_for(self._engine.can_save)
        self._pass_time()
        assert self._row.world != "agent" or wait_for(self._engine.is_attached)

    def _pass_time(self) -> None:
        self._servers.clock.pauses_ahead_s += HOURS_S

    def _count(self) -> Counter[str]:
        self._counted.update(self._engine.counted())
        return self._counted


QUICK = ("s3-reset", "s3-flipped", "redis-killed", "sqlite-corrupt", "agent-killed")
"""One of each kind: an error, wrong bytes, a dead server, a bad file, a dead agent."""


def quick(name: str) -> tuple[pytest.MarkDecorator, ...]:
    return () if name in QUICK else (pytest.mark.slow,)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [pytest.param(row.name, marks=quick(row.name)) for row in ROWS])
def test_a_fault_is_a_miss(servers: Servers, name: str, mode: str) -> None:
    row = BY_NAME[name]
    seen = _shake(servers, row, mode)
    for verb in VERBS:
        seen[verb].check(row.cell(verb))
    assert seen["after"].right
    assert seen["after"].outcome == "hit", "what was lost is not found again"


THEIRS = [
    row.name
    for row in ROWS
    if not (row.world == "agent" or row.is_theirs or row.name == "sqlite-locked")
]
"""Of a locked file nobody can be hurried from outside."""


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("name", [pytest.param(name, marks=quick(name)) for name in THEIRS])
def test_a_fault_is_a_miss_for_the_other_connectors(
    servers: Servers, name: str, column: str
) -> None:
    row, numbers = BY_NAME[name], servers.numbers
    place = Place(servers, row.world, direct=OWN_ENGINE.get(name, False))
    if name == "disk-full":
        place.small_disk()
    settings = place.settings | OTHERS | HURRIED.get(name, {})
    opened: list[Column] = []

    def number(*, is_saved: bool = False) -> int:
        found = next(numbers)
        if is_saved:
            writer.save(found)
        return found

    def works() -> bool:
        servers.clock.pauses_ahead_s += HOURS_S
        return reader.ask(number(is_saved=True))

    try:
        with _hasty(0.01, 0.02):
            opened += [COLUMNS[column](place.folder, settings) for _ in range(2)]
        writer, reader = opened
        assert wait_for(works, bound_s=PATIENCE_S)
        place.prepare(name)
        asked = number(is_saved=True)
        mend = place.inject(name)
        found = reader.ask(asked)
        writer.save(number())
        mend()
        assert wait_for(works, bound_s=PATIENCE_S)
    finally:
        place.mend()
        for replica in opened:
            replica.close()
        place.close()
    assert found == (row.lookup.outcome == row.load.outcome == "hit")


def test_the_page_is_as_it_would_be_written() -> None:
    assert table.page() == table.PAGE.read_text(), "run python -m tests.faults.table"


SILENT = """
s3-flipped:save redis-flipped:lookup redis-failover:lookup redis-evicting:lookup redis-wiped:lookup
sqlite-removed:lookup sqlite-clock-ahead:lookup sqlite-clock-behind:save model-revision:lookup
agent-killed-busy:save
"""


def test_a_loss_that_is_not_counted_is_one_that_nobody_can_notice() -> None:
    cells = {f"{row.name}:{verb}": row.cell(verb) for row in ROWS for verb in VERBS}
    lost = {name: cell for name, cell in cells.items() if cell.outcome in ("miss", "drop")}
    assert {name for name, cell in lost.items() if not cell.counted} == set(SILENT.split())


def test_every_fault_is_counted_by_a_metric_that_operators_can_see() -> None:
    counted = {row.cell(verb).counted for row in ROWS for verb in VERBS} - {""}
    assert counted <= set(COUNTERS) | {f"agent_{name}" for name in TOTALS}
