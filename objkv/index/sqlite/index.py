"""An index in one SQLite file, shared by all replicas of a machine. Not for network file systems.

Expired records become invisible at once, and later writes remove them in small batches.
"""

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from objkv.index.base import ChunkEntry, Lease, Record, Savings, ShardRecord, Shards, Usage
from objkv.index.fields import (
    decode_shard,
    encode_shard,
    read_savings,
    savings_fields,
    sighting_name,
)
from objkv.index.sqlite.file import SqliteFile

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
    """Implements ``PruneIndex``. The first write creates the file and its folder.

    ``busy_ms`` bounds how long a call waits for another process's write. ``clock`` returns seconds
    since the epoch. Survives ``fork``, and writers that are killed at any moment.
    """

    def __init__(
        self, path: Path, *, clock: Callable[[], float] = time.time, busy_ms: int = 2_000
    ) -> None:
        self._file = SqliteFile(path, busy_ms=busy_ms)
        self._clock = clock

    def __repr__(self) -> str:
        return f"<SqliteIndex {self._file.path}>"

    def lookup(self, namespace: str, prefix_hashes: Sequence[bytes]) -> list[Record | None]:
        """See ``ReadIndex``. Uses one statement for up to 30,000 hashes."""
        found: dict[bytes, Record] = {}
        with self._file.read() as connection:
            for part in _parts(prefix_hashes):
                rows = connection.execute(
                    f"{_JOINED} WHERE namespace = ? AND {_LIVE} AND hash IN {_marks(part)}",
                    (namespace, self._clock(), *part),
                )
                found |= {record.prefix_hash: record for record in _records(rows, self._clock())}
        return [found.get(prefix_hash) for prefix_hash in prefix_hashes]

    def find(
        self, namespace: str, prefix_hashes: Sequence[bytes], fields: Sequence[str]
    ) -> list[Shards | None]:
        """See ``ReadIndex``. Uses one statement for up to 30,000 hashes, which reads only these
        fields."""
        wanted = list(dict.fromkeys(fields))
        found: dict[bytes, dict[str, ShardRecord]] = {}
        with self._file.read() as connection:
            for part in _parts(prefix_hashes):
                rows = connection.execute(
                    f"{_FOUND} WHERE namespace = ? AND {_LIVE} AND field IN {_marks(wanted)}"
                    f" AND hash IN {_marks(part)}",
                    (namespace, self._clock(), *wanted, *part),
                )
                for prefix_hash, field, value in rows:
                    # Another program may have stored text: SQLite columns hold any type.
                    if isinstance(value, bytes) and (shard := decode_shard(value)):
                        found.setdefault(prefix_hash, {})[field] = shard
        return [found.get(prefix_hash) for prefix_hash in prefix_hashes]

    def scan(self, namespace: str) -> Iterator[Record]:
        """See ``ReadIndex``. Yields in hash order, and holds no transaction between two steps."""
        after = b""
        while True:
            with self._file.read() as connection:
                rows = connection.execute(
                    _PAGE, (namespace, after, self._clock(), _SCAN_ROWS)
                ).fetchall()
            if not rows:
                return
            yield from _records(rows, self._clock())
            after = rows[-1][0]

    def namespaces(self) -> list[str]:
        """See ``ReadIndex``."""
        with self._file.read() as connection:
            rows = connection.execute(
                f"SELECT DISTINCT namespace FROM chunks c WHERE {_LIVE} ORDER BY namespace",
                (self._clock(),),
            ).fetchall()
        return [str(namespace) for (namespace,) in rows]

    def usage(self) -> list[Usage]:
        """See ``ReadIndex``. Exact: does not count expired records that are still in the file."""
        now = self._clock()
        with self._file.read() as connection:
            rows = connection.execute(_USAGE, (now,)).fetchall()
        return [Usage(name, nbytes, payloads, int(now)) for name, nbytes, payloads in rows]

    def savings(self) -> list[Savings]:
        """See ``ReadIndex``."""
        with self._file.read() as connection:
            rows = connection.execute("SELECT name, value FROM savings").fetchall()
        # Another program may have stored text: SQLite columns hold any type.
        return read_savings({str(field): value for field, value in rows if type(value) is int})

    def check(self) -> None:
        """See ``ReadIndex``. Also proves that the file is writable."""
        with self._file.write() as connection:
            connection.execute("DELETE FROM leases WHERE name = ''")

    def close(self) -> None:
        """See ``ReadIndex``."""
        self._file.close()

    def publish(
        self,
        chunk: ChunkEntry,
        shards: Mapping[str, ShardRecord],
        *,
        ttl_s: int,
        lease: Lease | None = None,
    ) -> None:
        """See ``WriteIndex``."""
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
        """See ``WriteIndex``."""
        if not prefix_hashes:
            return
        now = self._clock()
        with self._file.write() as connection:
            for part in _parts(prefix_hashes):
                connection.execute(
                    _TOUCH + _marks(part), (int(now), now + ttl_s, namespace, now, *part)
                )

    def credit(self, savings: Savings) -> None:
        """See ``WriteIndex``."""
        with self._file.write() as connection:
            connection.executemany(_CREDIT, savings_fields(savings).items())

    def forget(self, namespace: str, prefix_hash: bytes, field: str, expected: ShardRecord) -> bool:
        """See ``WriteIndex``."""
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
        """See ``WriteIndex``. Extends the owner's lease."""
        now = self._clock()
        with self._file.write() as connection:
            taken = connection.execute(_LEASE, (name, owner, now + ttl_ms / 1000, now)).rowcount
            _purge(connection, now)
        return taken == 1

    def release(self, name: str, owner: str) -> None:
        """See ``WriteIndex``."""
        with self._file.write() as connection:
            connection.execute(_RELEASE, (name, owner))

    def sight(self, names: Sequence[str], *, ttl_s: int) -> list[bool]:
        """See ``WriteIndex``; one transaction."""
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
        """See ``PruneIndex``."""
        now = self._clock()
        with self._file.write() as connection:
            changed = connection.execute(
                "UPDATE chunks AS c SET pinned_s = ?, ends_s = ?"
                f" WHERE namespace = ? AND hash = ? AND {_LIVE}",
                (until_s, max(now + ttl_s, until_s), namespace, prefix_hash, now),
            ).rowcount
        return changed == 1

    def drop(self, namespace: str, prefix_hash: bytes) -> bool:
        """See ``PruneIndex``."""
        with self._file.write() as connection:
            changed = connection.execute(
                f"DELETE FROM chunks AS c WHERE namespace = ? AND hash = ? AND {_LIVE}",
                (namespace, prefix_hash, self._clock()),
            ).rowcount
        return changed == 1

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


def _records(rows: Iterable[tuple[Any, ...]], now: float) -> Iterator[Record]:
    """Yield the records of joined rows, without chunks that have no readable shard."""
    chunks: dict[bytes, tuple[Any, ...]] = {}
    shards: dict[bytes, dict[str, ShardRecord]] = {}
    for *chunk, field, value in rows:
        # Another program may have stored text: SQLite columns hold any type.
        if isinstance(value, bytes) and (shard := decode_shard(value)):
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
