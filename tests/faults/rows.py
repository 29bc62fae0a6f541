"""The fault matrix: each fault with the outcomes of a lookup, a load and a save.

A row is one fault, injected for real; a cell is one verb of it, in both load modes. The tests
assert exactly these outcomes, and ``docs/reliability.md`` is generated from them.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

Verb = Literal["lookup", "load", "save"]
Outcome = Literal["hit", "miss", "saved", "drop"]
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
    """The outcome of one verb during the fault."""

    outcome: Outcome
    """A lookup and a load end in ``hit`` or ``miss``, a save in ``saved`` (a hit for the next
    reader) or ``drop``."""
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
    """One fault."""

    name: str
    what: str
    world: World
    lookup: Cell
    load: Cell
    save: Cell
    settings: dict[str, Any] = field(default_factory=dict)
    hurry_s: float = 0.0
    """How long clients wait for the failing backend during the fault, if a test could only wait;
    0: the usual time. Healthy backends keep their time, however busy the machine is."""
    is_theirs: bool = False
    """The fault is a replica of another revision of the model that requests the same prompts and
    shares the bucket and the index."""
    is_fetched: bool = False
    """What is loaded under the fault is not in the node agent's memory."""
    uses_process: bool = False
    """The node agent fetches with a process, and payloads are large enough for it."""

    def cell(self, verb: Verb) -> Cell:
        """Return the cell of ``verb``."""
        cell: Cell = getattr(self, verb)
        return cell


def _s3(name: str, what: str, load: Cell, save: Cell, **more: Any) -> Row:
    return Row(f"s3-{name}", what, "s3", UNTOUCHED_HIT, load, save, **more)


_LOAD_FAILS = Cell("miss", "load_errors", LOADS_TOLD)
_LOAD_REFUSED = Cell("miss", "load_corrupt", REFUSED)
_LOAD_GHOST = Cell("miss", "load_ghosts", beside=SAVES_TOLD)
"""A ghost is computed and saved again at once, perhaps while the fault persists."""
_SAVE_FAILS = Cell("drop", "save_errors", SAVES_TOLD)
_SAVED = Cell("saved")
_FOUND = Cell("hit")
_LOOKUP_FAILS = Cell("miss", "lookup_errors", INDEX_READS)
_FOUND_UNMARKED = Cell("hit", beside=INDEX_WRITES)
"""The background write that records the use fails."""
_UNANNOUNCED = Cell("drop", "publish_errors", INDEX_WRITES)
_FROM_BULK = Cell("hit", "hot_errors", HOT_READS, beside=INDEX_WRITES)
_NO_LOOKUP = Cell("miss", "lookup_errors", AGENT_CALLS)
_NO_LOAD = Cell("miss", "load_errors", AGENT_LOADS)
_NO_SAVE = Cell("drop", "save_errors", SAVES_TOLD)

