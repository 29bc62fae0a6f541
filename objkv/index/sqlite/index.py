"""An index in one SQLite file, shared by all replicas of a machine.

Threads and processes share the file through WAL, which does not work on network file systems.
Expired records become invisible at once, and later writes remove them in small batches.
"""

import os
import sqlite3
import stat
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from objkv.errors import StoreDenied, StoreError, StoreUnavailable
from objkv.index.base import ChunkEntry, Lease, Record, Savings, ShardRecord, ShardRecords, Usage
from objkv.index.fields import (
    decode_shard,
    encode_shard,
    read_savings,
    savings_fields,
    sighting_name,
)
from objkv.net.deadline import ends_s

SCHEMA_VERSION = 5
APPLICATION_ID = 0x6F6B7631
"""``okv1``: distinguishes an index from other SQLite files."""


def _added(row: str, sign: str) -> str:
    """Return the statement that adds or subtracts (``sign``) a ``row``, ``old`` or ``new``."""
    nbytes = f"CAST({row}.value AS INTEGER)"  # the number with which it begins
    return (
        f"INSERT INTO totals VALUES ({row}.namespace, {sign}{nbytes}, {sign}1) "
        "ON CONFLICT (namespace) DO UPDATE SET "
        f"nbytes = nbytes {sign} {nbytes}, payloads = payloads {sign} 1"
    )


_TABLES = (
    """CREATE TABLE chunks (
  namespace TEXT NOT NULL,
  hash BLOB NOT NULL,
  parent BLOB NOT NULL,
  token_start INTEGER NOT NULL,
  token_end INTEGER NOT NULL,
  hits INTEGER NOT NULL DEFAULT 0,
  touched_s INTEGER NOT NULL DEFAULT 0,
  ends_s REAL NOT NULL,
  pinned_s INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (namespace, hash)
) WITHOUT ROWID""",
    "CREATE INDEX chunks_by_end ON chunks (ends_s)",
    """CREATE TABLE shards (
  namespace TEXT NOT NULL,
  hash BLOB NOT NULL,
  field TEXT NOT NULL,
  value BLOB NOT NULL,
  PRIMARY KEY (namespace, hash, field),
  FOREIGN KEY (namespace, hash) REFERENCES chunks ON DELETE CASCADE
) WITHOUT ROWID""",
    """CREATE TABLE leases (name TEXT PRIMARY KEY, owner TEXT NOT NULL, ends_s REAL NOT NULL)
WITHOUT ROWID""",
    "CREATE INDEX leases_by_end ON leases (ends_s)",
    "CREATE TABLE savings (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    # Triggers add up how much each namespace stores, in the transaction that changes it.
    """CREATE TABLE totals (namespace TEXT PRIMARY KEY, nbytes INTEGER NOT NULL,
  payloads INTEGER NOT NULL) WITHOUT ROWID""",
    f"CREATE TRIGGER shards_added AFTER INSERT ON shards BEGIN {_added('new', '+')}; END",
    f"CREATE TRIGGER shards_removed AFTER DELETE ON shards BEGIN {_added('old', '-')}; END",
    "CREATE TRIGGER shards_replaced AFTER UPDATE ON shards "
    f"BEGIN {_added('old', '-')}; {_added('new', '+')}; END",
)
_SCHEMA = "SELECT type, name, tbl_name, sql FROM sqlite_schema"


def create(connection: sqlite3.Connection) -> None:
    """Create the tables, within the caller's transaction."""
    for statement in _TABLES:
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


@cache
def _created() -> frozenset[tuple[object, ...]]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        create(connection)
        return frozenset(connection.execute(_SCHEMA))


_ALONE = 0o600
_GROUP = 0o660
_COMPANIONS = ("-wal", "-shm", "-journal")
_RIGHTS = "this user needs write permission on the file and its folder"


