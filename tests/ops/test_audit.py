"""Audits of stores with known defects, and while replicas keep writing."""

import tomllib
from pathlib import Path

import pytest

from objkv.assembly.backends import Backends
from objkv.config.prices import LIST_PRICES, Prices
from objkv.index.base import Record
from objkv.keys.chunk import ChunkKey
from objkv.ops.audit.report import AuditReport
from objkv.ops.inventory.file import Inventory
from objkv.stores.base import Entry
from tests.contracts.clock import ManualClock
from tests.contracts.damage import IDENTITY as DAMAGED
from tests.contracts.damage import DamagedStore, Defects
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.audit import Auditor, hash_of, save_prompts
from tests.support.samples import LEFT, NAMESPACE, RIGHT, save, save_identity

DAY_S = 86_400
NOW_S = 20_000 * DAY_S + 3_600.0
"""An hour after midnight."""


def counts(report: AuditReport) -> dict[str, int]:
    return {one.kind: one.count for one in report.findings.counts if one.count}


def test_all_planted_defects_are_found_and_named() -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    defects = Defects(good=40, orphan=3, missing=4, old_epoch=5, unidentified=2, short=2, empty=1)
    planted = DamagedStore(Backends(bulk, None, index)).plant(defects)
    bulk.put("quarantine/x", b"taken out")
    bulk.put(f"{DAMAGED.namespace()}/ab/note.txt", b"what is this")
    report = Auditor(bulk, index).all()
    assert counts(report) == {
        "orphan": 3, "missing": 4, "old_epoch": 5, "unidentified": 2, "corrupt": 3,
        "quarantined": 1, "other": 1,
    }  # fmt: skip
    named = {(one.kind, one.key) for one in report.findings.first}
    for kind in ("orphan", "missing", "old_epoch", "unidentified"):
        assert {key for found, key in named if found == kind} == set(planted[kind])
    assert {key for kind, key in named if kind == "corrupt"} == {
        *planted["short"],
        *planted["empty"],
    }
    own = next(one for one in report.namespaces if one.namespace == DAMAGED.namespace())
    assert own.findings == {"missing": 4, "orphan": 3, "corrupt": 3, "other": 1}
    assert own.faults == 4 + 3 + 3
    assert report.totals.payloads == 40 + 3 + 5 + 2 + 3


def test_a_folder_that_is_its_own_index_is_reported_by_its_headers() -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    defects = Defects(good=16, header=1, short=1, empty=1, foreign=2)
    planted = DamagedStore(Backends(bulk, None, index)).plant(defects)
    with_index = Auditor(bulk, index).all()
    report = Auditor(bulk, MemoryIndex(), is_own_index=True).all()
    assert counts(report) == {"corrupt": 5}
    kinds = ("header", "short", "empty", "foreign")
    assert {one.key for one in report.findings.first} == {
        path for kind in kinds for path in planted[kind]
    }
    assert report.totals.hits is None
    assert report.totals.chunks == with_index.totals.chunks
    good = {root.first for root in with_index.roots if root.tree_chunks == 8}
    assert {root.first for root in report.roots if root.tree_chunks == 8} == good
    assert len(good) == 2


def test_a_payload_that_is_saved_while_the_audit_walks_is_neither_missing_nor_orphan() -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    save_prompts(bulk, index, [(0, 1)])
    before, after = Auditor(bulk, index), Auditor(bulk, index)
    before.payloads()
    after.records()
    save(bulk, index, [7] * 16)
    after.payloads()
    before.records()
    for auditor in (before, after):
        auditor.again()
        report = auditor.report()
        assert counts(report) == {}
        assert report.totals.chunks == 3
        assert report.totals.roots == 2


def test_the_other_payload_of_a_chunk_that_is_saved_meanwhile_is_not_missing() -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    save_identity(bulk)
    save(bulk, None, [7] * 16, shards=(LEFT,))
    auditor = Auditor(bulk, index)
    auditor.records()
    auditor.payloads()
    save(bulk, index, [7] * 16, shards=(LEFT, RIGHT))
    auditor.again()
    assert counts(auditor.report()) == {}


def test_a_namespace_that_is_new_while_namespaces_are_read_is_left_to_the_next_walk() -> None:
    index = MemoryIndex()

    class Joined(MemoryStore):
        def folders(self, folder: str) -> list[str]:
            found = super().folders(folder)
            if not found:
                save_prompts(self, index, [(0, 1)])
            return found

    assert counts(Auditor(Joined(), index).all()) == {}


