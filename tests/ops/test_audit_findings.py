"""One payload is one finding, the same in every kind of audit."""

import re
from dataclasses import replace

import pytest

from objkv.assembly.backends import Backends
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import identity_path
from objkv.ops.audit.audit import find_places
from objkv.ops.audit.html.page import html_report
from objkv.ops.audit.html.remarks import FAULTS
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
    auditor = Auditor(bulk, index)
    auditor.places = find_places(auditor.view, NAMESPACE)
    report = auditor.all()
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


@pytest.mark.parametrize("namespace", ["current", "old epoch", "stranger"])
@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_short_payload_is_corrupt_and_nothing_else(namespace: str, is_recorded: bool) -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    save_prompts(bulk, index, [(1,)])
    [key] = save(bulk, index if is_recorded else None, tokens_of((9,)))
    bulk.put(key.path(), b"x" * 100)
    if namespace == "old epoch":
        save_identity(bulk, replace(IDENTITY, weights_epoch=1))
    elif namespace == "stranger":
        bulk.delete(identity_path(NAMESPACE))
    kind = {"current": {}, "old epoch": {"old_epoch": 1}, "stranger": {"stranger": 1}}[namespace]
    report = Auditor(bulk, index).all()
    assert counts(report) == {"corrupt": 1, **kind}  # and the other one, which is whole
    [own] = [one for one in report.namespaces if one.namespace == NAMESPACE]
    assert (own.orphans, own.corrupt) == (0, 1)


@pytest.mark.parametrize("name", [NAMESPACE, "5" * 32])
def test_another_length_than_recorded_is_corrupt_and_nothing_else(name: str) -> None:
    """With a namespace that has no document or has an old epoch."""
    bulk, index = MemoryStore(), MemoryIndex()
    [key] = save(bulk, index, tokens_of((9,)))
    if name == NAMESPACE:
        save_identity(bulk)
        save_identity(bulk, replace(IDENTITY, weights_epoch=1))
    bulk.put(ChunkKey(NAMESPACE, key.prefix_hash, 0).path(), bytes(9_000))
    assert counts(Auditor(bulk, index).all()) == {"corrupt": 1}


def test_an_audit_of_one_namespace_tells_nothing_of_what_others_left() -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    save_prompts(bulk, index, [(1,)])
    own, other = f"{NAMESPACE}/ab/x", f"{'5' * 32}/ab/x"
    for key in (own, other):
        bulk.put(f"quarantine/{key}", b"taken out")
    killed = [Unfinished(key, "1", 7, 0.0) for key in (own, other, f"quarantine/{other}")]
    auditor = Auditor(bulk, index)
    auditor.walk.view = replace(auditor.view, unfinished=lambda: killed)
    auditor.places = find_places(auditor.view, NAMESPACE)
    named = [one.key for one in auditor.all().findings.first]
    assert sorted(named) == [f"{own} (1)", f"quarantine/{own}"]
    everything = Auditor(bulk, index)
    everything.walk.view = replace(everything.view, unfinished=lambda: killed)
    assert counts(everything.all()) == {"leftover": 5}


def test_the_namespaces_figures_add_up_to_what_is_the_faults() -> None:
    """Findings for the next sweep are in neither sum."""
    clock = ManualClock(1_000.0)
    bulk, index = MemoryStore(clock=clock), MemoryIndex()
    defects = Defects(good=20, orphan=3, ghost=4, old_epoch=5, stranger=2, short=2)
    DamagedStore(Backends(bulk, None, index), seed=1).plant(Defects(good=8, orphan=6))
    clock.advance(10_000)
    DamagedStore(Backends(bulk, None, index)).plant(defects)
    report = Auditor(bulk, index, clock=clock).all()
    found = counts(report)
    assert found["expired"] > 0
    faults = sum(count for kind, count in found.items() if kind in FAULTS)
    assert sum(one.faults for one in report.namespaces) == faults
    assert sum(one.expired for one in report.namespaces) == found["expired"]
    [table] = re.findall(r'<table id="namespaces-table".*?</table>', html_report(report), re.S)
    assert sum(int(n) for n in re.findall(r">(\d+)</td>\s*</tr>", table)) == faults > 0
