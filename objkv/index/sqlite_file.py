"""The SQLite file of an index: its connections, and what its errors mean.

The file is shared by threads and processes of one machine through WAL, which does not work on
network file systems.
"""

import os
import sqlite3
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from objkv.errors import StoreDenied, StoreError, StoreUnavailable
from objkv.index.sqlite_place import prepare
from objkv.index.sqlite_schema import (
    APPLICATION_ID,
    SCHEMA_VERSION,
    create,
    is_written,
    upgrade,
)
from objkv.sockets import ends_s

_WAL_RETRY_S = 0.01
_VALUE_BYTES_MAX = 16 << 20
"""Of one row; no record comes near."""
_CALL_S_MAX = 20.0
"""Of what SQLite computes for one call, or whoever calls has less time: no index is so large."""
_OPEN_S_MAX = 600.0
"""The same, while the tables of an older version are changed."""
_NOT_OURS = "tables or triggers that objkv did not make"
_STEPS = 10_000
"""Of SQLite's machine, below a millisecond, between two looks at the clock."""

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
                # Whatever happened to it, the next call gets a fresh one.
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
        """Which file is at the path now. Connections to another, which was removed or replaced, are
        closed: whoever reads and writes on in a file without a name shares it with nobody."""
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
    """Turn what SQLite raises into ``StoreError`` with what to fix."""
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
    """From now on what it computes is interrupted after so long, or when this call's time is over.
    Waiting for another writer is bounded by itself."""
    until_s = min(time.monotonic() + seconds, ends_s())
    connection.set_progress_handler(lambda: time.monotonic() > until_s, _STEPS)


def _code(exc: sqlite3.Error) -> int:
    # The lowest byte is the primary code; the rest tells variants apart.
    return int(getattr(exc, "sqlite_errorcode", 0)) & 0xFF


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _abandon(file: SqliteFile | None) -> None:
    # SQLite must not see the parent's connections again, not even to close them: they are kept.
    if file is not None:
        file._inherited += file._idle
        file._idle, file._lock = [], Lock()
