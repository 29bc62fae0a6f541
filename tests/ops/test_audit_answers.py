"""An audit's answers: savings, provenance, pins, lifecycle rules and changes."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from objkv.cache.listed_index import ListedIndex
from objkv.cache.pins import Pin, parse_pin
from objkv.errors import ConfigError, StoreDenied, StoreUnavailable
from objkv.index.base import SCAN_DENIED, Savings
from objkv.index.memory import MemoryIndex
from objkv.net.guard import CallPolicy
from objkv.ops.audit.answers import WriterAudit
from objkv.ops.audit.changes import changes_since, read_earlier
from objkv.ops.audit.figures import LIST_PRICES
from objkv.ops.audit.report import AuditReport, verdict
from objkv.ops.audit.walk import AuditView
from objkv.ops.doctor.lifecycle import check_lifecycle, judge_rules
from objkv.stores.base import LifecycleRules
from objkv.stores.memory import MemoryStore
from objkv.testing.clock import ManualClock
from tests.support.audit import Auditor, hash_of, sample_report, save_prompts, save_with_tokens
from tests.support.samples import CREATED_S, NAMESPACE

DAY_S = 86_400
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
    assert [one.gpu_s for one in savings.months] == [7_200, None, None]
    prices = replace(LIST_PRICES, gpu_hour=2.5)
    assert Auditor(MemoryStore(), saved(MemoryIndex()), prices=prices).all().savings.usd == 5.0


def test_savings_without_a_report_or_a_time_are_unknown() -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    save_prompts(bulk, index, [(0,)])
    assert set(asdict(Auditor(bulk, index).all().savings).values()) == {None, ()}
    index.credit(Savings(NAMESPACE, "2026-11", 1, 500))
    savings = Auditor(bulk, index).all().savings
    assert (savings.tokens, savings.timed_tokens) == (500, 0)
    assert (savings.compute_gpu_s, savings.load_gpu_s, savings.gpu_s) == (None, None, None)


def test_headers_name_their_writer_and_show_seals_and_token_ids() -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    save_prompts(bulk, index, [(0, 1), (2,)])
    save_with_tokens(bulk, index, [7] * 16)
    [found] = Auditor(bulk, index).all().provenance
    assert (found.namespace, found.seals, found.headers) == (NAMESPACE, (), 4)
    assert (found.encrypted, found.signed, found.unsealed, found.token_ids) == (0, 0, 4, 1)
    assert found.writers == (WriterAudit("host-1", 4, CREATED_S, CREATED_S + 16),)


def test_a_store_that_fails_while_headers_are_read_costs_only_them() -> None:
    class Failing(MemoryStore):
        def get_range(self, key: str, start: int, end: int) -> bytes | None:
            if key.endswith(".safetensors"):
                raise StoreUnavailable("down")
            return super().get_range(key, start, end)

    bulk, index = Failing(), MemoryIndex()
    save_prompts(bulk, index, [(0, 1)])
    report = Auditor(bulk, index).all()
    assert (report.totals.chunks, report.provenance) == (2, ())
    assert report.problems == ("headers of payloads were not read: down",)


def pin(prompt: tuple[int, ...], until_s: int, by: str | None) -> Pin:
    return Pin(NAMESPACE, (bytes.fromhex(hash_of(prompt)),), 16, until_s, 900, by)


def test_pins_name_who_made_them_and_their_end() -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    save_prompts(bulk, index, [(0,), (1,), (2,)])
    for one in (pin((0,), 3_000, "ada@ops-1"), pin((1,), 2_000, None), pin((2,), 999, "gone")):
        bulk.put(one.path(), one.document())
    bulk.put(f"{NAMESPACE}/pins/{'0' * 40}.json", b"what")
    report = Auditor(bulk, index, clock=ManualClock(1_000.0)).all()
    assert [(one.by, one.until_s, one.tokens) for one in report.pins] == [
        (None, 2_000, 16),
        ("ada@ops-1", 3_000, 16),
    ]
    assert any("is not a pin of objkv" in problem for problem in report.problems)


@pytest.mark.parametrize("by", ["[[", "x" * 101, "", 5, "a\nb"])
def test_a_pin_with_an_odd_author_keeps_its_chunks(by: object) -> None:
    one = pin((0,), 3_000, "ada")
    document = json.dumps(json.loads(one.document()) | {"by": by}).encode()
    if by != "[[":  # brackets are refused as in other documents
        assert parse_pin(document, one.path()) == replace(one, by=None)
    assert b'"by"' not in pin((0,), 3_000, None).document()


Read = Callable[[], LifecycleRules | None]


def rules(expire: int | None, abort: int | None = 1, archive: int | None = None) -> Read:
    return lambda: LifecycleRules(expire, abort, archive)


def denied() -> LifecycleRules:
    raise StoreDenied("lifecycle bucket: HTTP 403 AccessDenied: the credentials lack a permission")


@pytest.mark.parametrize(
    ("read", "status", "words"),
    [
        (rules(7), "conflicts", "7 days after they were saved, but records live for ttl_s, 7 d"),
        (rules(0), "conflicts", "deletes payloads 0 days after"),
        (rules(8), "fits", "deleted after 8 days, ttl_s is 7 d"),
        (rules(8, None), "fits", "no rule aborts unfinished uploads"),
        (rules(30, 1, 60), "conflicts", "archived payload cannot be loaded"),
        (rules(None, None), "none", "no rule aborts unfinished uploads"),
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
    assert check.status == {"conflicts": "warning", "unknown": "skipped"}.get(status, "ok")
    assert bool(check.fix) == (status == "conflicts")


def test_a_rule_that_ends_before_a_pin_is_a_conflict_in_the_report() -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    save_prompts(bulk, index, [(0,)])
    one = pin((0,), 900 + 30 * DAY_S, "ada")
    bulk.put(one.path(), one.document())
    auditor = Auditor(bulk, index, clock=ManualClock(1_000.0))
    auditor.view = replace(auditor.view, lifecycle=rules(14))
    report = auditor.all()
    assert report.lifecycle is not None
    assert (report.lifecycle.status, report.lifecycle.expire_days) == ("conflicts", 14)
    assert any("a pin lasts longer" in problem for problem in report.problems)
    assert Auditor(bulk, index).all().lifecycle is None


def test_ghosts_that_this_user_cannot_see_are_in_the_report() -> None:
    class Unscannable(MemoryIndex):
        def scan(self, namespace: str) -> Any:
            raise StoreDenied(f"redis index, scan: {SCAN_DENIED}")
            yield

    bulk, index = MemoryStore(), Unscannable()
    save_prompts(bulk, index, [(0, 1)])
    report = Auditor(bulk, ListedIndex(index, CallPolicy(), bulk)).all()
    assert report.totals.records == 2
    assert any("(ghosts) are not seen" in problem for problem in report.problems)
    assert not any("ghosts" in one for one in Auditor(bulk, MemoryIndex()).all().problems)
    assert isinstance(Auditor(bulk, index).view, AuditView)


# What changed


def document(report: AuditReport) -> dict[str, Any]:
    values = json.loads(json.dumps(asdict(report)))
    return {"command": "audit", "format": 1, "verdict": verdict(report), **values}


def test_a_document_is_read_as_the_report_that_it_was(tmp_path: Path) -> None:
    file = tmp_path / "audit.json"
    file.write_text(json.dumps(document(sample_report())))
    assert read_earlier(file) == replace(sample_report(), changes=None)


def test_a_document_of_an_older_version_leaves_unknown_what_it_lacks(tmp_path: Path) -> None:
    file, old = tmp_path / "audit.json", document(sample_report())
    for name in ("namespace", "savings", "provenance", "pins", "lifecycle", "changes"):
        del old[name]
    del old["cost"]["prices"]["gpu_hour"]
    file.write_text(json.dumps(old))
    found = read_earlier(file)
    assert (found.savings.tokens, found.lifecycle, found.pins) == (None, None, ())


@pytest.mark.parametrize(
    "content",
    [
        "", "what", "[]", '{"command": "ls"}', '{"command": "audit", "format": 1}',
        '{"command": "audit", "format": 2}', "[" * 100_000, "\udcff", None,
    ],
)  # fmt: skip
def test_what_is_no_audit_is_one_sentence(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "audit.json"
    if content is not None:
        file.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=r"--since .*audit\.json: ") as raised:
        read_earlier(file)
    assert "\n" not in str(raised.value)


def test_changes_name_new_gone_and_grown_namespaces_and_fixed_findings() -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    save_prompts(bulk, index, [(0,)])
    save_prompts(bulk, None, [(9,)])
    before = Auditor(bulk, index).all()
    save_prompts(bulk, index, [(9,), (1,)])
    save_prompts(bulk, None, [(7,), (8,)])
    gone = replace(before.namespaces[0], namespace=OTHER, nbytes=5, chunks=1)
    before = replace(before, namespaces=(*before.namespaces, gone))
    report = Auditor(bulk, index, since=before).all()
    changes = report.changes
    assert changes is not None
    assert (changes.chunks, changes.payloads, changes.verdict_then) == (3, 3, "faults")
    own = (before.totals.nbytes, report.totals.nbytes)
    assert [(c.namespace, c.kind, c.nbytes_then, c.nbytes) for c in changes.namespaces] == [
        (NAMESPACE, "grown", *own),
        (OTHER, "gone", 5, 0),
    ]
    [orphans] = changes.findings
    assert (orphans.kind, orphans.count_then, orphans.count) == ("orphan", 1, 2)
    assert (orphans.new, orphans.fixed) == (2, 1)


def test_new_and_fixed_are_unknown_where_a_report_does_not_list_every_finding() -> None:
    now = sample_report()
    ghosts = next(one for one in now.findings.counts if one.kind == "ghost")
    many = tuple(replace(one, count=500) if one is ghosts else one for one in now.findings.counts)
    changes, _ = changes_since(replace(now, findings=replace(now.findings, counts=many)), now)
    assert changes is not None
    found = next(one for one in changes.findings if one.kind == "ghost")
    assert (found.count_then, found.count) == (500, ghosts.count)
    assert (found.new, found.fixed) == (None, None)


@pytest.mark.parametrize(
    ("then", "words"),
    [
        ({"bulk_url": "s3://other"}, "another store or index (s3://other"),
        ({"namespace": "a" * 32}, "different scopes"),
        ({"ending": "interrupted"}, "the earlier audit is not complete"),
    ],
)
def test_a_doubtful_comparison_is_reported(then: dict[str, Any], words: str) -> None:
    now = sample_report()
    _, doubts = changes_since(replace(now, **then), now)
    assert [words in doubt for doubt in doubts] == [True]
    assert changes_since(now, now)[1] == []
