"""An index file of the first version is upgraded in place, once, by any process that opens it."""

import sqlite3
import time
from pathlib import Path

from objkv.index.fields import encode_shard
from objkv.index.shapes import SHAPES_HASH
from objkv.index.sqlite import file as sqlite_schema
from objkv.index.sqlite.index import SqliteIndex
from tests.contracts.clock import ManualClock
from tests.contracts.index_contract import (
    FIELD,
    LONG_S,
    NAMESPACE,
    OTHER_FIELD,
    at_once,
    chunk,
    get,
    prefix_hash,
    shard,
    usage,
)

HOUR_S = 3_600


def old_file(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        for statement in sqlite_schema._VERSION_1.split(";\n"):
            connection.execute(statement)
        ends_s = time.time() + HOUR_S
        for number, hash_, end in (
            (1, prefix_hash(1), ends_s),
            (2, prefix_hash(2), None),
            (3, SHAPES_HASH, ends_s),
        ):
            connection.execute(
                "INSERT INTO chunks VALUES (?, ?, ?, 0, 256, 5, 0, ?)",
                (NAMESPACE, hash_, prefix_hash(number - 1), end),
            )
            connection.execute(
                "INSERT INTO shards VALUES (?, ?, ?, ?)",
                (NAMESPACE, hash_, FIELD, encode_shard(shard(100 * number))),
            )
        connection.execute(f"PRAGMA application_id = {sqlite_schema.APPLICATION_ID}")
        connection.execute("PRAGMA user_version = 1")
    connection.close()


def test_records_stay_and_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    old_file(path)
    index = SqliteIndex(path)
    record = get(index, 1)
    assert record is not None
    assert (record.hits, record.shards) == (5, {FIELD: shard(100)})
    assert usage(index) == {NAMESPACE: (300, 2)}
    index.publish(chunk(3), {OTHER_FIELD: shard(7)}, ttl_s=LONG_S)
    assert usage(index) == {NAMESPACE: (307, 3)}


def test_pins_without_an_end_get_one(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    old_file(path)
    record = get(SqliteIndex(path), 2)
    assert record is not None
    assert not record.pinned
    assert get(SqliteIndex(path, clock=lambda: time.time() + 6 * 24 * HOUR_S), 2) is not None
    assert get(SqliteIndex(path, clock=lambda: time.time() + 8 * 24 * HOUR_S), 2) is None


def test_of_many_who_open_it_one_upgrades_it(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    old_file(path)
    now = time.time()
    indexes = [SqliteIndex(path, busy_ms=240_000, clock=lambda: now) for _ in range(8)]
    assert at_once([index.usage for index in indexes]) == [indexes[0].usage()] * 8


def test_connections_of_before_the_upgrade_are_counted(tmp_path: Path) -> None:
    """A process that still runs the older objkv goes on writing."""
    path = tmp_path / "index.sqlite"
    old_file(path)
    older = sqlite3.connect(path)
    index = SqliteIndex(path)
    assert usage(index) == {NAMESPACE: (300, 2)}
    with older:
        value = encode_shard(shard(11))
        older.execute(
            "INSERT INTO shards VALUES (?, ?, ?, ?)",
            (NAMESPACE, prefix_hash(1), OTHER_FIELD, value),
        )
    assert usage(index) == {NAMESPACE: (311, 3)}
    older.close()


def test_what_has_expired_is_not_counted_before_it_is_removed(tmp_path: Path) -> None:
    clock = ManualClock()
    index = SqliteIndex(tmp_path / "index.sqlite", clock=clock)
    index.publish(chunk(1), {FIELD: shard(10)}, ttl_s=5)
    index.publish(chunk(2), {FIELD: shard(3)}, ttl_s=50)
    clock.advance(10)
    assert usage(index) == {NAMESPACE: (3, 1)}
    index.lease("x", "me", ttl_ms=1)  # a write, which removes expired records
    assert usage(index) == {NAMESPACE: (3, 1)}
    clock.advance(100)
    assert usage(index) == {}
