"""The spool of an audit: in little memory, and what is young in it."""

import tracemalloc

import pytest

from objkv.errors import ConfigError
from objkv.index.base import Record, ShardRecord
from objkv.keys.chunk import ChunkKey
from objkv.ops.audit.audit import find_places
from objkv.ops.audit.report import AuditReport, FindingCount
from objkv.ops.audit.spool import AuditSpool, SeenRecord, make_chunks
from objkv.ops.audit.tree import read_roots, read_tree
from objkv.stores.base import Entry
from tests.contracts.clock import ManualClock
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.audit import Auditor, save_prompts
from tests.support.samples import CHUNK, FIELD, NAMESPACE, save


def count(spool: AuditSpool) -> int:
    return int(spool.some("SELECT count(*) FROM payloads")[0][0])


def payload(number: int) -> tuple[ChunkKey, Entry]:
    key = ChunkKey(NAMESPACE, number.to_bytes(20, "big"), 0)
    return key, Entry(key.path(), 5_000, 0.0)


def test_what_is_seen_twice_counts_once() -> None:
    spool = AuditSpool()
    for _ in range(2):
        spool.add_payloads([payload(1)])
    assert count(spool) == 1


def test_a_full_disk_is_said_and_what_to_do() -> None:
    spool = AuditSpool()
    pages = spool.some("PRAGMA page_count")[0][0]
    spool.run(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(ConfigError, match=r"full; .* free some space"):
        spool.add_payloads(payload(number) for number in range(10_000))
    assert count(spool) == 0


@pytest.mark.slow
def test_pythons_memory_does_not_grow_with_the_store() -> None:
    """A setting limits SQLite's own memory."""

    def peak(chunks: int) -> int:
        spool = AuditSpool()
        tracemalloc.start()
        for start in range(0, chunks, 500):
            numbers = range(start, min(start + 500, chunks))
            spool.add_payloads(payload(number) for number in numbers)
            spool.add_records(SeenRecord(NAMESPACE, chain(number), True) for number in numbers)
        make_chunks(spool)
        read_roots(spool, {}, most=10, has_index=True)
        read_tree(spool)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        spool.close()
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
    monkeypatch.setattr("objkv.ops.audit.walk.LOOKED_TWICE_MAX", 2)
    clock = ManualClock(NOW_S)
    bulk, index = MemoryStore(clock=clock), MemoryIndex()
    save_prompts(bulk, index, [(0,)])
    for number in range(early):
        save(bulk, None, [100 + number] * 16)
    clock.advance(GRACE_S + HOUR_S)
    auditor = Auditor(bulk, index, clock=clock, grace_s=GRACE_S, ttl_s=86_400)
    auditor.records()
    clock.advance(HOUR_S)
    for number in range(late):
        save(bulk, index, [1_000 + number] * 16)
    clock.advance(HOUR_S)
    auditor.places = find_places(auditor.view)
    auditor.payloads()
    auditor.again()
    return auditor.report()


def test_what_was_saved_after_the_index_was_read_is_young_and_no_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = walked(monkeypatch, early=0, late=60)
    found = orphans(report)
    assert found.count == found.young > 20
    assert [told for told in report.problems if "lost" in told] == []


def test_what_had_no_record_before_the_walk_began_is_a_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = walked(monkeypatch, early=60, late=0)
    found = orphans(report)
    assert (found.count, found.young) == (60, 0)
    assert "most of the index was lost" in report.problems[0]
    assert report.problems[0].startswith("60 of 61 payloads")
