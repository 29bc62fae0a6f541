import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from objkv.errors import StoreDenied, StoreUnavailable
from objkv.index.base import PruneIndex
from objkv.index.sqlite.file import translated
from objkv.index.sqlite.index import SqliteIndex
from tests.contracts.clock import ManualClock
from tests.contracts.index_contract import (
    FIELD,
    LONG_S,
    NAMESPACE,
    OTHER_FIELD,
    IndexContract,
    at_once,
    chunk,
    get,
    prefix_hash,
    shard,
)

PUBLISH_FOREVER = """
import sys
from pathlib import Path
from objkv.index.sqlite.index import SqliteIndex
from tests.contracts.index_contract import (FIELD, OTHER_FIELD, chunk, shard)
index = SqliteIndex(Path(sys.argv[1]))
for number in range(1, 1_000_000):
    index.publish(chunk(number), {FIELD: shard(), OTHER_FIELD: shard()}, ttl_s=1000)
    if number == 50:
        print("publishing", flush=True)
"""
PUBLISH_SOME = """
import sys
from pathlib import Path
from objkv.index.sqlite.index import SqliteIndex
from tests.contracts.index_contract import (FIELD, chunk, shard)
index = SqliteIndex(Path(sys.argv[1]), busy_ms=240_000)
for number in range(int(sys.argv[2]), int(sys.argv[2]) + 50):
    index.publish(chunk(number), {FIELD: shard()}, ttl_s=1000)
"""


class TestSqliteIndex(IndexContract):
    carries_requests = False

    @pytest.fixture
    def index(self, tmp_path: Path, clock: ManualClock) -> PruneIndex:
        return SqliteIndex(tmp_path / "deeper" / "index.sqlite", clock=clock, busy_ms=240_000)

    def put_garbage(self, index: PruneIndex, number: int) -> None:
        assert isinstance(index, SqliteIndex)
        index.publish(chunk(number), {FIELD: shard()}, ttl_s=LONG_S)
        with index._file.write() as connection:
            connection.execute(
                "UPDATE shards SET value = ? WHERE hash = ?", ("[]", prefix_hash(number))
            )


