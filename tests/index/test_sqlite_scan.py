"""How much SQLite computes for a scan: counted in steps of its machine, not in time."""

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from objkv.index.sqlite import file as sqlite_file
from objkv.index.sqlite.index import SqliteIndex
from tests.contracts.index_contract import FIELD, NAMESPACE, OTHER_FIELD, chunk, shard

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
