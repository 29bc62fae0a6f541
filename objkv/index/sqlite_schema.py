"""The tables of an index's SQLite file, version by version.

What is stored of each namespace is added up by triggers, in the transaction that changes it: so the
totals are exact whoever writes, also through an older objkv that still has the file open.
"""

import sqlite3
from contextlib import closing
from functools import cache

from objkv.index.shapes import SHAPES_HASH

SCHEMA_VERSION = 2
APPLICATION_ID = 0x6F6B7631
"""``okv1``: tells an index from somebody else's SQLite file."""

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
    """Whether the file has the tables, indexes and triggers that objkv made in ``version``, to the
    letter, and nothing beside them: a trigger or a view of somebody else's would be run by whoever
    publishes or looks something up."""
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