def test_processes_share_one_file_from_the_first_moment_on(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    writers = [
        subprocess.Popen([sys.executable, "-c", PUBLISH_SOME, str(path), str(first)])
        for first in (100, 200, 300)
    ]
    assert [writer.wait(250) for writer in writers] == [0, 0, 0]
    assert len(list(SqliteIndex(path).scan(NAMESPACE))) == 150


def test_a_killed_writer_leaves_a_usable_index_of_whole_records(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    command = [sys.executable, "-c", PUBLISH_FOREVER, str(path)]
    for _ in range(3):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"publishing\n"
            writer.kill()
        index = SqliteIndex(path)
        records = list(index.scan(NAMESPACE))
        assert len(records) >= 50
        assert all(set(record.shards) == {FIELD, OTHER_FIELD} for record in records)
        index.publish(chunk(1), {FIELD: shard(2)}, ttl_s=LONG_S)
        index.close()


def test_a_forked_child_uses_connections_of_its_own(tmp_path: Path) -> None:
    index = SqliteIndex(tmp_path / "index.sqlite")
    index.publish(chunk(1), {FIELD: shard()}, ttl_s=LONG_S)
    child = os.fork()
    if child == 0:
        try:
            found = get(index, 1) is not None
            index.publish(chunk(2), {FIELD: shard()}, ttl_s=LONG_S)
            index.close()
            os._exit(0 if found else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    index.publish(chunk(3), {FIELD: shard()}, ttl_s=LONG_S)
    assert len(list(index.scan(NAMESPACE))) == 3


def test_threads_keep_no_more_connections_than_were_in_use_at_once(tmp_path: Path) -> None:
    index = SqliteIndex(tmp_path / "index.sqlite", busy_ms=240_000)
    index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
    for _ in range(3):
        at_once([lambda: get(index)] * 4)
    assert 1 <= len(index._file._idle) <= 4


def test_a_prompt_longer_than_one_statement_can_hold_is_looked_up(tmp_path: Path) -> None:
    index = SqliteIndex(tmp_path / "index.sqlite")
    index.publish(chunk(40_000), {FIELD: shard()}, ttl_s=LONG_S)
    found = index.lookup(NAMESPACE, [prefix_hash(n) for n in range(40_001)])
    assert found[40_000] is not None
    assert not any(found[:40_000])


def test_a_lookup_of_a_thousand_hashes_is_one_statement(tmp_path: Path) -> None:
    index = SqliteIndex(tmp_path / "index.sqlite")
    index.check()
    statements: list[str] = []
    index._file._idle[0].set_trace_callback(statements.append)
    index.lookup(NAMESPACE, [prefix_hash(n) for n in range(1000)])
    assert len(statements) == 1


def test_expired_records_and_leases_are_removed_by_later_writes(tmp_path: Path) -> None:
    clock = ManualClock()
    index = SqliteIndex(tmp_path / "index.sqlite", clock=clock)
    for number in range(1, 11):
        index.publish(chunk(number), {FIELD: shard(), OTHER_FIELD: shard()}, ttl_s=1)
        index.lease(str(number), "me", ttl_ms=1000)
    clock.advance(1)
    index.publish(chunk(99), {FIELD: shard()}, ttl_s=1)
    with index._file.read() as connection:
        counts = [
            connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in ("chunks", "shards", "leases")
        ]
    assert counts == [1, 1, 0]


def test_the_file_of_a_newer_objkv_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    SqliteIndex(path).check()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreDenied, match=r"newer objkv \(schema 99, supported: 2\): upgrade"):
        SqliteIndex(path).check()


def test_somebody_elses_database_is_refused_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    with pytest.raises(StoreDenied, match="of another program"):
        SqliteIndex(path).check()
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT name FROM sqlite_schema").fetchall() == [("theirs",)]


def test_a_damaged_file_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(StoreDenied, match="delete it and its -wal and -shm files; no KV is lost"):
        SqliteIndex(path).lookup(NAMESPACE, [prefix_hash(1)])


def test_a_locked_file_is_unavailable_for_now(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    index = SqliteIndex(path, busy_ms=1)
    index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="busy"):
        index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
    assert get(index) is not None, "readers do not wait for a writer"
    other.rollback()
    index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)


def test_a_full_disk_is_unavailable_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "full.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA max_page_count = 2")
    connection.execute("CREATE TABLE t (x)")
    with (
        pytest.raises(StoreUnavailable, match="the disk is full, free some space"),
        translated(path),
    ):
        connection.execute("INSERT INTO t VALUES (zeroblob(100000))")


def test_a_read_only_file_is_denied_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE t (x)")
    connection.execute("PRAGMA query_only = ON")
    with pytest.raises(StoreDenied, match="needs write permission"), translated(path):
        connection.execute("INSERT INTO t VALUES (1)")


def test_a_folder_that_cannot_be_made_is_denied(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreDenied, match=r"Not a directory|File exists"):
        SqliteIndex(tmp_path / "file" / "index.sqlite").check()


def test_making_an_index_touches_nothing(tmp_path: Path) -> None:
    index = SqliteIndex(tmp_path / "deeper" / "index.sqlite")
    index.close()
    assert list(tmp_path.iterdir()) == []
    assert repr(index) == f"<SqliteIndex {tmp_path}/deeper/index.sqlite>"


def test_a_file_that_was_removed_or_replaced_is_not_used_on(tmp_path: Path) -> None:
    """Otherwise its connections would continue with a file that has no name and no other users."""
    path = tmp_path / "index.sqlite"
    mine, others = SqliteIndex(path), SqliteIndex(path)
    mine.publish(chunk(1), {FIELD: shard(1)}, ttl_s=60)
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    assert mine.lookup(chunk(1).namespace, [chunk(1).prefix_hash]) == [None]
    mine.publish(chunk(2), {FIELD: shard(2)}, ttl_s=60)
    assert others.lookup(chunk(2).namespace, [chunk(2).prefix_hash]) != [None]
    mine.close()
    others.close()
