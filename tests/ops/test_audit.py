"""Audits of stores with known defects, and while replicas keep writing; a payload is one finding.
Savings, pins and lifecycle rules."""

import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from objkv.assembly.backends import Backends
from objkv.cache.bulk_index import ListedIndex
from objkv.cache.pins import Pin
from objkv.config.prices import LIST_PRICES, Prices
from objkv.errors import SCAN_DENIED, StoreDenied
from objkv.index.base import Record, Savings
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import identity_path
from objkv.net.guard import CallPolicy
from objkv.ops.audit.html.page import html_report
from objkv.ops.audit.report import AuditReport, verdict
from objkv.ops.doctor.servers import check_lifecycle, judge_rules
from objkv.ops.inventory.file import Inventory
from objkv.ops.inventory.findings import FAULTS
from objkv.stores.base import Entry, LifecycleRules, Unfinished
from tests.contracts.clock import ManualClock
from tests.contracts.damage import IDENTITY as DAMAGED
from tests.contracts.damage import DamagedStore, Defects
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.audit import Auditor, hash_of, save_prompts, stored, tokens_of
from tests.support.samples import IDENTITY, LEFT, NAMESPACE, RIGHT, save, save_identity

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
    bulk, index = stored([(0, 1)])
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
    bulk, index = stored([(0, 1), (2,)])
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


def test_a_bulk_store_that_has_nothing_of_what_the_index_knows_is_reported_as_wrong() -> None:
    _, index = stored([(0, 1)])
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
    assert any("reaches 95 %" in problem for problem in report.problems)


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
    [(start, hits)] = inventory.run("SELECT start, hits FROM chunks")
    assert start is None
    assert hits == 1 << 32
    inventory.close()


def test_an_old_epoch_is_one_also_where_it_alone_is_audited() -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    save_prompts(bulk, None, [(1,)])
    save_identity(bulk, replace(IDENTITY, weights_epoch=1))
    report = Auditor(bulk, index, only=NAMESPACE).all()
    assert counts(Auditor(bulk, index).all()) == counts(report) == {"old_epoch": 1}
    assert [one.namespace for one in report.namespaces] == [NAMESPACE]


@pytest.mark.parametrize("namespace", ["current", "old epoch", "unidentified"])
@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_short_payload_has_the_one_word_whose_remedy_removes_it(
    namespace: str, is_recorded: bool
) -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    [key] = save(bulk, index if is_recorded else None, tokens_of((9,)))
    save_identity(bulk)
    bulk.put(key.path(), b"x" * 100)
    if namespace == "old epoch":
        save_identity(bulk, replace(IDENTITY, weights_epoch=1))
    elif namespace == "unidentified":
        bulk.delete(identity_path(NAMESPACE))
    kind = {"old epoch": "old_epoch", "unidentified": "unidentified"}.get(
        namespace, "corrupt" if is_recorded else "orphan"
    )
    report = Auditor(bulk, index).all()
    assert counts(report) == {kind: 1}
    [own] = [one for one in report.namespaces if one.namespace == NAMESPACE]
    assert (own.findings, own.faults) == ({kind: 1}, int(kind != "old_epoch"))


def test_another_length_than_recorded_is_corrupt() -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    [key] = save(bulk, index, tokens_of((9,)))
    save_identity(bulk)
    bulk.put(key.path(), bytes(9_000))
    assert counts(Auditor(bulk, index).all()) == {"corrupt": 1}


def test_an_audit_of_one_namespace_tells_nothing_of_what_others_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bulk, index = stored([(1,)])
    own, other = f"{NAMESPACE}/ab/x", f"{'5' * 32}/ab/x"
    for key in (own, other):
        bulk.put(f"quarantine/{key}", b"taken out")
    killed = [Unfinished(key, "1", 7, 0.0) for key in (own, other, f"quarantine/{other}")]
    monkeypatch.setattr(bulk, "unfinished", lambda: killed)
    named = [one.key for one in Auditor(bulk, index, only=NAMESPACE).all().findings.first]
    assert sorted(named) == [f"{own} (1)", f"quarantine/{own}"]
    assert counts(Auditor(bulk, index).all()) == {"temporary": 3, "quarantined": 2}


PLANTED = (
    Defects(good=8),
    *(Defects(good=8, **{kind: 2}) for kind in ("orphan", "missing", "unidentified", "old_epoch")),
    Defects(good=8, short=2),
    Defects(good=20, orphan=3, missing=4, old_epoch=5, unidentified=2, short=2),
)


@pytest.mark.parametrize("defects", PLANTED)
@pytest.mark.parametrize("grace_s", [0, 1_000])
def test_verdict_cards_and_tables_have_the_same_numbers(defects: Defects, grace_s: float) -> None:
    """Of each kind of fault. Expired payloads and young orphans are none."""
    clock = ManualClock(1_000.0)
    bulk, index = MemoryStore(clock=clock), MemoryIndex()
    DamagedStore(Backends(bulk, None, index), seed=1).plant(Defects(good=8, orphan=6))
    clock.advance(10_000)
    DamagedStore(Backends(bulk, None, index)).plant(defects)
    report = Auditor(bulk, index, clock=clock, sweep_grace_s=grace_s).all()
    found = counts(report)
    assert found["expired"] == 6
    kinds = [kind for kind in FAULTS if kind != "orphan" or not grace_s]
    faults = sum(found.get(kind, 0) for kind in kinds)
    assert sum(one.faults for one in report.findings.counts) == faults
    assert sum(one.faults for one in report.namespaces) == faults
    assert (verdict(report) == "fine") == (faults == 0)
    page = html_report(report)
    [card] = re.findall(r'<h3>Faults</h3><p class="big">(\d+)</p>', page)
    [table] = re.findall(r'<table id="namespaces-table".*?</table>', page, re.S)
    assert sum(int(n) for n in re.findall(r">(\d+)</td>\s*</tr>", table)) == int(card) == faults
    for kind, number in found.items():
        assert re.search(rf'<p class="big">{number}</p><h3>{kind}</h3>', page)


