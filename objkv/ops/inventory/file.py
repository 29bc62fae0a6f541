"""The file of an inventory: a private temporary SQLite file, so that memory stays small however
much is stored.

SQLite deletes the file as it opens it: nothing is left of it, however the process ends. Per payload
it takes about 60 bytes on disk and per chunk about 90; the tree of prefixes doubles that. Memory is
SQLite's two page caches. ``docs/audit.md`` has the measurements.
"""

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import RLock
from typing import Any, Literal, NamedTuple

from objkv.errors import ConfigError
from objkv.index.base import Record
from objkv.keys.chunk import ChunkKey
from objkv.keys.prefix import PREFIX_HASH_BYTES
from objkv.ops.backends_view import CHUNKS_AT_ONCE, record_keys
from objkv.stores.base import Entry

_CACHE_KIB = 8 << 10
"""SQLite's page cache, once for the walk's tables and once for the temporary ones."""
_TOKEN_END_MAX = 1 << 40
_HITS_MAX = 1 << 32
_BYTES_MAX = 1 << 40
"""Larger values in records are wrong, and their sums might overflow."""
_TABLES = """
CREATE TABLE namespaces (id INTEGER PRIMARY KEY, name TEXT UNIQUE, has_records INTEGER DEFAULT 0,
  is_known INTEGER DEFAULT 0, is_old INTEGER DEFAULT 0, expired_s REAL DEFAULT 0);
CREATE TABLE payloads (ns INTEGER, hash BLOB, field TEXT, nbytes INTEGER, modified_s REAL,
  problem TEXT, recorded INTEGER, created_s INTEGER,
  PRIMARY KEY (ns, hash, field)) WITHOUT ROWID;
CREATE TABLE chunks (ns INTEGER, hash BLOB, parent BLOB, start INTEGER, ends INTEGER,
  hits INTEGER, touched_s INTEGER, pinned INTEGER, PRIMARY KEY (ns, hash)) WITHOUT ROWID;
CREATE TABLE others (kind TEXT, ns INTEGER, key TEXT, name TEXT, nbytes INTEGER, modified_s REAL,
  detail TEXT, PRIMARY KEY (kind, key, name)) WITHOUT ROWID;
CREATE TABLE pins (ns INTEGER, hash BLOB, PRIMARY KEY (ns, hash)) WITHOUT ROWID;
"""
_ADD_PAYLOAD = """
INSERT INTO payloads (ns, hash, field, nbytes, modified_s) VALUES (?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET nbytes = excluded.nbytes, modified_s = excluded.modified_s
"""
_ADD_CHUNK = "INSERT OR REPLACE INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
_ADD_RECORD = """
INSERT INTO payloads (ns, hash, field, recorded, created_s) VALUES (?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET recorded = excluded.recorded, created_s = excluded.created_s
"""
_SET = "UPDATE payloads SET {} WHERE ns = ? AND hash = ? AND field = ?"
_REMOVE = {
    "payload": _SET.format("nbytes = NULL, modified_s = NULL"),
    "record": _SET.format("recorded = NULL"),
}
# Only one word for each payload, and the one whose remedy removes or mends it: what a sweep deletes
# with its namespace, or without a record, needs no other check. What is pinned has not expired.
_FOUND = """
CREATE TEMP VIEW found AS SELECT p.*,
  (EXISTS (SELECT 1 FROM main.pins i WHERE i.ns = p.ns AND i.hash = p.hash)
    OR EXISTS (SELECT 1 FROM main.chunks c WHERE c.ns = p.ns AND c.hash = p.hash AND c.pinned))
  AS is_pinned,
  CASE
  WHEN p.nbytes IS NULL AND p.recorded IS NULL THEN 'gone'
  WHEN p.nbytes IS NULL THEN 'missing'
  WHEN NOT n.is_known THEN 'unidentified'
  WHEN n.is_old THEN 'old_epoch'
  WHEN n.has_records AND p.recorded IS NULL THEN
    CASE WHEN p.modified_s <= n.expired_s
      AND NOT EXISTS (SELECT 1 FROM main.pins i WHERE i.ns = p.ns AND i.hash = p.hash)
    THEN 'expired' ELSE 'orphan' END
  WHEN p.problem IS NOT NULL OR p.nbytes < 4096 OR p.nbytes <> p.recorded THEN 'corrupt'
  ELSE 'sound' END AS kind
FROM main.payloads p JOIN main.namespaces n ON n.id = p.ns
"""
# The first byte of a prefix hash, at which work is divided. No index has it, so commands that
# select a part of all payloads read the whole table once.
_SLICES = """
SELECT n.name, substr(f.hash, 1, 1) AS fan, count(*) FROM temp.found f
JOIN main.namespaces n ON n.id = f.ns WHERE {where} GROUP BY f.ns, fan
"""
_ITEMS = """
SELECT hash, field, nbytes, modified_s FROM temp.found f
WHERE ns = ? AND (hash, field) > (?, ?) AND hash <= ? AND ({where})
ORDER BY hash, field LIMIT ?
"""


class Slice(NamedTuple):
    """The payloads of one namespace whose prefix hashes begin with the same byte."""

    namespace: str
    fan: bytes
    number: int
    """Of its payloads."""


Item = tuple[ChunkKey, Entry | None]
"""A payload as the bucket listed it; None if only the index has it."""


