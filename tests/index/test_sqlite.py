"""The index in an SQLite file that processes and users share: whose it is, what is planted in it,
and forks."""

import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from objkv.errors import StoreDenied, StoreError, StoreUnavailable
from objkv.index.base import PruneIndex
from objkv.index.sqlite import index as sqlite_file
from objkv.index.sqlite.index import SqliteFile, SqliteIndex, translated
from objkv.net.deadline import EndsBy
from tests.contracts.clock import ManualClock
from tests.contracts.index_contract import (
    FIELD,
    LONG_S,
    NAMESPACE,
    OTHER_FIELD,
    IndexContract,
    chunk,
    get,
    prefix_hash,
    shard,
    usage,
)

PUBLISH = """
import sys
from pathlib import Path
from objkv.index.sqlite.index import SqliteIndex
from tests.contracts.index_contract import (FIELD, OTHER_FIELD, chunk, shard)
path, first, count = sys.argv[1:]
index = SqliteIndex(Path(path), busy_ms=240_000)
for number in range(int(first), int(first) + int(count)):
    index.publish(chunk(number), {FIELD: shard(), OTHER_FIELD: shard()}, ttl_s=1000)
    if number == 50:
        print("publishing", flush=True)
"""


class TestSqliteIndex(IndexContract):
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
        subprocess.Popen([sys.executable, "-c", PUBLISH, str(path), str(first), "50"])
        for first in (100, 200, 300)
    ]
    assert [writer.wait(250) for writer in writers] == [0, 0, 0]
    assert len(list(SqliteIndex(path).scan(NAMESPACE))) == 150