@pytest.mark.parametrize("first", ["records", "payloads"])
def test_what_is_swept_while_the_audit_walks_is_not_found(first: str) -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    save_prompts(bulk, index, [(0, 1), (2,)])
    gone = ChunkKey(NAMESPACE, bytes.fromhex(hash_of((2,))), 0)
    auditor = Auditor(bulk, index)
    steps = {"records": auditor.records, "payloads": auditor.payloads}
    steps.pop(first)()
    index.drop(NAMESPACE, gone.prefix_hash)
    bulk.delete(gone.path())
    for step in steps.values():
        step()
    auditor.again()
    report = auditor.report()
    assert counts(report) == {}
    assert report.totals.chunks == 2


def test_orphans_are_young_before_the_grace_and_expired_when_no_record_lives_so_long() -> None:
    bulk, index = MemoryStore(clock=lambda: 1_000.0), MemoryIndex()
    save_prompts(bulk, None, [(0,)])
    for now_s, kind, young in (
        (1_050.0, "orphan", 1),
        (2_000.0, "orphan", 0),
        (4_600.0, "expired", 0),
    ):
        clock = ManualClock(now_s)
        report = Auditor(bulk, index, clock=clock, sweep_grace_s=100.0).all()
        [one] = [one for one in report.findings.counts if one.count]
        assert (one.kind, one.young) == (kind, young)


def test_an_index_that_knows_nothing_is_reported_as_lost() -> None:
    bulk = MemoryStore()
    save_prompts(bulk, None, [(0, 1)])
    report = Auditor(bulk, MemoryIndex()).all()
    assert "the index has no record of any payload" in report.problems[0]
    assert "objkv rebuild" in report.problems[0]


def test_a_bulk_store_that_has_nothing_of_what_the_index_knows_is_reported_as_wrong() -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    save_prompts(bulk, index, [(0, 1)])
    report = Auditor(MemoryStore(), index).all()
    assert "the bulk store has none of the payloads" in report.problems[0]
    assert counts(report) == {"missing": 2}
    [namespace] = report.namespaces
    assert namespace.problem == "the bulk store has no folder for it"


def test_costs_are_plain_arithmetic() -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    save_identity(bulk)
    auditor = Auditor(
        bulk, index, clock=lambda: NOW_S, prices=Prices(2.0, 10.0, 1.0), quota_bytes=1
    )
    gb = 10**9
    for number, age_days in enumerate((0, 1, 1, 3)):
        key = ChunkKey(NAMESPACE, bytes([number]) * 20, 0)
        entry = Entry(key.path(), gb, NOW_S - age_days * DAY_S)
        auditor.inventory.add_payloads(NAMESPACE, [(key, entry)])
        record = Record(key.prefix_hash, bytes(20), 0, 16, {}, hits=6 if number == 3 else 0)
        auditor.inventory.add_records(NAMESPACE, [record], has_hits=True)
    report = auditor.report()
    assert (report.cost.month, report.cost.unused) == (8.0, 6.0)
    assert [one.month for one in report.tenants] == [8.0]
    assert (report.totals.hits, report.totals.used_chunks) == (6, 1)
    assert any("exceeds its quota" in problem for problem in report.problems)


def test_the_list_prices_are_those_of_the_costs_that_the_simulation_uses() -> None:
    costs = tomllib.loads((Path(__file__).parents[2] / "benchmarks/fleet/costs.toml").read_text())
    s3 = costs["bulk"]["s3-standard"]
    assert LIST_PRICES.gb_month == s3["gb_month_usd"]
    assert LIST_PRICES.per_1000_puts == pytest.approx(1000 * s3["put_usd"])
    assert LIST_PRICES.per_1000_gets == pytest.approx(1000 * s3["get_usd"])


def test_numbers_that_no_record_can_have_do_no_harm() -> None:
    inventory = Inventory()
    record = Record(b"\1" * 20, bytes(20), 0, 1 << 90, {}, hits=1 << 90, touched_s=1 << 90)
    inventory.add_records(NAMESPACE, [record], has_hits=True)
    [(start, hits)] = inventory.some("SELECT start, hits FROM chunks")
    assert start is None
    assert hits == 1 << 32
    inventory.close()
