"""One payload is one finding, the same in every kind of audit."""

import re
from dataclasses import replace

import pytest

from objkv.assembly.backends import Backends
from objkv.keys.identity import identity_path
from objkv.ops.audit.html.page import html_report
from objkv.ops.audit.report import verdict
from objkv.ops.inventory.findings import FAULTS
from objkv.stores.base import Unfinished
from tests.contracts.clock import ManualClock
from tests.contracts.damage import DamagedStore, Defects
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.ops.test_audit import counts
from tests.support.audit import Auditor, save_prompts, tokens_of
from tests.support.samples import (
    IDENTITY,
    NAMESPACE,
    save,
    save_identity,
    save_in_format,
)


def test_an_old_epoch_is_one_also_where_it_alone_is_audited() -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    save_prompts(bulk, None, [(1,)])
    save_identity(bulk, replace(IDENTITY, weights_epoch=1))
    report = Auditor(bulk, index, only=NAMESPACE).all()
    assert counts(Auditor(bulk, index).all()) == counts(report) == {"old_epoch": 1}
    assert [one.namespace for one in report.namespaces] == [NAMESPACE]


@pytest.mark.parametrize("is_own_index", [True, False])
def test_payloads_of_an_earlier_format_are_old_and_not_corrupt(is_own_index: bool) -> None:
    bulk = MemoryStore()
    name = save_in_format(bulk, 1)
    report = Auditor(bulk, MemoryIndex(), is_own_index=is_own_index).all()
    assert counts(report) == {"old_epoch": 1}
    problem = "from an earlier weights_epoch or format; objkv sweep --apply deletes it"
    assert f"{name}: {problem}" in report.problems


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


def test_an_audit_of_one_namespace_tells_nothing_of_what_others_left() -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    save_prompts(bulk, index, [(1,)])
    own, other = f"{NAMESPACE}/ab/x", f"{'5' * 32}/ab/x"
    for key in (own, other):
        bulk.put(f"quarantine/{key}", b"taken out")
    killed = [Unfinished(key, "1", 7, 0.0) for key in (own, other, f"quarantine/{other}")]
    auditor = Auditor(bulk, index, only=NAMESPACE, unfinished=lambda: killed)
    named = [one.key for one in auditor.all().findings.first]
    assert sorted(named) == [f"{own} (1)", f"quarantine/{own}"]
    everything = Auditor(bulk, index, unfinished=lambda: killed)
    assert counts(everything.all()) == {"temporary": 3, "quarantined": 2}


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
