"""The results of an audit's walk, in a private temporary file of SQLite, which keeps memory small
however much is stored.
"""

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import RLock
from typing import Any, Literal

from objkv.errors import ConfigError
from objkv.index.base import Record
from objkv.keys.chunk import ChunkKey
from objkv.ops.audit.report import FindingKind
from objkv.ops.backends_view import record_keys
from objkv.stores.base import Entry

_CACHE_KIB = 8 << 10
"""SQLite's page cache, once for the walk's tables and once for the temporary ones."""
_TOKEN_END_MAX = 1 << 40
_HITS_MAX = 1 << 32
_BYTES_MAX = 1 << 40
"""Larger values in records are wrong, and their sums might overflow."""
_TABLES = """
CREATE TABLE namespaces (id INTEGER PRIMARY KEY, name TEXT UNIQUE);
CREATE TABLE payloads (ns INTEGER, hash BLOB, field TEXT, nbytes INTEGER, modified_s INTEGER,
  PRIMARY KEY (ns, hash, field)) WITHOUT ROWID;
CREATE TABLE records (ns INTEGER, hash BLOB, parent BLOB, token_start INTEGER, token_end INTEGER,
  hits INTEGER, touched_s INTEGER, pinned INTEGER, PRIMARY KEY (ns, hash)) WITHOUT ROWID;
CREATE TABLE shards (ns INTEGER, hash BLOB, field TEXT, nbytes INTEGER, raw_bytes INTEGER,
  hot INTEGER, created_s INTEGER, PRIMARY KEY (ns, hash, field)) WITHOUT ROWID;
CREATE TABLE found (kind TEXT, ns INTEGER, key TEXT, nbytes INTEGER, modified_s INTEGER,
  detail TEXT, PRIMARY KEY (kind, key)) WITHOUT ROWID;
"""
_REMOVE = {
    "payloads": "DELETE FROM payloads WHERE ns = ? AND hash = ? AND field = ?",
    "shards": "DELETE FROM shards WHERE ns = ? AND hash = ? AND field = ?",
}


@dataclass(frozen=True, slots=True)
class SeenRecord:
    """The description of a chunk from the index or from a payload's header."""

    namespace: str
    record: Record
    has_hits: bool
    """Whether the source counts hits."""


