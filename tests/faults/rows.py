"""The fault matrix: each fault with the outcomes of a lookup, a load and a save.

A row is one fault, injected for real; a cell is one verb of it, in both load modes. The tests
assert exactly these outcomes, and ``docs/reliability.md`` is generated from them.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

Verb = Literal["lookup", "load", "save"]
Outcome = Literal["hit", "miss", "saved", "kept", "drop"]
World = Literal["s3", "redis", "folder", "agent"]

VERBS: tuple[Verb, ...] = ("lookup", "load", "save")
MODES = ("async", "layerwise")

BULK_WRITES = "bulk writes"
INDEX_READS, INDEX_WRITES, HOT_READS = "index reads", "index writes", "hot reads"
LOADS_TOLD, SAVES_TOLD, REFUSED = "loads failing", "saves failing", "payload refused"
AGENT_LOADS, AGENT_CALLS = "loads from the agent failing", "lookups and records by the agent"
AWAY = (AGENT_LOADS.removesuffix(" failing"), AGENT_CALLS, SAVES_TOLD)
"""Loads may work again before the lines are read: they look for the next agent all the time."""


@dataclass(frozen=True)
class Cell:
    outcome: Outcome
    """A lookup and a load end in ``hit`` or ``miss``. A save ends in ``saved`` (a hit for the next
    reader), ``kept`` (a hit for those of this node, who have it saved) or ``drop``."""
    counted: str = ""
    """The metric that counts the fault, ``agent_<name>`` if the node agent does; empty if objkv
    cannot notice it."""
    told: str = ""
    """The beginning of the only log line; empty: no line."""
    beside: str | tuple[str, ...] = ""
    """The beginnings of lines that background work may log in addition."""
    touched: bool = True
    """False: this verb never reaches the fault, and the test checks that it did not."""


UNTOUCHED_HIT = Cell("hit", touched=False)
UNTOUCHED_SAVE = Cell("saved", touched=False)


@dataclass(frozen=True)
class Row:
    name: str
    what: str
    world: World
    lookup: Cell
    load: Cell
    save: Cell
    settings: dict[str, Any] = field(default_factory=dict)
    is_theirs: bool = False
    """The fault is a replica of another revision of the model that requests the same prompts and
    shares the bucket and the index."""
    is_fetched: bool = False
    """What is loaded under the fault is not in the node agent's memory."""
    uses_process: bool = False
    """The node agent fetches with a process, and payloads are large enough for it."""

    def cell(self, verb: Verb) -> Cell:
        cell: Cell = getattr(self, verb)
        return cell


def _s3(name: str, what: str, load: Cell, save: Cell, **more: Any) -> Row:
    return Row(f"s3-{name}", what, "s3", UNTOUCHED_HIT, load, save, **more)


def _redis(name: str, what: str, *cells: Cell, **more: Any) -> Row:
    return Row(f"redis-{name}", what, "redis", *cells, **more)


def _folder(name: str, what: str, *cells: Cell) -> Row:
    return Row(name, what, "folder", *cells)


def _agent(name: str, what: str, *cells: Cell, **more: Any) -> Row:
    return Row(f"agent-{name}", what, "agent", *cells, **more)


_LOAD_FAILS = Cell("miss", "load_errors", LOADS_TOLD)
_LOAD_REFUSED = Cell("miss", "load_corrupt", REFUSED)
_LOAD_GHOST = Cell("miss", "load_ghosts", beside=SAVES_TOLD)
"""A ghost is computed and saved again at once, perhaps while the fault persists."""
_SAVE_FAILS = Cell("kept", "agent_save_errors", SAVES_TOLD)
_SAVED = Cell("saved")
_FOUND = Cell("hit")
_LOOKUP_FAILS = Cell("miss", "lookup_errors", INDEX_READS)
_FOUND_UNMARKED = Cell("hit", beside=(INDEX_WRITES, AGENT_CALLS))
"""The background write that records the use fails."""
_UNANNOUNCED = Cell("kept", "agent_publish_errors", INDEX_WRITES)
_FROM_BULK = Cell("hit", "agent_hot_errors", HOT_READS, beside=INDEX_WRITES)
_WITHOUT_HOT = Cell("hit", "agent_hot_misses")
_NO_LOOKUP = Cell("miss", "lookup_errors", AGENT_CALLS)
_NO_LOAD = Cell("miss", "load_errors", AGENT_LOADS)
_NO_SAVE = Cell("drop", "save_errors", SAVES_TOLD)
_BY_PROCESS = {"is_fetched": True, "uses_process": True}