def prepare(path: Path) -> None:
    """Create the file and its folder if they are missing. Raises ``StoreDenied`` for planted ones.

    The content (which prefixes are stored, how often they are looked up) is private. So the file is
    created for this user alone, or for a group if its folder is set up for one (``install -d -m
    2770 -g GROUP FOLDER``); SQLite creates its companions alike. Users who may write to the folder
    can replace the file: only world-writable folders are distrusted.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = path.parent.stat()
        if not os.path.lexists(path):
            _make(path, folder)
        _check(path, folder)
        for suffix in _COMPANIONS:
            companion = path.with_name(path.name + suffix)
            with suppress(FileNotFoundError):  # usual, or its last user just removed it
                _check(companion, folder)
    except OSError as exc:
        denied = isinstance(exc, PermissionError)
        fix = f": {_RIGHTS}" if denied else ""
        raise StoreDenied(f"index {exc.filename or path}: {exc.strerror}{fix}") from exc


def _make(path: Path, folder: os.stat_result) -> None:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with suppress(FileExistsError):  # another process just created or planted it; the check follows
        fd = os.open(path, flags, _ALONE)
        try:
            if folder.st_mode & 0o077 == 0o070:  # for its group, and for no others
                os.fchmod(fd, _GROUP)  # regardless of the umask
        finally:
            os.close(fd)


def _check(path: Path, folder: os.stat_result) -> None:
    found = path.lstat()
    if folder.st_mode & stat.S_IWOTH and found.st_uid not in (os.geteuid(), 0):
        raise StoreDenied(
            f"index {path} belongs to another user and is in a world-writable folder: set "
            "index_url to a file in your own folder"
        )
    with suppress(FileNotFoundError):  # an operator's link to a file that does not exist yet
        if not stat.S_ISREG(path.stat().st_mode):
            raise StoreDenied(
                f"index {path} is not a regular file: remove it, or set index_url to another path"
            )


_WAL_RETRY_S = 0.01
_VALUE_BYTES_MAX = 16 << 20
"""Limit for one row; every record is far smaller."""
_CALL_S_MAX = 20.0
"""Limit for computing in SQLite per call. Even a large index needs less."""
_STEPS = 10_000
"""Instructions of SQLite's virtual machine between two checks of the clock; below a millisecond."""
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_REFUSED = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM)
_BROKEN = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_DAMAGED = (
    "damaged or not an objkv index ({}): stop all processes that use it, delete it and its -wal "
    "and -shm files, then run objkv rebuild --apply; no KV is lost"
)
_MEANINGS: dict[int, tuple[type[StoreError], str]] = {
    **dict.fromkeys(_BUSY, (StoreUnavailable, "busy: {}")),
    sqlite3.SQLITE_FULL: (StoreUnavailable, "the disk is full, free some space: {}"),
    sqlite3.SQLITE_INTERRUPT: (StoreUnavailable, "the call exceeded its time limit"),
    **dict.fromkeys((*_REFUSED, sqlite3.SQLITE_AUTH), (StoreDenied, f"{{}}: {_RIGHTS}")),
    **dict.fromkeys(_BROKEN, (StoreDenied, _DAMAGED)),
}


