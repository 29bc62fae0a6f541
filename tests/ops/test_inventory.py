"""The inventory: joined once, in little memory, and what is young in it."""

import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from objkv.errors import ConfigError
from objkv.index.base import Record, ShardRecord
from objkv.keys.chunk import ChunkKey
from objkv.ops.audit.report import AuditReport
from objkv.ops.inventory.file import Inventory
from objkv.ops.inventory.findings import FindingCount
from objkv.ops.inventory.tree import BRANCHES_MAX, branches, largest_branches, make_tree
from objkv.ops.inventory.walk import find_scope
from objkv.stores.base import Entry
from tests.contracts.clock import ManualClock
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.audit import Auditor, save_prompts
from tests.support.samples import CHUNK, FIELD, NAMESPACE, save

WHERE = "nbytes > 0"


def payload(number: int) -> tuple[ChunkKey, Entry]:
    key = ChunkKey(NAMESPACE, number.to_bytes(20, "big"), 0)
    return key, Entry(key.path(), 5_000, 0.0)


def test_a_full_disk_is_said_and_what_to_do() -> None:
    inventory = Inventory()
    pages = inventory.some("PRAGMA page_count")[0][0]
    inventory.run(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(ConfigError, match=r"full; .* free some space"):
        inventory.add_payloads(NAMESPACE, [payload(number) for number in range(10_000)])
    assert inventory.some("SELECT count(*) FROM payloads") == [(0,)]


@pytest.mark.slow
def test_pythons_memory_does_not_grow_with_the_store() -> None:
    """A setting limits SQLite's own memory."""

    def peak(chunks: int) -> int:
        inventory = Inventory()
        tracemalloc.start()
        for start in range(0, chunks, 500):
            numbers = range(start, min(start + 500, chunks))
            inventory.add_payloads(NAMESPACE, [payload(number) for number in numbers])
            records = [chain(number) for number in numbers]
            inventory.add_records(NAMESPACE, records, has_hits=True)
        make_tree(inventory, "nbytes")
        assert len(largest_branches(inventory)) <= BRANCHES_MAX
        assert sum(1 for _ in branches(inventory, NAMESPACE)) == -(-chunks // 50)
        assert (
            sum(
                len(items)
                for part in inventory.slices(WHERE)
                for items in inventory.items(part, WHERE)
            )
            == chunks
        )
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        inventory.close()
        return found

    peak(500)  # warms caches that stay allocated
    few, many = peak(1_500), peak(6_000)
    assert many < 1.5 * few


def chain(number: int) -> Record:
    """Return a record of a chain of 50 chunks."""
    place = number % 50
    shard = ShardRecord(5_000, 4_000, True, False, "", 0)
    start = place * CHUNK
    own, parent = (n.to_bytes(20, "big") for n in (number, max(0, number - 1)))
    return Record(own, parent, start, start + CHUNK, {FIELD: shard})


NOW_S = 20_000 * 86_400.0
GRACE_S = 600.0
HOUR_S = 3_600.0


def orphans(report: AuditReport) -> FindingCount:
    return next(one for one in report.findings.counts if one.kind == "orphan")


def walked(monkeypatch: pytest.MonkeyPatch, *, early: int, late: int) -> AuditReport:
    """Read the index, save payloads an hour later, and list the store an hour after that.

    ``early`` payloads had no record before the audit; ``late`` payloads are saved meanwhile.
    """
    monkeypatch.setattr("objkv.ops.inventory.walk.LOOKED_TWICE_MAX", 2)
    clock = ManualClock(NOW_S)
    bulk, index = MemoryStore(clock=clock), MemoryIndex()
    save_prompts(bulk, index, [(0,)])
    for number in range(early):
        save(bulk, None, [100 + number] * 16)
    clock.advance(GRACE_S + HOUR_S)
    auditor = Auditor(bulk, index, clock=clock, sweep_grace_s=GRACE_S, ttl_s=86_400)
    auditor.records()
    clock.advance(HOUR_S)
    for number in range(late):
        save(bulk, index, [1_000 + number] * 16)
    clock.advance(HOUR_S)
    auditor.walk.scope = find_scope(auditor.walk.view)
    auditor.payloads()
    auditor.again()
    return auditor.report()


def test_only_what_had_no_record_before_the_walk_began_is_a_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = walked(monkeypatch, early=0, late=60)
    found = orphans(report)
    assert found.count == found.young > 20
    assert [told for told in report.problems if "wiped" in told] == []
    report = walked(monkeypatch, early=60, late=0)
    found = orphans(report)
    assert (found.count, found.young) == (60, 0)
    assert "it looks wiped" in report.problems[0]
    assert "(60 of 61)" in report.problems[0]


def test_every_payload_is_in_one_slice_and_comes_once() -> None:
    inventory = Inventory()
    keys = [
        ChunkKey(NAMESPACE, bytes([fan]) + number.to_bytes(19, "big"), group)
        for fan in (0, 7, 255)
        for number in (0, 1, (1 << 152) - 1, *range(2, 600))
        for group in (0, 1)
    ]
    for _ in range(2):  # what is seen twice counts once
        inventory.add_payloads(NAMESPACE, [(key, Entry(key.path(), 5_000, 1.5)) for key in keys])
    parts = inventory.slices(WHERE)
    assert [(part.fan, part.number) for part in parts] == [
        (bytes([fan]), len(keys) // 3) for fan in (0, 7, 255)
    ]
    found = [one for part in parts for items in inventory.items(part, WHERE) for one in items]
    assert [one.key for one in found] == sorted(keys, key=lambda key: (key.prefix_hash, key.group))
    assert {one.entry for one in found} == {Entry(key.path(), 5_000, 1.5) for key in keys}


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_no_file_is_left_however_the_process_ends(tmp_path: Path, ending: signal.Signals) -> None:
    program = (
        "import sys, time\n"
        "from objkv.ops.inventory.file import Inventory\n"
        "inventory = Inventory()\n"
        "inventory.run('CREATE TABLE filled (x BLOB)')\n"
        "for _ in range(40): inventory.run('INSERT INTO filled VALUES (zeroblob(1000000))')\n"
        "print('filled', flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path), "SQLITE_TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"filled\n"
        opened = [os.readlink(one) for one in Path(f"/proc/{process.pid}/fd").iterdir()]
        assert any(one.startswith(str(tmp_path)) for one in opened), "it fills a file there"
        process.send_signal(ending)
        process.wait(120)
    assert list(tmp_path.iterdir()) == []