class Inventory:
    """Safe from many threads, but ``rows`` and ``named``. Raises ``ConfigError`` on a full disk."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._lock = RLock()
        self._names: dict[str, int] = {}
        self.begun_s = clock()
        """When the walk began; every observation is from then or later."""
        with self._translated():
            self._db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
            for pragma in ("synchronous = OFF", "temp_store = FILE"):
                self._db.execute(f"PRAGMA {pragma}")
            for schema in ("main", "temp"):
                self._db.execute(f"PRAGMA {schema}.cache_size = -{_CACHE_KIB}")
            self._db.executescript(_TABLES)
            self._db.execute(_FOUND)

    def namespace(self, name: str) -> int:
        """Return the number of the namespace ``name``."""
        with self._lock, self._translated():
            if name not in self._names:
                self._db.execute("INSERT OR IGNORE INTO namespaces (name) VALUES (?)", (name,))
                found = self._db.execute("SELECT id FROM namespaces WHERE name = ?", (name,))
                self._names[name] = int(found.fetchone()[0])
            return self._names[name]

    def names(self) -> dict[int, str]:
        with self._lock:
            return {ns: name for name, ns in self._names.items()}

    def add_payloads(self, namespace: str, payloads: Iterable[tuple[ChunkKey, Entry]]) -> None:
        """Add payloads of the bulk store. Idempotent."""
        ns = self.namespace(namespace)
        rows = [(ns, k.prefix_hash, k.field, e.nbytes, e.modified_s) for k, e in payloads]
        self._write(_ADD_PAYLOAD, rows)

    def add_records(self, namespace: str, records: Iterable[Record], *, has_hits: bool) -> None:
        """Add records, or what headers say. Wrong values are omitted or clamped. Idempotent."""
        ns = self.namespace(namespace)
        chunks, payloads = [], []
        for record in records:
            start, end = record.token_start, record.token_end
            is_sane = 0 <= start < end <= _TOKEN_END_MAX
            hits = min(max(0, record.hits), _HITS_MAX) if has_hits else None
            used_s = min(max(0, record.touched_s), _TOKEN_END_MAX)
            tokens = (start, end) if is_sane else (None, None)
            key = (ns, record.prefix_hash)
            chunks.append((*key, record.parent_hash, *tokens, hits, used_s, int(record.pinned)))
            for chunk in record_keys(namespace, record):
                shard = record.shards[chunk.field]
                nbytes = min(shard.nbytes, _BYTES_MAX)
                made_s = min(shard.created_s, _TOKEN_END_MAX)
                payloads.append((*key, chunk.field, nbytes, made_s))
        self._write(_ADD_CHUNK, chunks)
        self._write(_ADD_RECORD, payloads)

    def add_problem(self, key: ChunkKey, problem: str) -> None:
        """Note what is wrong with the header of a payload."""
        row = (problem, self.namespace(key.namespace), key.prefix_hash, key.field)
        self._write(_SET.format("problem = ?"), [row])

    def add_other(
        self, kind: str, entry: Entry, detail: str, *, namespace: str = "", name: str = ""
    ) -> None:
        """Add an entry that is no payload. ``name``: of an unfinished write."""
        ns = self.namespace(namespace) if namespace else None
        row = (kind, ns, entry.key, name, entry.nbytes, entry.modified_s, detail)
        self._write("INSERT OR REPLACE INTO others VALUES (?, ?, ?, ?, ?, ?, ?)", [row])

    def add_pins(self, namespace: str, hashes: Iterable[bytes]) -> None:
        """Add chunks that are pinned now. Idempotent."""
        ns = self.namespace(namespace)
        self._write("INSERT OR IGNORE INTO pins VALUES (?, ?)", [(ns, one) for one in hashes])

    def remove(self, what: Literal["payload", "record"], keys: Sequence[ChunkKey]) -> None:
        """Remove payloads or records that are gone."""
        rows = [(self.namespace(key.namespace), key.prefix_hash, key.field) for key in keys]
        self._write(_REMOVE[what], rows)

    def slices(self, where: str) -> list[Slice]:
        """Return the parts of the payloads for which ``where`` holds, a condition on ``found``."""
        return [Slice(*row) for row in self.run(_SLICES.format(where=where))]

    def items(self, part: Slice, where: str) -> Iterator[list[Item]]:
        """Yield the payloads of ``part`` for which ``where`` holds, by key, in batches."""
        ns = self.namespace(part.namespace)
        statement, after = _ITEMS.format(where=where), (part.fan, "")
        last = part.fan.ljust(PREFIX_HASH_BYTES, b"\xff")
        while rows := self.run(statement, (ns, *after, last, CHUNKS_AT_ONCE)):
            keys = [ChunkKey.of(part.namespace, *row[:2]) for row in rows]
            yield [
                (key, None if nbytes is None else Entry(key.path(), nbytes, modified_s))
                for key, (*_, nbytes, modified_s) in zip(keys, rows, strict=True)
            ]
            after = rows[-1][:2]

    def count(self, where: str) -> int:
        """Return for how many payloads ``where`` holds."""
        found = f"SELECT count(*) FROM temp.found f WHERE {where}"  # noqa: S608  # our own conditions
        return int(self.run(found)[0][0])

    def rows(self, statement: str, values: Sequence[object] = ()) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of ``statement`` as SQLite reads them."""
        with self._translated():
            yield from self._db.execute(statement, values)

    def named(self, statement: str, values: Sequence[object] = ()) -> Iterator[dict[str, Any]]:
        """Yield the rows of ``statement`` as dictionaries by column name."""
        with self._translated():
            cursor = self._db.execute(statement, values)
            names = [column[0] for column in cursor.description]
            yield from (dict(zip(names, row, strict=True)) for row in cursor)

    def run(self, statement: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run ``statement``, and return its rows, which must be few. Safe from many threads."""
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
                f"the temporary directory: {exc}; an inventory needs about 400 bytes per chunk "
                "there, so free some space or set TMPDIR to a directory with enough"
            ) from exc