class SqliteFile:
    """Connections to one file: one per call in flight, kept for reuse. Safe across ``fork``. Opens
    nothing before the first call, and creates nothing before the first write. ``busy_ms`` bounds
    how long a call waits for another writer."""

    def __init__(self, path: Path, *, busy_ms: int) -> None:
        self.path = path
        self._busy_s = busy_ms / 1000
        self._lock = Lock()
        self._idle: list[sqlite3.Connection] = []
        self._place: tuple[int, int] | None = None
        """Device and inode of the file that the idle connections have open."""
        self._inherited: list[sqlite3.Connection] = []
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _abandon(this()))

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Borrow a connection. Each statement sees one state of the file. A missing one reads as
        empty, and is not created."""
        if os.path.lexists(self.path):
            with self._borrow() as connection:
                yield connection
            return
        with (
            translated(self.path),
            closing(sqlite3.connect(":memory:", isolation_level=None)) as empty,
        ):
            create(empty)
            yield empty

    @contextmanager
    def _borrow(self) -> Iterator[sqlite3.Connection]:
        with translated(self.path):
            place = self._look()
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                connection = self._open()
                place = self._look()
            try:
                _bound(connection, _CALL_S_MAX)
                yield connection
            except BaseException:
                # Its state is unknown, so the next call gets a new one.
                connection.close()
                raise
            with self._lock:
                is_current = place == self._place
                if is_current:
                    self._idle.append(connection)
            if not is_current:
                connection.close()

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """Borrow a connection inside one transaction, committed unless the block raises."""
        with self._borrow() as connection, connection:
            connection.execute("BEGIN IMMEDIATE")
            yield connection

    def close(self) -> None:
        self._use(self._place)

    def _use(self, place: tuple[int, int] | None) -> None:
        with self._lock:
            unused, self._idle, self._place = self._idle, [], place
        for connection in unused:
            connection.close()

    def _look(self) -> tuple[int, int] | None:
        """Return the device and inode of the file that is now at the path. Closes connections to
        one that was removed or replaced, because no other process uses that."""
        try:
            found = os.stat(self.path)
        except OSError:
            place = None
        else:
            place = found.st_dev, found.st_ino
        if place != self._place:
            self._use(place)
        return place

    def _open(self) -> sqlite3.Connection:
        prepare(self.path)
        # Only one thread uses a connection at a time, but not always the same one.
        connection = sqlite3.connect(
            self.path, timeout=self._busy_s, isolation_level=None, check_same_thread=False
        )
        try:
            _bound(connection, _CALL_S_MAX)
            # The file is not trusted: no functions in its schema, and no values above a limit.
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _VALUE_BYTES_MAX)
            connection.execute("PRAGMA foreign_keys = ON")
            # Losing a commit in a power failure costs only hits, so it is not worth an fsync.
            connection.execute("PRAGMA synchronous = NORMAL")
            self._check_schema(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _check_schema(self, connection: sqlite3.Connection) -> None:
        if _pragma(connection, "user_version") == 0 and _is_empty(connection):
            self._use_wal(connection)
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                if _is_empty(connection):  # otherwise another process was faster
                    create(connection)
        version = _pragma(connection, "user_version")
        if _pragma(connection, "application_id") != APPLICATION_ID:
            raise StoreDenied(
                f"{self.path} is an SQLite file of another program: set index_url to another file"
            )
        if version != SCHEMA_VERSION:
            raise StoreDenied(
                f"index {self.path} was written by another objkv (schema {version}, supported: "
                f"{SCHEMA_VERSION}): delete it with its -wal and -shm, and run `objkv rebuild "
                "--apply`, or set index_url to another file"
            )
        # Every publish or lookup would run a planted trigger or view.
        expected = _created()
        rows = connection.execute(_SCHEMA).fetchmany(len(expected) + 1)
        if len(rows) != len(expected) or frozenset(rows) != expected:
            found = _DAMAGED.format("tables or triggers not created by objkv")
            raise StoreDenied(f"index {self.path}: {found}")

    def _use_wal(self, connection: sqlite3.Connection) -> None:
        # Switching the mode does not wait for other users as statements do, so it is retried here.
        deadline = time.monotonic() + self._busy_s
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as exc:
                if _code(exc) not in _BUSY or time.monotonic() > deadline:
                    raise
            time.sleep(_WAL_RETRY_S)


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Raise SQLite's errors as ``StoreError`` with the fix."""
    try:
        yield
    except sqlite3.Error as exc:
        kind, words = _MEANINGS.get(_code(exc), (StoreError, "{}"))
        raise kind(f"index {path}: {words.format(exc)}") from exc


def _bound(connection: sqlite3.Connection, seconds: float) -> None:
    """Interrupt computing, not waiting, after ``seconds``, or at this call's deadline."""
    until_s = min(time.monotonic() + seconds, ends_s())
    connection.set_progress_handler(lambda: time.monotonic() > until_s, _STEPS)


def _code(exc: sqlite3.Error) -> int:
    # The lowest byte is the primary code; the rest distinguishes variants.
    return int(getattr(exc, "sqlite_errorcode", 0)) & 0xFF


