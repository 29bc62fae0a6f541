"""What a walk that took long, or was continued much later, says of a fleet that went on."""

from pathlib import Path

import pytest

from objkv.index.memory import MemoryIndex
from objkv.ops.audit.audit import find_places
from objkv.ops.audit.html.page import html_report
from objkv.ops.audit.report import AuditReport, FindingCount
from objkv.ops.audit.spool import AuditSpool
from objkv.stores.memory import MemoryStore
from objkv.testing.clock import ManualClock
from tests.ops.audit_world import Auditor, save_prompts
from tests.ops.world import save

NOW_S = 20_000 * 86_400.0
GRACE_S = 600.0
HOUR_S = 3_600.0


def orphans(report: AuditReport) -> FindingCount:
    return next(one for one in report.findings.counts if one.kind == "orphan")


def walked(monkeypatch: pytest.MonkeyPatch, *, early: int, late: int) -> AuditReport:
    """The index is read; an hour later payloads are saved, the store is listed an hour after that.
    ``early`` payloads have lain there without a record before, ``late`` are saved meanwhile."""
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


def test_a_walk_that_is_continued_later_says_how_old_its_beginning_is(tmp_path: Path) -> None:
    clock, file = ManualClock(NOW_S), tmp_path / "audit.sqlite"
    bulk, index = MemoryStore(clock=clock), MemoryIndex()
    save_prompts(bulk, index, [(0,), (1,)])
    first = Auditor(bulk, index, spool=AuditSpool(file, clock=clock), clock=clock)
    first.records()
    first.payloads()
    first.spool.close()
    for entry in list(bulk.scan("")):
        bulk.delete(entry.key)
    clock.advance(5 * HOUR_S)
    report = Auditor(bulk, index, spool=AuditSpool(file, clock=clock), clock=clock).all()
    assert report.totals.payloads == 2
    assert report.begun_s == NOW_S
    assert "5 h ago" in report.problems[0]
    assert "--restart" in report.problems[0]
    assert_no_agreement(report)


def test_a_continued_walk_of_a_store_that_lost_its_payloads_does_not_say_that_all_is_well(
    tmp_path: Path,
) -> None:
    clock, file = ManualClock(NOW_S), tmp_path / "audit.sqlite"
    bulk, index = MemoryStore(clock=clock), MemoryIndex()
    save_prompts(bulk, index, [(0,), (1,)])
    first = Auditor(bulk, index, spool=AuditSpool(file, clock=clock), clock=clock)
    first.records()
    first.payloads()
    first.spool.close()
    for entry in list(bulk.scan("")):
        if entry.key.endswith(".safetensors"):
            bulk.delete(entry.key)
    report = Auditor(bulk, index, spool=AuditSpool(file, clock=clock), clock=clock).all()
    assert not any(one.count for one in report.findings.counts)
    page = assert_no_agreement(report)
    assert "Whether index and bulk store agree is not known" in page


def assert_no_agreement(report: AuditReport) -> str:
    """The page of ``report``, which does not say that both ends agree."""
    page = html_report(report)
    assert "Index and bulk store agree" not in page
    assert "index and store agree" not in page
    return page


def test_a_walk_that_was_not_stopped_says_nothing_of_its_age() -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    save_prompts(bulk, index, [(0,)])
    assert Auditor(bulk, index).all().problems == ()
