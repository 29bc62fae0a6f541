"""An index file is shared with others, who may plant in it what their neighbours would run."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from objkv.errors import StoreDenied, StoreUnavailable
from objkv.index.sqlite import file as sqlite_file
from objkv.index.sqlite.index import SqliteIndex
from objkv.net.deadline import EndsBy
from tests.contracts.index_contract import FIELD, LONG_S, NAMESPACE, chunk, get, prefix_hash, shard
from tests.index.test_sqlite_upgrade import old_file

ENDLESS = "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r)"
TRIGGER = (
    "CREATE TRIGGER planted BEFORE INSERT ON shards BEGIN "
    f"SELECT count(*) FROM ({ENDLESS} SELECT x FROM r); END"
)
VIEW = (
    "ALTER TABLE shards RENAME TO kept",
    f"CREATE VIEW shards AS {ENDLESS} SELECT namespace, hash, 'f' || x AS field, x'00' AS value "
    "FROM r, chunks",
)
PLANTED: dict[str, tuple[str, ...]] = {
    "trigger": (TRIGGER,),
    "view": VIEW,
    "table": ("CREATE TABLE planted (x)",),
    "index": ("CREATE INDEX planted ON chunks (hits)",),
    "column": ("ALTER TABLE leases ADD COLUMN planted",),
    "gone": ("DROP TRIGGER shards_added",),
    "replaced": (
        "DROP TRIGGER shards_added",
        TRIGGER.replace("planted", "shards_added"),
    ),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "index.sqlite"
    index = SqliteIndex(path)
    index.publish(chunk(1), {FIELD: shard()}, ttl_s=LONG_S)
    index.close()
    return path


def plant(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


@pytest.mark.parametrize("what", PLANTED)
def test_what_objkv_did_not_make_is_refused_with_what_to_do(path: Path, what: str) -> None:
    plant(path, *PLANTED[what])
    with pytest.raises(StoreDenied, match=r"not created by objkv.*delete it"):
        SqliteIndex(path).lookup(NAMESPACE, [prefix_hash(1)])


def test_so_it_is_in_a_file_of_the_first_version(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    old_file(path)
    plant(path, TRIGGER)
    with pytest.raises(StoreDenied, match="not created by objkv"):
        SqliteIndex(path).lookup(NAMESPACE, [prefix_hash(1)])
    plant(path, "DROP TRIGGER planted")
    assert get(SqliteIndex(path), 1) is not None


def test_a_file_that_claims_to_be_new_is_looked_at_as_well(path: Path) -> None:
    plant(path, TRIGGER, "PRAGMA user_version = 0")
    with pytest.raises(StoreDenied):
        SqliteIndex(path).lookup(NAMESPACE, [prefix_hash(1)])


def publish(index: SqliteIndex) -> None:
    index.publish(chunk(2), {FIELD: shard()}, ttl_s=LONG_S)


def look_up(index: SqliteIndex) -> None:
    index.lookup(NAMESPACE, [prefix_hash(1)])


@pytest.mark.parametrize(("what", "call"), [("trigger", publish), ("view", look_up)])
def test_what_is_planted_while_the_file_is_open_is_interrupted_and_then_refused(
    path: Path,
    what: str,
    call: Callable[[SqliteIndex], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = SqliteIndex(path)
    look_up(index)
    plant(path, *PLANTED[what])
    monkeypatch.setattr(sqlite_file, "_CALL_S_MAX", 0.0)
    with pytest.raises(StoreUnavailable, match="time"):
        call(index)
    with pytest.raises(StoreDenied, match="not created by objkv"):
        call(index)


def test_the_callers_own_time_counts_as_well(path: Path) -> None:
    index = SqliteIndex(path)
    look_up(index)
    plant(path, TRIGGER)
    with EndsBy(0.0), pytest.raises(StoreUnavailable, match="time"):
        publish(index)