class AuditSpool:
    """Safe from many threads, except ``rows``. Raises ``ConfigError`` if the disk is full."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._lock = RLock()
        self._names: dict[str, int] = {}
        self.done: set[str] = set()
        """The units of the walk that are done."""
        self.begun_s = clock()
        """When the walk began."""
        with self._translated():
            self._db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
            for pragma in ("synchronous = OFF", "temp_store = FILE"):
                self._db.execute(f"PRAGMA {pragma}")
            for schema in ("main", "temp"):
                self._db.execute(f"PRAGMA {schema}.cache_size = -{_CACHE_KIB}")
            self._db.executescript(_TABLES)

    def namespace(self, name: str) -> int:
        """Return the number of the namespace ``name``."""
        with self._lock, self._translated():
            if name not in self._names:
                self._db.execute("INSERT OR IGNORE INTO namespaces (name) VALUES (?)", (name,))
                found = self._db.execute("SELECT id FROM namespaces WHERE name = ?", (name,))
                self._names[name] = int(found.fetchone()[0])
            return self._names[name]

    def add_payloads(self, payloads: Iterable[tuple[ChunkKey, Entry]]) -> None:
        """Add payloads of the bulk store. Idempotent."""
        rows = [
            (self.namespace(k.namespace), k.prefix_hash, k.field, e.nbytes, int(e.modified_s))
            for k, e in payloads
        ]
        self._write("INSERT OR REPLACE INTO payloads VALUES (?, ?, ?, ?, ?)", rows)

    def add_records(self, seen: Iterable[SeenRecord]) -> None:
        """Add descriptions of chunks; impossible values are omitted or clamped. Idempotent."""
        records, shards = [], []
        for one in seen:
            ns, record = self.namespace(one.namespace), one.record
            start, end = record.token_start, record.token_end
            is_sane = 0 <= start < end <= _TOKEN_END_MAX
            hits = min(max(0, record.hits), _HITS_MAX) if one.has_hits else None
            used_s = min(max(0, record.touched_s), _TOKEN_END_MAX)
            tokens = (start, end) if is_sane else (None, None)
            key = (ns, record.prefix_hash)
            records.append((*key, record.parent_hash, *tokens, hits, used_s, int(record.pinned)))
            for chunk in record_keys(one.namespace, record):
                shard = record.shards[chunk.field]
                sizes = (min(shard.nbytes, _BYTES_MAX), min(shard.raw_bytes, _BYTES_MAX))
                made_s = min(shard.created_s, _TOKEN_END_MAX)
                shards.append((*key, chunk.field, *sizes, int(shard.hot), made_s))
        self._write("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?)", records)
        self._write("INSERT OR REPLACE INTO shards VALUES (?, ?, ?, ?, ?, ?, ?)", shards)

    def find(self, kind: FindingKind, entry: Entry, detail: str, namespace: str = "") -> None:
        """Add a finding."""
        ns = self.namespace(namespace) if namespace else None
        row = (kind, ns, entry.key, entry.nbytes, int(entry.modified_s), detail)
        self._write("INSERT OR REPLACE INTO found VALUES (?, ?, ?, ?, ?, ?)", [row])

    def remove(self, table: Literal["payloads", "shards"], keys: Sequence[ChunkKey]) -> None:
        """Remove payloads or shards that are gone."""
        rows = [(self.namespace(key.namespace), key.prefix_hash, key.field) for key in keys]
        self._write(_REMOVE[table], rows)

    def finish(self, unit: str) -> None:
        """Mark ``unit`` as done."""
        with self._lock:
            self.done.add(unit)

    def rows(self, statement: str, values: Sequence[object] = ()) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of ``statement`` as SQLite reads them. For one thread."""
        with self._translated():
            yield from self._db.execute(statement, values)

    def named(self, statement: str, values: Sequence[object] = ()) -> Iterator[dict[str, Any]]:
        """Yield the rows of ``statement`` as dictionaries by column name. For one thread."""
        with self._translated():
            cursor = self._db.execute(statement, values)
            names = [column[0] for column in cursor.description]
            yield from (dict(zip(names, row, strict=True)) for row in cursor)

    def run(self, statement: str, values: Sequence[object] = ()) -> int:
        """Run ``statement`` and return the number of changed rows."""
        with self._lock, self._translated():
            return self._db.execute(statement, values).rowcount

    def some(self, statement: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Return all rows of ``statement``. Safe from threads; for few rows."""
        with self._lock, self._translated():
            return self._db.execute(statement, values).fetchall()

    def close(self) -> None:
        """Close and delete the file. Idempotent."""
        with self._lock, suppress(sqlite3.Error):
            self._db.close()

    def _write(self, statement: str, rows: Sequence[Sequence[object]]) -> None:
        if not rows:
            return
        with self._lock, self._translated():
            self._db.execute("BEGIN")
            try:
                self._db.executemany(statement, rows)
            except BaseException:
                with suppress(sqlite3.Error):  # some errors end the transaction themselves
                    self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as exc:
            raise ConfigError(
                f"the temporary directory: {exc}; an audit needs about 400 bytes per chunk there, "
                "so free some space or set TMPDIR to a directory with enough"
            ) from exc


Check = Callable[[], None]
_CHUNKS = """
CREATE TEMP TABLE chunks (
  id INTEGER PRIMARY KEY, ns INTEGER, hash BLOB, parent BLOB, start INTEGER, ends INTEGER,
  payloads INTEGER, nbytes INTEGER, oldest_s INTEGER, newest_s INTEGER,
  raw_bytes INTEGER, recorded_bytes INTEGER, hot_payloads INTEGER, hot_bytes INTEGER,
  cold_payloads INTEGER, hits INTEGER, touched_s INTEGER, pinned INTEGER, has_record INTEGER,
  up INTEGER, kids INTEGER DEFAULT 0, root INTEGER, run INTEGER)
"""
_FILL = """
INSERT INTO temp.chunks (ns, hash, parent, start, ends, payloads, nbytes, oldest_s, newest_s,
  raw_bytes, recorded_bytes, hot_payloads, hot_bytes, cold_payloads, hits, touched_s, pinned,
  has_record)
SELECT p.ns, p.hash, max(r.parent), max(r.token_start), max(r.token_end), count(*), sum(p.nbytes),
  min(p.modified_s), max(p.modified_s), sum(s.raw_bytes),
  sum(CASE WHEN s.raw_bytes IS NOT NULL THEN p.nbytes END), ifnull(sum(s.hot), 0),
  ifnull(sum(s.hot * p.nbytes), 0), count(*) - ifnull(sum(s.hot), 0),
  max(r.hits), max(r.touched_s), max(r.pinned), max(r.hash IS NOT NULL)
FROM main.payloads p
LEFT JOIN main.shards s USING (ns, hash, field)
LEFT JOIN main.records r ON r.ns = p.ns AND r.hash = p.hash
GROUP BY p.ns, p.hash
"""
_PARENTS = """
UPDATE temp.chunks SET up = (
  SELECT p.id FROM temp.chunks p
  WHERE p.ns = chunks.ns AND p.hash = chunks.parent AND p.ends = chunks.start)
WHERE start > 0
"""
_KIDS = """
UPDATE temp.chunks SET kids = k.n
FROM (SELECT up AS parent_id, count(*) AS n FROM temp.chunks WHERE up IS NOT NULL GROUP BY up) k
WHERE k.parent_id = id
"""
_DOWN = """
UPDATE temp.chunks SET
  root = ifnull((SELECT p.root FROM temp.chunks p WHERE p.id = chunks.up), id),
  run = ifnull((SELECT p.run FROM temp.chunks p WHERE p.id = chunks.up AND p.kids = 1), id)
WHERE start = ?
"""
_NODES = """
CREATE TEMP TABLE nodes (
  id INTEGER PRIMARY KEY, ns INTEGER, up INTEGER, start INTEGER, ends INTEGER, first INTEGER,
  chunks INTEGER, nbytes INTEGER, hits INTEGER, hits_max INTEGER, touched_s INTEGER,
  newest_s INTEGER, kids INTEGER DEFAULT 0, leaves INTEGER DEFAULT 1, all_ends INTEGER,
  all_chunks INTEGER, all_nbytes INTEGER, all_hits INTEGER, all_hits_max INTEGER,
  all_touched_s INTEGER, all_newest_s INTEGER)
"""
_FILL_NODES = """
INSERT INTO temp.nodes (id, ns, up, start, ends, first, chunks, nbytes, hits, hits_max, touched_s,
  newest_s, all_ends, all_chunks, all_nbytes, all_hits, all_hits_max, all_touched_s, all_newest_s)
SELECT run, ns, (SELECT p.run FROM temp.chunks h JOIN temp.chunks p ON p.id = h.up
    WHERE h.id = g.run),
  start, ends, first, chunks, nbytes, hits, hits_max, touched_s, newest_s,
  ends, chunks, nbytes, hits, hits_max, touched_s, newest_s
FROM (SELECT run, ns, min(start) AS start, max(ends) AS ends, min(ends - start) AS first,
    count(*) AS chunks, sum(nbytes) AS nbytes, sum(hits) AS hits, max(hits) AS hits_max,
    max(touched_s) AS touched_s, max(newest_s) AS newest_s
  FROM temp.chunks WHERE run IS NOT NULL GROUP BY run) g
"""
_UP = """
UPDATE temp.nodes SET
  (kids, leaves, all_ends, all_chunks, all_nbytes, all_hits, all_hits_max, all_touched_s,
    all_newest_s) = (
    SELECT count(*), max(1, ifnull(sum(c.leaves), 0)), max(nodes.ends, ifnull(max(c.all_ends), 0)),
      nodes.chunks + ifnull(sum(c.all_chunks), 0), nodes.nbytes + ifnull(sum(c.all_nbytes), 0),
      nodes.hits + ifnull(sum(c.all_hits), 0),
      max(nodes.hits_max, ifnull(max(c.all_hits_max), 0)),
      max(nodes.touched_s, ifnull(max(c.all_touched_s), 0)),
      max(nodes.newest_s, ifnull(max(c.all_newest_s), 0))
    FROM temp.nodes c WHERE c.up = nodes.id)
WHERE start = ?
"""
_NEXT_START = "SELECT min(start) FROM temp.chunks WHERE start > ?"
_BEFORE = "SELECT max(start) FROM temp.nodes WHERE start < ?"


def make_chunks(spool: AuditSpool, check: Check = lambda: None) -> None:
    """Fill the temporary tables ``chunks`` and ``nodes``; a node joins a chain without branches.

    The work is done on disk, level by level, never with a tree in memory. ``check`` is called
    between steps and may raise. Records are not trusted: a chunk is a parent only if it ends where
    its child begins, which rules out loops.
    """
    spool.run("DROP TABLE IF EXISTS temp.chunks")
    spool.run("DROP TABLE IF EXISTS temp.nodes")
    steps = (
        _CHUNKS,
        _FILL,
        "CREATE INDEX temp.by_hash ON chunks (ns, hash)",
        _PARENTS,
        "CREATE INDEX temp.by_up ON chunks (up) WHERE up IS NOT NULL",
        _KIDS,
        "CREATE INDEX temp.by_start ON chunks (start) WHERE start IS NOT NULL",
    )
    for step in steps:
        check()
        spool.run(step)
    _level_by_level(spool, _DOWN, _NEXT_START, -1, check)
    for step in (
        "CREATE INDEX temp.by_run ON chunks (run, ends) WHERE run IS NOT NULL",
        _NODES,
        _FILL_NODES,
        "CREATE INDEX temp.nodes_by_up ON nodes (up)",
        "CREATE INDEX temp.nodes_by_start ON nodes (start)",
    ):
        check()
        spool.run(step)
    _level_by_level(spool, _UP, _BEFORE, 1 << 60, check)
    spool.run("CREATE INDEX temp.nodes_by_size ON nodes (all_nbytes DESC, start)")


def _level_by_level(spool: AuditSpool, step: str, following: str, start: int, check: Check) -> None:
    while True:
        check()
        found = spool.some(following, (start,))[0][0]
        if found is None:
            return
        start = int(found)
        spool.run(step, (start,))
