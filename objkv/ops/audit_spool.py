"""What an audit's walk has seen, in an SQLite file beside the cache: memory stays small however
much is stored, and a walk that was interrupted goes on where it ended.

The file is removed once a report has told all of it. An unfinished one holds prefix hashes and
sizes, no tokens; after a day it is begun anew.
"""

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Any, Literal

from objkv.errors import ConfigError
from objkv.index.base import Record
from objkv.keys.chunk import ChunkKey
from objkv.ops.audit_report import FindingKind
from objkv.ops.ends import record_keys
from objkv.stores.base import Entry

AGE_MAX_S = 24 * 3600.0
"""What was seen longer ago is looked at again."""
_FORMAT = 1
_CACHE_KIB = 8 << 10
"""Of pages that SQLite keeps in memory, for what was seen and for what is computed from it."""
_TOKEN_END_MAX = 1 << 40
_HITS_MAX = 1 << 32
_BYTES_MAX = 1 << 40
"""What records say beyond these is a lie, and its sum might not fit."""
_TABLES = """
CREATE TABLE about (format INTEGER, begun_s REAL);
CREATE TABLE done (name TEXT PRIMARY KEY) WITHOUT ROWID;
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
class Told:
    """What the index, or a payload's own header, tells of a chunk."""

    namespace: str
    record: Record
    has_hits: bool
    """Whether hits are counted at all where this comes from."""


class Spool:
    """Safe from many threads; ``rows`` for one. Raises ``ConfigError`` where the disk is full."""

    def __init__(
        self,
        file: Path | None,
        *,
        restart: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``file``: made if there is none, and emptied to ``restart``. None, or a file that another
        audit has open: one that nobody can go on from."""
        self.is_told = False
        """Whether a report has told all of it: then nothing is kept."""
        self._restart = restart
        self._lock = RLock()
        self._clock = clock
        self._names: dict[str, int] = {}
        self._file = file
        self._db = self._open()
        with self._translated():
            self.done = {str(name) for (name,) in self._db.execute("SELECT name FROM done")}
            self.begun_s = float(self._db.execute("SELECT begun_s FROM about").fetchone()[0])
            """When its walk began, be it in an earlier run."""
        self.resumed = bool(self.done)
        """Whether an earlier walk is continued."""

    @property
    def is_kept(self) -> bool:
        """Whether a later run can go on from here."""
        return self._file is not None

    def namespace(self, name: str) -> int:
        """The number that stands for ``name``."""
        with self._lock, self._translated():
            if name not in self._names:
                self._db.execute("INSERT OR IGNORE INTO namespaces (name) VALUES (?)", (name,))
                found = self._db.execute("SELECT id FROM namespaces WHERE name = ?", (name,))
                self._names[name] = int(found.fetchone()[0])
            return self._names[name]

    def add_payloads(self, payloads: Iterable[tuple[ChunkKey, Entry]]) -> None:
        """These are in the bulk store. To add one twice is to add it once."""
        rows = [
            (self.namespace(k.namespace), k.prefix_hash, k.field, e.nbytes, int(e.modified_s))
            for k, e in payloads
        ]
        self._write("INSERT OR REPLACE INTO payloads VALUES (?, ?, ?, ?, ?)", rows)

    def add_records(self, told: Iterable[Told]) -> None:
        """This is told of chunks; what cannot be true is left out."""
        records, shards = [], []
        for one in told:
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
        """This is not as it should be."""
        ns = self.namespace(namespace) if namespace else None
        row = (kind, ns, entry.key, entry.nbytes, int(entry.modified_s), detail)
        self._write("INSERT OR REPLACE INTO found VALUES (?, ?, ?, ?, ?, ?)", [row])

    def remove(self, table: Literal["payloads", "shards"], keys: Sequence[ChunkKey]) -> None:
        """These are not there any more."""
        rows = [(self.namespace(key.namespace), key.prefix_hash, key.field) for key in keys]
        self._write(_REMOVE[table], rows)

    def finish(self, unit: str) -> None:
        """``unit`` has told all it saw."""
        with self._lock:
            self.done.add(unit)
            self._write("INSERT OR IGNORE INTO done VALUES (?)", [(unit,)])

    def rows(self, statement: str, values: Sequence[object] = ()) -> Iterator[tuple[Any, ...]]:
        """What ``statement`` answers, as it is read."""
        with self._translated():
            yield from self._db.execute(statement, values)

    def run(self, statement: str, values: Sequence[object] = ()) -> int:
        """Runs ``statement``; how many rows it changed."""
        with self._lock, self._translated():
            return self._db.execute(statement, values).rowcount

    def some(self, statement: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """What ``statement`` answers, at once: for threads, and for few rows."""
        with self._lock, self._translated():
            return self._db.execute(statement, values).fetchall()

    def close(self) -> None:
        """Keep it for the next run, or, if all was told, nothing. Idempotent."""
        with self._lock, suppress(sqlite3.Error):
            self._db.close()
        if self.is_told and self._file is not None:
            _unlink(self._file)

    def _write(self, statement: str, rows: Sequence[Sequence[object]]) -> None:
        if not rows:
            return
        with self._lock, self._translated():
            self._db.execute("BEGIN")
            try:
                self._db.executemany(statement, rows)
            except BaseException:
                with suppress(sqlite3.Error):  # some errors have ended it
                    self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def _open(self) -> sqlite3.Connection:
        if self._file is not None:
            with suppress(OSError):
                self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._file.touch(mode=0o600)
            for _ in range(2):
                try:
                    return self._opened(str(self._file))
                except sqlite3.OperationalError:  # another audit's, or no place for a file
                    break
                except (sqlite3.DatabaseError, _Old):
                    _unlink(self._file)
        self._file = None
        with self._translated():
            self._restart = False
            return self._opened("")  # a file of SQLite's own, which nobody else sees

    def _opened(self, name: str) -> sqlite3.Connection:
        db = sqlite3.connect(name, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
            db.execute("PRAGMA synchronous = OFF")
            db.execute("PRAGMA temp_store = FILE")
            db.execute(f"PRAGMA main.cache_size = -{_CACHE_KIB}")
            db.execute(f"PRAGMA temp.cache_size = -{_CACHE_KIB}")
            db.execute("BEGIN EXCLUSIVE")
            if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                for statement in _TABLES.split(";"):
                    db.execute(statement)
                db.execute("INSERT INTO about VALUES (?, ?)", (_FORMAT, self._clock()))
            db.execute("COMMIT")
            about = db.execute("SELECT format, begun_s FROM about").fetchone()
            if about is None or about[0] != _FORMAT or not self._is_young(about[1]):
                raise _Old
            if self._restart:
                self._restart = False
                raise _Old
        except BaseException:
            db.close()
            raise
        return db

    def _is_young(self, begun_s: float) -> bool:
        return 0 <= self._clock() - begun_s < AGE_MAX_S

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as exc:
            place = self._file or "the folder for temporary files"
            raise ConfigError(
                f"{place}: {exc}; an audit keeps some 400 bytes a chunk there: make room, or set "
                "XDG_CACHE_HOME and TMPDIR to folders that have it"
            ) from exc


class _Old(Exception):
    """Of another version, or too long ago, or not wanted any more."""


def _unlink(file: Path) -> None:
    for suffix in ("", "-journal"):
        with suppress(OSError):
            file.with_name(file.name + suffix).unlink(missing_ok=True)
