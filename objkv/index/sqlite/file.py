"""The SQLite file of an index: its tables, its access rights, its connections and its errors.

The file is shared by threads and processes of one machine through WAL, which does not work on
network file systems.
"""

import os
import sqlite3
import stat
import time
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Lock

from objkv.errors import StoreDenied, StoreError, StoreUnavailable
from objkv.index.shapes import SHAPES_HASH
from objkv.net.deadline import ends_s

# Triggers add up what is stored of each namespace, in the transaction that changes it: so totals
# are exact, also when an older objkv that still has the file open writes.
SCHEMA_VERSION = 2
APPLICATION_ID = 0x6F6B7631
"""``okv1``: distinguishes an index from other SQLite files."""
_VERSION_1 = """
CREATE TABLE chunks (
  namespace TEXT NOT NULL,
  hash BLOB NOT NULL,
  parent BLOB NOT NULL,
  token_start INTEGER NOT NULL,
  token_end INTEGER NOT NULL,
  hits INTEGER NOT NULL DEFAULT 0,
  touched_s INTEGER NOT NULL DEFAULT 0,
  ends_s REAL,
  PRIMARY KEY (namespace, hash)
) WITHOUT ROWID;
CREATE INDEX chunks_by_end ON chunks (ends_s) WHERE ends_s IS NOT NULL;
CREATE TABLE shards (
  namespace TEXT NOT NULL,
  hash BLOB NOT NULL,
  field TEXT NOT NULL,
  value BLOB NOT NULL,
  PRIMARY KEY (namespace, hash, field),
  FOREIGN KEY (namespace, hash) REFERENCES chunks ON DELETE CASCADE
) WITHOUT ROWID;
CREATE TABLE leases (name TEXT PRIMARY KEY, owner TEXT NOT NULL, ends_s REAL NOT NULL)
WITHOUT ROWID;
CREATE INDEX leases_by_end ON leases (ends_s)
"""


def nbytes_of(value: str) -> str:
    """The expression for a written shard's bytes: the number it begins with, after a bracket."""
    return f"CAST(substr({value}, 2) AS INTEGER)"


def _added(row: str, sign: str) -> str:
    """The statement by which ``row``, ``old`` or ``new``, counts with ``sign``."""
    nbytes = nbytes_of(f"{row}.value")
    return (
        f"INSERT INTO totals VALUES ({row}.namespace, {sign}{nbytes}, {sign}1) "
        "ON CONFLICT (namespace) DO UPDATE SET "
        f"nbytes = nbytes {sign} {nbytes}, payloads = payloads {sign} 1"
    )


_NO_SHAPES = f"hash <> x'{SHAPES_HASH.hex()}'"
_VERSION_2 = (
    "ALTER TABLE chunks ADD COLUMN pinned_s INTEGER NOT NULL DEFAULT 0",
    # Pins had no end once; nothing could set them but a program.
    "UPDATE chunks SET ends_s = unixepoch() + 604800 WHERE ends_s IS NULL",
    "CREATE TABLE totals (namespace TEXT PRIMARY KEY, nbytes INTEGER NOT NULL, "
    "payloads INTEGER NOT NULL) WITHOUT ROWID",
    f"INSERT INTO totals SELECT namespace, sum({nbytes_of('value')}), count(*) FROM shards "
    f"WHERE {_NO_SHAPES} GROUP BY namespace",
    f"CREATE TRIGGER shards_added AFTER INSERT ON shards WHEN new.{_NO_SHAPES} "
    f"BEGIN {_added('new', '+')}; END",
    f"CREATE TRIGGER shards_removed AFTER DELETE ON shards WHEN old.{_NO_SHAPES} "
    f"BEGIN {_added('old', '-')}; END",
    f"CREATE TRIGGER shards_replaced AFTER UPDATE ON shards WHEN new.{_NO_SHAPES} "
    f"BEGIN {_added('old', '-')}; {_added('new', '+')}; END",
)


def create(connection: sqlite3.Connection) -> None:
    """Make the tables of the newest version; within a transaction of the caller."""
    _create_version_1(connection)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    upgrade(connection)


def upgrade(connection: sqlite3.Connection) -> None:
    """Make the tables of version 1 those of version 2; within a transaction of the caller."""
    for statement in _VERSION_2:
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def is_written(connection: sqlite3.Connection, version: int) -> bool:
    """Whether the file has exactly the tables, indexes and triggers that objkv made in ``version``,
    and no others: every publish or lookup would run a planted trigger or view."""
    expected = _schema_of(version)
    rows = connection.execute(_SCHEMA).fetchmany(len(expected) + 1)
    return len(rows) == len(expected) and frozenset(rows) == expected