ROWS: tuple[Row, ...] = (
    _s3("killed", "S3's process is killed", _LOAD_FAILS, _SAVE_FAILS),
    _s3("reset", "connections to S3 are reset", _LOAD_FAILS, _SAVE_FAILS),
    _s3("unanswered", "S3 executes requests, its responses are lost", _LOAD_FAILS, _SAVE_FAILS),
    _s3(
        "stalled",
        "S3 accepts and never answers",
        _LOAD_FAILS,
        _SAVE_FAILS,
        hurry_s=2.0,
    ),
    _s3("lag", "S3 answers late, within the deadline", _FOUND, _SAVED),
    _s3("truncated", "bodies are cut short", _LOAD_REFUSED, _SAVE_FAILS),
    _s3("flipped", "a bit of each body flips", _LOAD_REFUSED, Cell("drop")),
    _s3("500", "S3 answers 500", _LOAD_FAILS, _SAVE_FAILS),
    _s3("503", "S3 answers 503", _LOAD_FAILS, Cell("drop", "saves_shed", BULK_WRITES)),
    _s3("403", "S3 answers 403", _LOAD_FAILS, _SAVE_FAILS),
    _s3("404", "S3 answers 404", _LOAD_GHOST, _SAVE_FAILS),
    _s3("another", "S3 answers with another object's bytes", _LOAD_REFUSED, UNTOUCHED_SAVE),
    _s3("expired", "the credentials expire", _LOAD_FAILS, _SAVE_FAILS),
    _s3("deleted", "objects are deleted after their lookup", _LOAD_GHOST, _SAVED),
    _s3("clock-ahead", "this machine's clock is 5 hours ahead", _LOAD_FAILS, _SAVE_FAILS),
    _s3("clock-behind", "this machine's clock is 5 hours behind", _LOAD_FAILS, _SAVE_FAILS),
    Row(
        "redis-killed",
        "Redis's process is killed",
        "redis",
        _LOOKUP_FAILS,
        _FROM_BULK,
        _UNANNOUNCED,
    ),
    Row(
        "redis-reset",
        "connections to Redis are reset",
        "redis",
        _LOOKUP_FAILS,
        _FROM_BULK,
        _UNANNOUNCED,
    ),
    Row(
        "redis-stalled",
        "Redis accepts and never answers (it is frozen)",
        "redis",
        Cell("miss", "lookup_deadlines", "lookups failing", beside=INDEX_READS),
        _FROM_BULK,
        _UNANNOUNCED,
        settings={"lookup_deadline_ms": 300},  # from it clients of Redis take theirs
        hurry_s=0.3,
    ),
    Row("redis-lag", "Redis answers late, within the deadline", "redis", _FOUND, _FOUND, _SAVED),
    Row(
        "redis-truncated",
        "answers of Redis break off",
        "redis",
        _LOOKUP_FAILS,
        _FROM_BULK,
        _UNANNOUNCED,
    ),
    Row(
        "redis-flipped",
        "a bit of each value from Redis flips",
        "redis",
        Cell("miss"),
        _LOAD_REFUSED,
        _SAVED,
    ),
    Row(
        "redis-loading",
        "Redis answers LOADING to everything",
        "redis",
        _LOOKUP_FAILS,
        _FROM_BULK,
        _UNANNOUNCED,
    ),
    Row(
        "redis-another",
        "Redis answers with another key's value",
        "redis",
        _FOUND,
        _LOAD_REFUSED,
        _SAVED,
    ),
    Row(
        "redis-failover",
        "Redis fails over to a replica that lacks the newest writes",
        "redis",
        Cell("miss"),
        Cell("hit", "hot_misses", beside=INDEX_WRITES),  # its use was being noted on the primary
        _SAVED,
    ),
    Row(
        "redis-evicting",
        "Redis is over maxmemory and evicts",
        "redis",
        Cell("miss"),
        Cell("hit", "hot_misses"),
        _SAVED,
    ),
    Row(
        "redis-full",
        "Redis is over maxmemory and refuses writes",
        "redis",
        _FOUND_UNMARKED,
        _FOUND_UNMARKED,
        _UNANNOUNCED,
    ),
    Row(
        "redis-readonly",
        "Redis is a read-only replica",
        "redis",
        _FOUND_UNMARKED,
        _FOUND_UNMARKED,
        _UNANNOUNCED,
    ),
    Row(
        "redis-wiped",
        "the index is wiped (FLUSHALL)",
        "redis",
        Cell("miss"),
        Cell("hit", "hot_misses"),
        _SAVED,
    ),
    Row("disk-full", "the disk is full", "folder", _FOUND_UNMARKED, _FOUND_UNMARKED, _SAVE_FAILS),
    Row(
        "sqlite-removed",
        "the SQLite file is removed",
        "folder",
        Cell("miss"),
        _FOUND,
        _SAVED,
    ),
    Row(
        "sqlite-corrupt",
        "the SQLite file is overwritten",
        "folder",
        _LOOKUP_FAILS,
        _FOUND_UNMARKED,
        _UNANNOUNCED,
    ),
    Row(
        "sqlite-locked",
        "another process holds the SQLite file locked",
        "folder",
        _FOUND_UNMARKED,
        _FOUND_UNMARKED,
        _UNANNOUNCED,
        hurry_s=0.1,
    ),
    Row(
        "sqlite-clock-ahead",
        "this machine's clock is 48 hours ahead: records seem expired",
        "folder",
        Cell("miss"),
        _FOUND,
        _SAVED,
    ),
    Row(
        "sqlite-clock-behind",
        "this machine's clock is 48 hours behind",
        "folder",
        _FOUND,
        _FOUND,
        Cell("drop"),
    ),
    Row(
        "model-revision",
        "another revision of the model has, or saves, the same prompts in this bucket and index",
        "s3",
        Cell("miss", touched=False),
        UNTOUCHED_HIT,
        UNTOUCHED_SAVE,
        is_theirs=True,
    ),
    Row(
        "agent-killed",
        "the node agent is killed",
        "agent",
        _NO_LOOKUP,
        _NO_LOAD,
        _NO_SAVE,
    ),
    Row(
        "agent-killed-busy",
        "the node agent is killed while it fetches or puts",
        "agent",
        UNTOUCHED_HIT,
        _NO_LOAD,
        Cell("drop", beside=AWAY),
        is_fetched=True,
    ),
    Row(
        "agent-frozen",
        "the node agent hangs (it is frozen)",
        "agent",
        _NO_LOOKUP,
        _NO_LOAD,
        _NO_SAVE,
    ),
    Row(
        "agent-unlinked",
        "the node agent's socket is removed",
        "agent",
        _FOUND,
        _FOUND,
        _SAVED,
    ),
    Row(
        "agent-full",
        "the node agent's arena is full of payloads that another replica has leased",
        "agent",
        UNTOUCHED_HIT,
        Cell("miss", "load_refused"),
        _SAVE_FAILS,
    ),
    Row(
        "agent-store-reset",
        "the node agent's connections to S3 are reset",
        "agent",
        UNTOUCHED_HIT,
        Cell("miss", "load_errors"),
        Cell("saved", "agent_save_errors"),
        is_fetched=True,
    ),
    Row(
        "agent-store-stalled",
        "S3 accepts and never answers the node agent",
        "agent",
        UNTOUCHED_HIT,
        Cell("miss", "load_errors"),
        Cell("saved", "agent_save_errors"),
        is_fetched=True,
    ),
    Row(
        "agent-store-flipped",
        "a bit of each body flips that the node agent fetches",
        "agent",
        UNTOUCHED_HIT,
        Cell("miss", "load_corrupt"),
        UNTOUCHED_SAVE,
        is_fetched=True,
    ),
    Row(
        "agent-process-killed",
        "the node agent's fetching process is killed while it fetches",
        "agent",
        UNTOUCHED_HIT,
        Cell("hit", "agent_fetch_process_losses"),
        UNTOUCHED_SAVE,
        is_fetched=True,
        uses_process=True,
    ),
    Row(
        "agent-process-frozen",
        "the node agent's fetching process hangs (it is frozen)",
        "agent",
        UNTOUCHED_HIT,
        Cell("miss", "load_errors"),
        UNTOUCHED_SAVE,
        is_fetched=True,
        uses_process=True,
    ),
)