OTHER = "f" * 32


def saved(index: MemoryIndex) -> MemoryIndex:
    index.credit(Savings(NAMESPACE, "2026-10", 2, 1_000, 1_000, 7_300_000_000, 100_000_000))
    index.credit(Savings(NAMESPACE, "2026-11", 1, 500))
    index.credit(Savings(OTHER, "2026-11", 1, 250))
    return index


def test_what_loads_saved_is_measured_and_priced_only_at_a_price() -> None:
    report = Auditor(MemoryStore(), saved(MemoryIndex())).all()
    savings = report.savings
    assert (savings.first_month, savings.loads, savings.tokens) == ("2026-10", 4, 1_750)
    assert (savings.timed_tokens, savings.compute_gpu_s, savings.gpu_s) == (1_000, 7_300, 7_200)
    assert savings.usd is None
    prices = replace(LIST_PRICES, gpu_hour=2.5)
    assert Auditor(MemoryStore(), saved(MemoryIndex()), prices=prices).all().savings.usd == 5.0


def pin(prompt: tuple[int, ...], until_s: int, by: str | None) -> Pin:
    return Pin(NAMESPACE, (bytes.fromhex(hash_of(prompt)),), 16, until_s, 900, by)


def test_pins_name_who_made_them_and_their_end() -> None:
    bulk, index = stored([(0,), (1,), (2,)])
    for one in (pin((0,), 3_000, "ada@ops-1"), pin((1,), 2_000, None), pin((2,), 999, "gone")):
        bulk.put(one.path(), one.document())
    bulk.put(f"{NAMESPACE}/pins/{'0' * 40}.json", b"what")
    report = Auditor(bulk, index, clock=ManualClock(1_000.0)).all()
    assert [(one.by, one.until_s, one.tokens) for one in report.pins] == [
        (None, 2_000, 16),
        ("ada@ops-1", 3_000, 16),
    ]
    assert any("is not a pin of objkv" in problem for problem in report.problems)


Read = Callable[[], LifecycleRules | None]


def rules(expire: int | None, archive: int | None = None) -> Read:
    return lambda: LifecycleRules(expire, archive)


def denied() -> LifecycleRules:
    raise StoreDenied("lifecycle bucket: HTTP 403 AccessDenied: the credentials lack a permission")


@pytest.mark.parametrize(
    ("read", "status", "words"),
    [
        (rules(7), "conflicts", "7 days after they were saved, but records live for ttl_s, 7 d"),
        (rules(0), "conflicts", "deletes payloads 0 days after"),
        (rules(8), "fits", "deleted after 8 days, ttl_s is 7 d"),
        (rules(30, 60), "conflicts", "archived payload cannot be loaded"),
        (rules(None), "none", "only objkv sweep does"),
        (denied, "unknown", "no right s3:GetLifecycleConfiguration"),
    ],
)
def test_lifecycle_rules_are_judged_by_the_time_to_live(
    read: Read, status: str, words: str
) -> None:
    found = judge_rules(read, 7 * DAY_S)
    assert found is not None
    assert (found.status, words in found.detail) == (status, True), found.detail
    [check] = check_lifecycle(read, 7 * DAY_S)
    assert check.status == {"conflicts": "warning", "unknown": "not checked"}.get(status, "ok")
    assert check.fix == found.fix


def test_a_rule_that_ends_before_a_pin_is_a_conflict_in_the_report() -> None:
    bulk, index = stored([(0,)])
    one = pin((0,), 900 + 30 * DAY_S, "ada")
    bulk.put(one.path(), one.document())
    report = Auditor(bulk, index, clock=ManualClock(1_000.0), lifecycle=rules(14)).all()
    assert report.lifecycle is not None
    assert (report.lifecycle.status, report.lifecycle.expire_days) == ("conflicts", 14)
    assert any("a pin lasts longer" in problem for problem in report.problems)
    assert Auditor(bulk, index).all().lifecycle is None


def test_missing_payloads_that_this_user_cannot_see_are_in_the_report() -> None:
    class Unscannable(MemoryIndex):
        def scan(self, namespace: str) -> Any:
            raise StoreDenied(f"redis index, scan: {SCAN_DENIED}")
            yield

    bulk, index = MemoryStore(), Unscannable()
    save_prompts(bulk, index, [(0, 1)])
    report = Auditor(bulk, ListedIndex(index, CallPolicy(), bulk)).all()
    assert report.totals.roots == 1
    assert any("are missing are not seen" in problem for problem in report.problems)
    assert not any("not seen" in one for one in Auditor(bulk, MemoryIndex()).all().problems)