_SCHEMA = "SELECT type, name, tbl_name, sql FROM sqlite_schema"


@cache
def _schema_of(version: int) -> frozenset[tuple[object, ...]]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        _create_version_1(connection)
        if version == SCHEMA_VERSION:
            upgrade(connection)
        return frozenset(connection.execute(_SCHEMA))


def _create_version_1(connection: sqlite3.Connection) -> None:
    for statement in _VERSION_1.split(";\n"):
        connection.execute(statement)


_ALONE = 0o600
_GROUP = 0o660
_COMPANIONS = ("-wal", "-shm", "-journal")


def prepare(path: Path) -> None:
    """Make the file and its folder where they are missing, and refuse planted ones.

    The content (which prefixes are stored, how often they are looked up) is private: the file is
    made for this user alone, or for a group if its folder is made for one
    (``install -d -m 2770 -g GROUP FOLDER``). SQLite gives its ``-wal`` and ``-shm`` files the
    owner, group and mode of the file. Raises ``StoreDenied`` with the fix. Users who may write to
    the folder can still replace the file later: only world-writable folders are distrusted.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = path.parent.stat()
        if not os.path.lexists(path):
            _make(path, folder)
        _check(path, folder)
        for suffix in _COMPANIONS:
            companion = path.with_name(path.name + suffix)
            with suppress(FileNotFoundError):  # as usual, or gone with its last user just now
                _check(companion, folder)
    except OSError as exc:
        raise StoreDenied(f"index {path}: {exc.strerror}: {exc.filename}") from exc


def is_shared_by_group(folder: os.stat_result) -> bool:
    """Whether a folder is made for a group only."""
    return folder.st_mode & 0o077 == 0o070


def _make(path: Path, folder: os.stat_result) -> None:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with suppress(FileExistsError):  # another process just made it, or planted it: checked next
        fd = os.open(path, flags, _ALONE)
        try:
            if is_shared_by_group(folder):
                os.fchmod(fd, _GROUP)  # whatever the umask says
        finally:
            os.close(fd)


def _check(path: Path, folder: os.stat_result) -> None:
    found = path.lstat()
    if folder.st_mode & stat.S_IWOTH and found.st_uid not in (os.geteuid(), 0):
        raise StoreDenied(
            f"index {path}: belongs to another user, in a folder where everybody may put files: set"
            " index_url to a file in a folder of your own"
        )
    with suppress(FileNotFoundError):  # a link of the operator's that leads to no file yet
        if not stat.S_ISREG(path.stat().st_mode):
            raise StoreDenied(f"index {path}: is no file: remove it, or set index_url to another")


_WAL_RETRY_S = 0.01
_VALUE_BYTES_MAX = 16 << 20
"""Of one row; no record comes near."""
_CALL_S_MAX = 20.0
"""Of computing in SQLite per call, unless the caller has less time: no index is so large."""
_OPEN_S_MAX = 600.0
"""The same, while the tables of an older version are changed."""
_NOT_OURS = "tables or triggers that objkv did not make"
_STEPS = 10_000
"""Of SQLite's machine, below a millisecond, between two checks of the clock."""
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_BROKEN = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_REFUSED = {
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_AUTH,
}