@dataclass(frozen=True)
class HeldRow:
    """One fault while a lookup misses payloads that another node holds back, and has them put."""

    name: str
    what: str
    lookup: Cell
    """A ``hit`` is one of some chunks: those that came."""

    @property
    def waits(self) -> bool:
        """Whether the request waits until its own bound."""
        return self.lookup.counted == _GIVEN_UP

    @property
    def is_asked(self) -> bool:
        """Whether the other node gets the request. If not, nothing is waited for."""
        return self.lookup.counted != _NOT_WRITTEN


_GIVEN_UP, _NOT_WRITTEN = "put_waits_given_up", "agent_put_request_errors"
_NOT_COME = Cell("miss", _GIVEN_UP, beside=AWAY)
_NOT_ASKED = Cell("miss", _NOT_WRITTEN)
HELD_ROWS: tuple[HeldRow, ...] = (
    HeldRow(
        "holder-killed", "the other node's agent is killed before it reads the request", _NOT_COME
    ),
    HeldRow("holder-killed-putting", "it is killed while it puts the first payload", _NOT_COME),
    HeldRow(
        "holder-killed-between",
        "it is killed after it has put the first payload",
        Cell("hit", _GIVEN_UP, beside=AWAY),
    ),
    HeldRow("holder-frozen", "it hangs (it is frozen)", _NOT_COME),
    HeldRow("holder-refused", "its store refuses puts", Cell("miss", "agent_puts_refused")),
    HeldRow(
        "request-reset", "the index resets the connection that carries the request", _NOT_ASKED
    ),
    HeldRow("request-unanswered", "the index takes the request, its response is lost", _NOT_ASKED),
    HeldRow("request-index-killed", "the index is killed while the request is written", _NOT_ASKED),
)

BY_NAME = {row.name: row for row in ROWS}