ROWS: tuple[Row, ...] = (
    _s3("killed", "S3's process is killed", _LOAD_FAILS, _SAVE_FAILS),
    _s3("reset", "connections to S3 are reset", _LOAD_FAILS, _SAVE_FAILS),
    _s3("unanswered", "S3 executes requests, its responses are lost", _LOAD_FAILS, _SAVE_FAILS),
    _s3("stalled", "S3 accepts and never answers", _LOAD_FAILS, _SAVE_FAILS,
        settings={"load_deadline_ms": 8_000, "step_load_deadline_ms": 8_000}),
    _s3("lag", "S3 answers late, within the deadline", _FOUND, _SAVED),
    _s3("truncated", "bodies are cut short", _LOAD_REFUSED, _SAVE_FAILS),
    _s3("flipped", "a bit of each body flips", _LOAD_REFUSED, Cell("drop")),
    _s3("500", "S3 answers 500", _LOAD_FAILS, _SAVE_FAILS),
    _s3("503", "S3 answers 503", _LOAD_FAILS, Cell("kept", "agent_saves_shed", BULK_WRITES)),
    _s3("403", "S3 answers 403", _LOAD_FAILS, _SAVE_FAILS),
    _s3("404", "S3 answers 404", _LOAD_GHOST, _SAVE_FAILS),
    _s3("another", "S3 answers with another object's bytes", _LOAD_REFUSED, UNTOUCHED_SAVE),
    _s3("expired", "the credentials expire", _LOAD_FAILS, _SAVE_FAILS),
    _s3("deleted", "objects are deleted after their lookup", _LOAD_GHOST, _SAVED),
    _s3("clock-ahead", "this machine's clock is 5 hours ahead", _LOAD_FAILS, _SAVE_FAILS),
    _s3("clock-behind", "this machine's clock is 5 hours behind", _LOAD_FAILS, _SAVE_FAILS),
    _redis("killed", "Redis's process is killed", _LOOKUP_FAILS, _FROM_BULK, _UNANNOUNCED),
    _redis("reset", "connections to Redis are reset", _LOOKUP_FAILS, _FROM_BULK, _UNANNOUNCED),
    _redis("stalled", "Redis accepts and never answers (it is frozen)",
           Cell("miss", "lookup_deadlines", "lookups failing", beside=INDEX_READS),
           _FROM_BULK, _UNANNOUNCED,
           settings={"lookup_deadline_ms": 1_000}),  # less than a call to the agent may take
    _redis("lag", "Redis answers late, within the deadline", _FOUND, _FOUND, _SAVED),
    _redis("truncated", "answers of Redis break off", _LOOKUP_FAILS, _FROM_BULK, _UNANNOUNCED),
    _redis("flipped", "a bit of each value from Redis flips",
           Cell("miss"), _LOAD_REFUSED, Cell("kept", "agent_publish_errors")),
    _redis("loading", "Redis answers LOADING to everything",
           _LOOKUP_FAILS, _FROM_BULK, _UNANNOUNCED),
    _redis("another", "Redis answers with another key's value", _FOUND, _LOAD_REFUSED, _SAVED),
    # The use of what is loaded was being noted on the primary.
    _redis("failover", "Redis fails over to a replica that lacks the newest writes",
           Cell("miss"), replace(_WITHOUT_HOT, beside=INDEX_WRITES), _SAVED),
    _redis("evicting", "Redis is over maxmemory and evicts", Cell("miss"), _WITHOUT_HOT, _SAVED),
    _redis("full", "Redis is over maxmemory and refuses writes",
           _FOUND_UNMARKED, _FOUND_UNMARKED, _UNANNOUNCED),
    _redis("readonly", "Redis is a read-only replica",
           _FOUND_UNMARKED, _FOUND_UNMARKED, _UNANNOUNCED),
    _redis("wiped", "the index is wiped (FLUSHALL)", Cell("miss"), _WITHOUT_HOT, _SAVED),
    _folder("disk-full", "the disk is full", _FOUND_UNMARKED, _FOUND_UNMARKED, _SAVE_FAILS),
    _folder("sqlite-removed", "the SQLite file is removed", Cell("miss"), _FOUND, _SAVED),
    _folder("sqlite-corrupt", "the SQLite file is overwritten",
            _LOOKUP_FAILS, _FOUND_UNMARKED, _UNANNOUNCED),
    _folder("sqlite-locked", "another process holds the SQLite file locked",
            _FOUND_UNMARKED, _FOUND_UNMARKED, _UNANNOUNCED),
    _folder("sqlite-clock-ahead", "this machine's clock is 48 hours ahead: records seem expired",
            Cell("miss"), _FOUND, _SAVED),
    _folder("sqlite-clock-behind", "this machine's clock is 48 hours behind",
            _FOUND, _FOUND, Cell("drop")),
    Row("model-revision",
        "another revision of the model has, or saves, the same prompts in this bucket and index",
        "s3", Cell("miss", touched=False), UNTOUCHED_HIT, UNTOUCHED_SAVE, is_theirs=True),
    _agent("killed", "the node agent is killed", _NO_LOOKUP, _NO_LOAD, _NO_SAVE),
    _agent("killed-busy", "the node agent is killed while it fetches or puts",
           UNTOUCHED_HIT, _NO_LOAD, Cell("drop", beside=AWAY), is_fetched=True),
    # Once it goes on, it copies and verifies what it was sent before the call timed out.
    _agent("frozen", "the node agent hangs (it is frozen)",
           _NO_LOOKUP, _NO_LOAD, Cell("saved", "save_errors", SAVES_TOLD)),
    _agent("unlinked", "the node agent's socket is removed", _FOUND, _FOUND, _SAVED),
    _agent("full", "the node agent's arena is full of payloads that another replica has leased",
           UNTOUCHED_HIT, Cell("miss", "load_refused"), _NO_SAVE),
    _agent("process-killed", "the node agent's fetching process is killed while it fetches",
           UNTOUCHED_HIT, Cell("hit", "agent_fetch_process_losses"), UNTOUCHED_SAVE, **_BY_PROCESS),
    _agent("process-frozen", "the node agent's fetching process hangs (it is frozen)",
           UNTOUCHED_HIT, Cell("miss", "load_errors"), UNTOUCHED_SAVE, **_BY_PROCESS),
)  # fmt: skip


BY_NAME = {row.name: row for row in ROWS}
