"""An audit's answers: savings, pins and lifecycle rules."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from objkv.cache.bulk_index import ListedIndex
from objkv.cache.pins import Pin
from objkv.config.prices import LIST_PRICES
from objkv.errors import SCAN_DENIED, StoreDenied
from objkv.index.base import Savings
from objkv.net.guard import CallPolicy
from objkv.ops.doctor.servers import check_lifecycle, judge_rules
from objkv.stores.base import LifecycleRules
from tests.contracts.clock import ManualClock
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.audit import Auditor, hash_of, save_prompts
from tests.support.samples import NAMESPACE

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
    prices = replace(LIST_PRICES, gpu_hour=2.5)
    assert Auditor(MemoryStore(), saved(MemoryIndex()), prices=prices).all().savings.usd == 5.0


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
    bulk, index = MemoryStore(), MemoryIndex()
    save_prompts(bulk, index, [(0,)])
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