def _is_empty(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_schema").fetchone() is None


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _abandon(file: SqliteFile | None) -> None:
    # SQLite must not see the parent's connections again, not even to close them, so they are kept.
    if file is not None:
        file._inherited += file._idle
        file._idle, file._lock = [], Lock()


_HASHES_MAX = 30_000
"""Limit per statement; SQLite itself allows 32,766 variables."""
_SCAN_ROWS = 1_000
_PURGE_ROWS = 100

_COLUMNS = "c.hash, c.parent, c.token_start, c.token_end, c.hits, c.touched_s, c.pinned_s"
_LIVE = "c.ends_s > ?"
_JOINED = f"SELECT {_COLUMNS}, s.field, s.value FROM chunks c JOIN shards s USING (namespace, hash)"
_FOUND = "SELECT hash, s.field, s.value FROM chunks c JOIN shards s USING (namespace, hash)"
# Pages of whole chunks: a page of joined rows could split a chunk's shards. CROSS, because
# otherwise SQLite searches every hash of a page once per chunk of the page: 0.4 s a page.
_PAGE = f"""
SELECT {_COLUMNS}, s.field, s.value
FROM (SELECT * FROM chunks c WHERE namespace = ? AND hash > ? AND {_LIVE} ORDER BY hash LIMIT ?) c
CROSS JOIN shards s ON s.namespace = c.namespace AND s.hash = c.hash ORDER BY c.hash
"""
_PUBLISH_CHUNK = """
INSERT INTO chunks (namespace, hash, parent, token_start, token_end, ends_s)
VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (namespace, hash) DO UPDATE SET
  parent = excluded.parent, token_start = excluded.token_start, token_end = excluded.token_end,
  ends_s = max(excluded.ends_s, pinned_s)
"""
_PUBLISH_SHARD = """
INSERT INTO shards (namespace, hash, field, value) VALUES (?, ?, ?, ?)
ON CONFLICT (namespace, hash, field) DO UPDATE SET value = excluded.value
"""
_TOUCH = f"""
UPDATE chunks AS c SET hits = hits + 1, touched_s = ?, ends_s = max(?, pinned_s)
WHERE namespace = ? AND {_LIVE} AND hash IN
"""
_USAGE = """
WITH expired AS (
  SELECT namespace, sum(CAST(s.value AS INTEGER)) AS nbytes, count(*) AS payloads
  FROM chunks c JOIN shards s USING (namespace, hash)
  WHERE c.ends_s <= ? GROUP BY namespace)
SELECT namespace, t.nbytes - ifnull(e.nbytes, 0) AS nbytes,
  t.payloads - ifnull(e.payloads, 0) AS payloads
FROM totals t LEFT JOIN expired e USING (namespace)
WHERE t.payloads > ifnull(e.payloads, 0) ORDER BY namespace
"""
_CREDIT = """
INSERT INTO savings VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + excluded.value
"""
_LEASE = """
INSERT INTO leases (name, owner, ends_s) VALUES (?, ?, ?)
ON CONFLICT (name) DO UPDATE SET owner = excluded.owner, ends_s = excluded.ends_s
WHERE leases.owner = excluded.owner OR leases.ends_s <= ?
"""
_RELEASE = "DELETE FROM leases WHERE name = ? AND owner = ?"
# Sightings end like leases, so they are in their table. No lease has such a name: leases are named
# by paths, and by words.
_SIGHTED = "SELECT count(*) FROM leases WHERE name = ? AND ends_s > ?"
_SIGHT = """
INSERT INTO leases (name, owner, ends_s) VALUES (?, '', ?)
ON CONFLICT (name) DO UPDATE SET ends_s = excluded.ends_s
"""


class SqliteIndex:
    """Implements ``PruneIndex``. Survives ``fork``, and writers that are killed at any moment.
    ``clock``: seconds since the epoch. ``busy_ms``: see ``SqliteFile``."""

    def __init__(
        self, path: Path, *, clock: Callable[[], float] = time.time, busy_ms: int = 2_000
    ) -> None:
        self._file = SqliteFile(path, busy_ms=busy_ms)
        self._clock = clock

    def lookup(self, namespace: str, prefix_hashes: Sequence[bytes]) -> list[Record | None]:
        """One statement for up to 30,000 hashes."""
        found: dict[bytes, Record] = {}
        for part in _parts(prefix_hashes):
            rows = self._rows(
                f"{_JOINED} WHERE namespace = ? AND {_LIVE} AND hash IN {_marks(part)}",
                *(namespace, self._clock(), *part),
            )
            found |= {record.prefix_hash: record for record in _records(rows, self._clock())}
        return [found.get(prefix_hash) for prefix_hash in prefix_hashes]

    def find(
        self, namespace: str, prefix_hashes: Sequence[bytes], fields: Sequence[str]
    ) -> list[ShardRecords | None]:
        """Faster than ``lookup``: it reads only these fields."""
        wanted = list(dict.fromkeys(fields))
        found: dict[bytes, dict[str, ShardRecord]] = {}
        for part in _parts(prefix_hashes):
            rows = self._rows(
                f"{_FOUND} WHERE namespace = ? AND {_LIVE} AND field IN {_marks(wanted)}"
                f" AND hash IN {_marks(part)}",
                *(namespace, self._clock(), *wanted, *part),
            )
            for prefix_hash, field, value in rows:
                if shard := _shard(value):
                    found.setdefault(prefix_hash, {})[field] = shard
        return [found.get(prefix_hash) for prefix_hash in prefix_hashes]

    def scan(self, namespace: str) -> Iterator[Record]:
        """Yields in hash order, and holds no transaction between two steps."""
        after = b""
        while rows := self._rows(_PAGE, namespace, after, self._clock(), _SCAN_ROWS):
            yield from _records(rows, self._clock())
            after = rows[-1][0]

    def namespaces(self) -> list[str]:
        query = f"SELECT DISTINCT namespace FROM chunks c WHERE {_LIVE} ORDER BY namespace"
        return [str(namespace) for (namespace,) in self._rows(query, self._clock())]

    def usage(self) -> list[Usage]:
        """Exact: does not count expired records that are still in the file."""
        now = self._clock()
        rows = self._rows(_USAGE, now)
        return [Usage(name, nbytes, payloads, int(now)) for name, nbytes, payloads in rows]

    def savings(self) -> list[Savings]:
        rows = self._rows("SELECT name, value FROM savings")
        return read_savings({str(field): value for field, value in rows if type(value) is int})

    def check(self) -> None:
        """Also proves that the file is writable."""
        self._changed("DELETE FROM leases WHERE name = ''")

    def close(self) -> None:
        self._file.close()

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._file.read() as connection:
            return connection.execute(query, values).fetchall()

    def _changed(self, statement: str, *values: object) -> bool:
        """Execute a statement that concerns at most one row. Return whether there was one."""
        with self._file.write() as connection:
            return connection.execute(statement, values).rowcount == 1

    def publish(
        self, chunk: ChunkEntry, shards: ShardRecords, *, ttl_s: int, lease: Lease | None = None
    ) -> None:
        assert shards
        now = self._clock()
        key = (chunk.namespace, chunk.prefix_hash)
        with self._file.write() as connection:
            # Expired fields must not return with the new ones.
            connection.execute(
                "DELETE FROM chunks WHERE namespace = ? AND hash = ? AND ends_s <= ?", (*key, now)
            )
            connection.execute(
                _PUBLISH_CHUNK,
                (*key, chunk.parent_hash, chunk.token_start, chunk.token_end, now + ttl_s),
            )
            connection.executemany(
                _PUBLISH_SHARD,
                [(*key, field, encode_shard(shard)) for field, shard in shards.items()],
            )
            if lease is not None:
                connection.execute(_RELEASE, lease)
            _purge(connection, now)

    def touch(self, namespace: str, prefix_hashes: Sequence[bytes], *, ttl_s: int) -> None:
        if not prefix_hashes:
            return
        now = self._clock()
        with self._file.write() as connection:
            for part in _parts(prefix_hashes):
                connection.execute(
                    _TOUCH + _marks(part), (int(now), now + ttl_s, namespace, now, *part)
                )

    def credit(self, savings: Savings) -> None:
        with self._file.write() as connection:
            connection.executemany(_CREDIT, savings_fields(savings).items())

    def forget(self, namespace: str, prefix_hash: bytes, field: str, expected: ShardRecord) -> bool:
        key = (namespace, prefix_hash)
        with self._file.write() as connection:
            removed = connection.execute(
                "DELETE FROM shards WHERE namespace = ? AND hash = ? AND field = ? AND value = ?"
                " AND EXISTS (SELECT 1 FROM chunks c WHERE c.namespace = shards.namespace"
                f" AND c.hash = shards.hash AND {_LIVE})",
                (*key, field, encode_shard(expected), self._clock()),
            ).rowcount
            if removed:
                connection.execute(
                    "DELETE FROM chunks WHERE namespace = ? AND hash = ? AND NOT EXISTS"
                    " (SELECT 1 FROM shards s WHERE s.namespace = ? AND s.hash = ?)",
                    (*key, *key),
                )
        return removed == 1

    def lease(self, name: str, owner: str, *, ttl_ms: int) -> bool:
        now = self._clock()
        with self._file.write() as connection:
            taken = connection.execute(_LEASE, (name, owner, now + ttl_ms / 1000, now)).rowcount
            _purge(connection, now)
        return taken == 1

    def release(self, name: str, owner: str) -> None:
        self._changed(_RELEASE, name, owner)

    def flush(self) -> None:
        """Does nothing: totals change with the records."""

    def record_sightings(self, names: Sequence[str], *, ttl_s: int) -> list[bool]:
        now, seen = self._clock(), []
        with self._file.write() as connection:
            for name in names:
                row = f"sighted:{sighting_name(name)}"
                [(count,)] = connection.execute(_SIGHTED, (row, now))
                seen.append(count == 1)
                connection.execute(_SIGHT, (row, now + ttl_s))
            _purge(connection, now, max(len(names), _PURGE_ROWS))
        return seen

    def pin(self, namespace: str, prefix_hash: bytes, *, until_s: int, ttl_s: int) -> bool:
        now = self._clock()
        return self._changed(
            "UPDATE chunks AS c SET pinned_s = ?, ends_s = ?"
            f" WHERE namespace = ? AND hash = ? AND {_LIVE}",
            *(until_s, max(now + ttl_s, until_s), namespace, prefix_hash, now),
        )

    def drop(self, namespace: str, prefix_hash: bytes) -> bool:
        return self._changed(
            f"DELETE FROM chunks AS c WHERE namespace = ? AND hash = ? AND {_LIVE}",
            *(namespace, prefix_hash, self._clock()),
        )

    def set_usage(self, usage: Usage) -> None:
        """Does nothing: triggers keep exact totals."""


def _purge(connection: sqlite3.Connection, now: float, rows: int = _PURGE_ROWS) -> None:
    connection.execute(
        "DELETE FROM chunks WHERE (namespace, hash) IN"
        " (SELECT namespace, hash FROM chunks WHERE ends_s <= ? LIMIT ?)",
        (now, rows),
    )
    connection.execute(
        "DELETE FROM leases WHERE name IN (SELECT name FROM leases WHERE ends_s <= ? LIMIT ?)",
        (now, rows),
    )


def _parts(prefix_hashes: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Yield the hashes, each once, in parts for one statement."""
    hashes = list(dict.fromkeys(prefix_hashes))
    for start in range(0, len(hashes), _HASHES_MAX):
        yield hashes[start : start + _HASHES_MAX]


def _marks(values: Sequence[object]) -> str:
    return f"({','.join('?' * len(values))})"


def _shard(value: object) -> ShardRecord | None:
    # Another program may have stored text: SQLite columns hold any type.
    return decode_shard(value) if isinstance(value, bytes) else None


def _records(rows: Iterable[tuple[Any, ...]], now: float) -> Iterator[Record]:
    """Yield the records of joined rows, without chunks that have no readable shard."""
    chunks: dict[bytes, tuple[Any, ...]] = {}
    shards: dict[bytes, dict[str, ShardRecord]] = {}
    for *chunk, field, value in rows:
        if shard := _shard(value):
            chunks[chunk[0]] = tuple(chunk)
            shards.setdefault(chunk[0], {})[field] = shard
    for prefix_hash, (_, parent, start, end, hits, touched_s, pinned_s) in chunks.items():
        yield Record(
            prefix_hash=prefix_hash,
            parent_hash=parent,
            token_start=start,
            token_end=end,
            shards=shards[prefix_hash],
            hits=hits,
            touched_s=touched_s,
            pinned_until_s=pinned_s if pinned_s > now else 0,
        )