class SqliteFile:
    """Connections to one file, one per call in flight, kept for the next; safe across ``fork``.

    Nothing is opened before the first call. ``busy_ms`` bounds how long a call waits for another
    writer.
    """

    def __init__(self, path: Path, *, busy_ms: int) -> None:
        self.path = path
        self._busy_s = busy_ms / 1000
        self._lock = Lock()
        self._idle: list[sqlite3.Connection] = []
        self._place: tuple[int, int] | None = None
        """Device and number of the file that the idle connections have open."""
        self._inherited: list[sqlite3.Connection] = []
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _abandon(this()))

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Borrow a connection; each statement sees one state of the file."""
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
                # Its state is unknown: the next call gets a fresh one.
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
        with self.read() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                connection.rollback()
                raise
            connection.commit()

    def close(self) -> None:
        """Close the idle connections. Idempotent."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _look(self) -> tuple[int, int] | None:
        """Which file is at the path now. Connections to another one, which was removed or replaced,
        are closed: no other process shares a file without a name."""
        try:
            found = os.stat(self.path)
        except OSError:
            place = None
        else:
            place = found.st_dev, found.st_ino
        stale: list[sqlite3.Connection] = []
        with self._lock:
            if place != self._place:
                stale, self._idle, self._place = self._idle, [], place
        for connection in stale:
            connection.close()
        return place

    def _open(self) -> sqlite3.Connection:
        prepare(self.path)
        # A connection is used by one thread at a time, but not always by the same one.
        connection = sqlite3.connect(
            self.path, timeout=self._busy_s, isolation_level=None, check_same_thread=False
        )
        try:
            _bound(connection, _OPEN_S_MAX)
            # The file is not trusted: no functions in its schema, no values of any length.
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _VALUE_BYTES_MAX)
            connection.execute("PRAGMA foreign_keys = ON")
            # A commit lost with the power costs hits, so it is not worth an fsync.
            connection.execute("PRAGMA synchronous = NORMAL")
            self._check_schema(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _check_schema(self, connection: sqlite3.Connection) -> None:
        version = _pragma(connection, "user_version")
        if version == 0:
            self._use_wal(connection)
            version = self._change(connection)
        if version > SCHEMA_VERSION:
            raise StoreDenied(
                f"index {self.path} was written by a newer objkv (schema {version}, this one knows "
                f"{SCHEMA_VERSION}): upgrade objkv, or set index_url to another file"
            )
        if _pragma(connection, "application_id") != APPLICATION_ID:
            raise StoreDenied(
                f"{self.path} is an SQLite file, but not of objkv: set index_url to another file"
            )
        if version < SCHEMA_VERSION:
            self._change(connection)
        if not is_written(connection, SCHEMA_VERSION):
            raise _damaged(self.path, _NOT_OURS)

    def _use_wal(self, connection: sqlite3.Connection) -> None:
        # Switching the mode does not wait for others as other statements do, so it is repeated.
        deadline = time.monotonic() + self._busy_s
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as exc:
                if _code(exc) not in _BUSY or time.monotonic() > deadline:
                    raise
            time.sleep(_WAL_RETRY_S)

    def _change(self, connection: sqlite3.Connection) -> int:
        """Create or upgrade the tables, unless another process just did; the version now."""
        connection.execute("BEGIN IMMEDIATE")
        try:
            version = _pragma(connection, "user_version")
            tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
            if version == 0 and tables == 0:
                create(connection)
            elif 0 < version < SCHEMA_VERSION:
                if not is_written(connection, version):
                    raise _damaged(self.path, _NOT_OURS)
                upgrade(connection)
            version = _pragma(connection, "user_version")
        except BaseException:
            connection.rollback()
            raise
        connection.commit()
        return version


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Raise SQLite's errors as ``StoreError`` with the fix."""
    try:
        yield
    except sqlite3.Error as exc:
        code = _code(exc)
        if code in _BUSY:
            raise StoreUnavailable(f"index {path} is busy: {exc}") from exc
        if code == sqlite3.SQLITE_FULL:
            raise StoreUnavailable(f"index {path}: no space left, free some: {exc}") from exc
        if code == sqlite3.SQLITE_INTERRUPT:
            raise StoreUnavailable(f"index {path}: the time for this call is over") from exc
        if code in _BROKEN:
            raise _damaged(path, exc) from exc
        if code in _REFUSED:
            raise StoreDenied(
                f"index {path}: {exc}: this user must be able to write the file and its folder"
            ) from exc
        raise StoreError(f"index {path}: {exc}") from exc


def _damaged(path: Path, what: object) -> StoreDenied:
    return StoreDenied(
        f"index {path} is damaged or not of objkv ({what}): stop its users, delete it and its "
        "-wal and -shm files; no KV is lost, chunks are found again once saved again"
    )


def _bound(connection: sqlite3.Connection, seconds: float) -> None:
    """Interrupt computing after ``seconds``, or at the deadline of this call. Waiting for another
    writer has its own bound."""
    until_s = min(time.monotonic() + seconds, ends_s())
    connection.set_progress_handler(lambda: time.monotonic() > until_s, _STEPS)


def _code(exc: sqlite3.Error) -> int:
    # The lowest byte is the primary code; the rest distinguishes variants.
    return int(getattr(exc, "sqlite_errorcode", 0)) & 0xFF


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _abandon(file: SqliteFile | None) -> None:
    # SQLite must not see the parent's connections again, not even to close them: they are kept.
    if file is not None:
        file._inherited += file._idle
        file._idle, file._lock = [], Lock()