def test_a_killed_writer_leaves_a_usable_index_of_whole_records(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    command = [sys.executable, "-c", PUBLISH, str(path), "1", "1000000"]
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


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    twice = [("a",), ("a",)]
    with pytest.raises(StoreError), SqliteFile(path, busy_ms=1_000).write() as connection:
        connection.executemany("INSERT INTO leases VALUES (?, 'me', 9e12)", twice)
    assert SqliteIndex(path).lease("a", "another", ttl_ms=1_000)


def test_a_forked_child_uses_connections_of_its_own(tmp_path: Path) -> None:
    index = SqliteIndex(tmp_path / "index.sqlite")
    index.publish(chunk(1), {FIELD: shard()}, ttl_s=LONG_S)
    with index._file.read() as before:
        pass
    child = os.fork()
    if child == 0:
        try:
            with index._file.read() as own:
                assert own is not before
            found = get(index, 1) is not None
            index.publish(chunk(2), {FIELD: shard()}, ttl_s=LONG_S)
            index.close()
            os._exit(0 if found else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    index.publish(chunk(3), {FIELD: shard()}, ttl_s=LONG_S)
    assert len(list(index.scan(NAMESPACE))) == 3


def test_a_lookup_takes_few_statements_for_any_number_of_hashes(tmp_path: Path) -> None:
    index = SqliteIndex(tmp_path / "index.sqlite")
    index.publish(chunk(40_000), {FIELD: shard()}, ttl_s=LONG_S)
    statements: list[str] = []
    index._file._idle[0].set_trace_callback(statements.append)
    found = index.lookup(NAMESPACE, [prefix_hash(n) for n in range(40_001)])
    assert len(statements) == 2
    assert found[40_000] is not None
    assert not any(found[:40_000])


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


def of_schema(version: int) -> tuple[Callable[[Path], object], str]:
    def make(path: Path) -> None:
        with closing(SqliteIndex(path)) as index:  # or its last write reaches the file later
            index.check()
        plant(path, f"PRAGMA user_version = {version}")

    return make, rf"another objkv \(schema {version}, supported: 5\): delete it"


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "an older objkv's": of_schema(2),
    "a newer objkv's": of_schema(99),
    "somebody else's": (lambda path: plant(path, "CREATE TABLE theirs (x)"), "of another program"),
    "damaged": (lambda path: path.write_bytes(b"no database" * 1000), "delete it and its -wal and"),
}


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
def test_the_database_of_others_is_refused_with_what_to_do_and_not_changed(
    tmp_path: Path, make: Callable[[Path], object], words: str
) -> None:
    path = tmp_path / "index.sqlite"
    make(path)
    before = path.read_bytes()
    for call in (SqliteIndex.check, get):
        with pytest.raises(StoreDenied, match=words):
            call(SqliteIndex(path))
    assert path.read_bytes() == before


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


@pytest.mark.parametrize(
    ("pragma", "error", "words"),
    [
        ("max_page_count = 2", StoreUnavailable, "the disk is full, free some space"),
        ("query_only = ON", StoreDenied, "needs write permission"),
    ],
)
def test_a_disk_that_is_full_or_read_only_is_reported_with_what_to_do(
    tmp_path: Path, pragma: str, error: type[StoreError], words: str
) -> None:
    connection = sqlite3.connect(tmp_path / "some.sqlite")
    connection.execute("CREATE TABLE t (x)")
    connection.execute(f"PRAGMA {pragma}")
    with pytest.raises(error, match=words), translated(tmp_path):
        connection.execute("INSERT INTO t VALUES (zeroblob(100000))")


def test_making_an_index_touches_nothing(tmp_path: Path) -> None:
    index = SqliteIndex(tmp_path / "deeper" / "index.sqlite")
    index.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_was_removed_or_replaced_is_not_used_on(tmp_path: Path) -> None:
    """Otherwise its connections would continue with a file that has no name and no other users."""
    path = tmp_path / "index.sqlite"
    mine, others = SqliteIndex(path), SqliteIndex(path)
    mine.publish(chunk(1), {FIELD: shard(1)}, ttl_s=60)
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    assert get(mine, 1) is None
    mine.publish(chunk(2), {FIELD: shard(2)}, ttl_s=60)
    assert get(others, 2) is not None
    others.close()
    replacement = SqliteIndex(tmp_path / "replacement.sqlite")
    replacement.publish(chunk(3), {FIELD: shard(3)}, ttl_s=60)
    replacement.close()
    for suffix in ("-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    (tmp_path / "replacement.sqlite").rename(path)
    assert get(mine, 3) is not None
    mine.close()


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in sorted(folder.iterdir())}


def used(path: Path) -> SqliteIndex:
    index = SqliteIndex(path)
    index.publish(chunk(), {FIELD: shard()}, ttl_s=60)
    assert get(index) is not None
    return index


@pytest.fixture(autouse=True)
def no_umask() -> Iterator[None]:
    old = os.umask(0)
    yield
    os.umask(old)


def test_the_file_and_its_folder_are_for_this_user_alone(tmp_path: Path) -> None:
    used(tmp_path / "objkv" / "index.sqlite")
    assert modes(tmp_path) == {"objkv": 0o700}
    assert modes(tmp_path / "objkv") == {
        "index.sqlite": 0o600,
        "index.sqlite-shm": 0o600,
        "index.sqlite-wal": 0o600,
    }


@pytest.mark.parametrize(("folder", "file"), [(0o2770, 0o660), (0o1777, 0o600)])
def test_a_folder_of_a_group_makes_it_the_groups_and_no_other_folder_does(
    tmp_path: Path, folder: int, file: int
) -> None:
    os.umask(0o077)
    tmp_path.chmod(folder)
    used(tmp_path / "index.sqlite")
    assert set(modes(tmp_path).values()) == {file}


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-journal"])
@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_somebody_else_planted_is_refused(
    tmp_path: Path, kind: str, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shared").mkdir(0o1777)
    place = tmp_path / "shared" / f"index.sqlite{suffix}"
    if kind == "file":
        place.write_bytes(b"")
    else:
        place.symlink_to(tmp_path / "theirs")
    (tmp_path / "theirs").write_bytes(b"theirs")
    if os.getuid() == 0:
        os.lchown(place, 1234, 1234)
    else:
        monkeypatch.setattr(sqlite_file.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StoreDenied, match="belongs to another user"):
        used(tmp_path / "shared" / "index.sqlite")
    assert (tmp_path / "theirs").read_bytes() == b"theirs"


def test_a_link_of_the_operators_is_followed(tmp_path: Path) -> None:
    (tmp_path / "fast").mkdir()
    (tmp_path / "index.sqlite").symlink_to(tmp_path / "fast" / "index.sqlite")
    used(tmp_path / "index.sqlite")
    assert "index.sqlite" in modes(tmp_path / "fast")


@pytest.mark.parametrize("kind", ["pipe", "folder", "loop", "file as its folder"])
def test_what_is_no_file_is_refused_and_nobody_waits(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "index.sqlite"
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    elif kind.startswith("file"):
        place.touch()
        place /= "index.sqlite"
    else:
        place.symlink_to(place)
    with pytest.raises(StoreDenied):
        used(place)


def test_a_row_of_any_length_is_an_error_and_no_memory(tmp_path: Path) -> None:
    used(tmp_path / "index.sqlite").close()
    connection = sqlite3.connect(tmp_path / "index.sqlite")
    connection.execute("UPDATE shards SET value = zeroblob(20000000)")
    connection.commit()
    connection.close()
    with pytest.raises(StoreError):
        get(SqliteIndex(tmp_path / "index.sqlite"))


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
    "replaced": ("DROP TRIGGER shards_added", TRIGGER.replace("planted", "shards_added")),
    "in a file that claims to be new": (TRIGGER, "PRAGMA user_version = 0"),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    used(tmp_path / "index.sqlite").close()
    return tmp_path / "index.sqlite"


def plant(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


@pytest.mark.parametrize("what", PLANTED)
def test_what_objkv_did_not_make_is_refused_with_what_to_do(path: Path, what: str) -> None:
    plant(path, *PLANTED[what])
    with pytest.raises(StoreDenied, match=r"(not created by objkv|\(schema 0,).*delete it"):
        SqliteIndex(path).lookup(NAMESPACE, [prefix_hash(1)])


def publish(index: SqliteIndex) -> None:
    index.publish(chunk(2), {FIELD: shard()}, ttl_s=LONG_S)


@pytest.mark.parametrize(("what", "call"), [("trigger", publish), ("view", get)])
def test_what_is_planted_while_the_file_is_open_is_interrupted_and_then_refused(
    path: Path, what: str, call: Callable[[SqliteIndex], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the time of a call, or of its caller."""
    index, opened = SqliteIndex(path), SqliteIndex(path)
    assert get(index) == get(opened)
    plant(path, *PLANTED[what])
    with EndsBy(0.0), pytest.raises(StoreUnavailable, match="time"):
        call(index)
    index = opened
    monkeypatch.setattr(sqlite_file, "_CALL_S_MAX", 0.0)
    with pytest.raises(StoreUnavailable, match="time"):
        call(index)
    with pytest.raises(StoreDenied, match="not created by objkv"):
        call(index)


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


RECORDS = 600
STEPS = 100
"""Between two counts."""


def test_what_a_scan_computes_for_a_record_does_not_depend_on_how_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = SqliteIndex(tmp_path / "index.sqlite")
    for number in range(RECORDS):
        entry = replace(chunk(1), prefix_hash=number.to_bytes(20, "big"))
        index.publish(entry, {FIELD: shard(), OTHER_FIELD: shard()}, ttl_s=1000)
    counted = 0

    def count() -> int:
        nonlocal counted
        counted += STEPS
        return 0

    def bound(connection: sqlite3.Connection, seconds: float) -> None:
        connection.set_progress_handler(count, STEPS)

    monkeypatch.setattr(sqlite_file, "_bound", bound)
    assert len(list(index.scan(NAMESPACE))) == RECORDS
    assert 0 < counted < 200 * RECORDS
