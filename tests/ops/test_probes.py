"""Probes: what works, what is refused, what answers wrongly; and nothing stays behind."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from objkv.errors import ConfigError, StoreDenied, StoreError, StoreUnavailable
from objkv.index.base import PruneIndex, ServerFacts
from objkv.index.guarded import INDEX_VERBS, GuardedIndex
from objkv.ops.doctor.probes import (
    Check,
    failure,
    probe_index,
    probe_index_as,
    probe_store,
    probe_store_as,
)
from objkv.ops.doctor.server import judge_server
from objkv.stores.guarded import GuardedStore
from tests.contracts.clock import ManualClock
from tests.contracts.flaky import FlakyStore
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.stores.guards import guard_of

BULK_STEPS = [
    "check", "put", "put refused when present", "get", "head", "get range", "get into buffer",
    "delete",
]  # fmt: skip
INDEX_STEPS = ["check", "publish", "lookup", "touch", "forget", "lease"]


def that(end: Any, **verbs: Callable[..., object]) -> Any:
    """``end`` with other methods, which get it first."""
    for name, verb in verbs.items():
        setattr(end, name, partial(verb, end))
    return end


def overwrite(store: MemoryStore, key: str, value: bytes) -> bool:
    store.put(key, value)
    return True


def refuse(*_: object, **__: object) -> None:
    raise StoreDenied("403")


def statuses(checks: list[Check]) -> list[str]:
    return [check.status for check in checks]


def only_bad(checks: list[Check]) -> Check:
    [bad] = [check for check in checks if check.status not in ("ok", "skipped")]
    return bad


def test_a_store_that_keeps_its_promises_passes_and_is_left_as_it_was(bulk: MemoryStore) -> None:
    bulk.put("a", b"1")
    checks = probe_store("bulk", bulk)
    assert [check.name for check in checks] == BULK_STEPS
    assert statuses(checks) == ["ok"] * len(BULK_STEPS)
    assert all(check.elapsed_ms is not None and not check.fix for check in checks)
    assert [entry.key for entry in bulk.scan("")] == ["a"]


def test_an_index_that_keeps_its_promises_passes_and_is_left_as_it_was(index: MemoryIndex) -> None:
    checks = probe_index(index)
    assert [check.name for check in checks] == INDEX_STEPS
    assert statuses(checks) == ["ok"] * len(INDEX_STEPS)
    assert index.namespaces() == []


@pytest.mark.parametrize(
    ("store", "name", "fix"),
    [
        (that(MemoryStore(), put_if_absent=overwrite), "put refused when present", "If-None-Match"),
        (that(MemoryStore(), get_range=lambda s, key, *_: s.get(key)), "get range", "Range"),
        (that(MemoryStore(), delete=lambda *_: True), "delete", "retention"),
        (MemoryStore(clock=lambda: 0), "head", "NTP"),
    ],
)
def test_a_store_that_breaks_a_promise_is_told_with_what_to_do(
    store: MemoryStore, name: str, fix: str
) -> None:
    bad = [check for check in probe_store("bulk", store) if check.status != "ok"]
    assert (bad[0].name, bad[0].status) == (name, "failed")
    assert fix in bad[0].fix


@pytest.mark.parametrize(
    ("error", "status", "fix"),
    [
        (StoreUnavailable("nobody there"), "unreachable", "check that bulk_url is correct"),
        (StoreDenied("403: set x"), "denied", ""),
        (StoreError("odd"), "failed", ""),
    ],
)
def test_after_a_call_that_fails_the_rest_is_skipped(
    bulk: MemoryStore, error: StoreError, status: str, fix: str
) -> None:
    store = FlakyStore(bulk)
    store.fail_next(error)
    checks = probe_store("bulk", store)
    assert statuses(checks) == ["ok", status] + ["skipped"] * 6
    assert str(error) == checks[1].detail
    assert checks[1].fix.startswith(fix)
    assert checks[2].detail == "because put failed"


def test_a_probe_that_fails_half_way_takes_its_key_back(bulk: MemoryStore) -> None:
    store = that(MemoryStore(), head=refuse)
    assert only_bad(probe_store("bulk", store)).name == "head"
    assert list(store.scan("")) == []


def test_an_index_that_is_slow_keeps_its_promises_all_the_same() -> None:
    clock = ManualClock()

    def lease(index: MemoryIndex, *told: str, ttl_ms: int) -> bool:
        granted = MemoryIndex.lease(index, *told, ttl_ms=ttl_ms)
        clock.advance(30)
        return granted

    index = that(MemoryIndex(clock=clock), lease=lease)
    assert statuses(probe_index(index)) == ["ok"] * len(INDEX_STEPS)


@pytest.mark.parametrize(
    ("index", "name"),
    [
        (that(MemoryIndex(), publish=lambda *_, **__: None), "lookup"),
        (that(MemoryIndex(), forget=lambda index, *told: index.drop(*told[:2])), "forget"),
        (that(MemoryIndex(), lease=lambda *_, **__: True), "lease"),
    ],
)
def test_an_index_that_breaks_a_promise_is_told(index: PruneIndex, name: str) -> None:
    bad = [check for check in probe_index(index) if check.status != "ok"]
    assert (bad[0].name, bad[0].status) == (name, "failed")
    assert bad[0].fix


def test_an_index_that_refuses_is_told_and_left_clean() -> None:
    index = that(MemoryIndex(), touch=refuse)
    checks = probe_index(index)
    assert statuses(checks) == ["ok", "ok", "ok", "denied", "skipped", "skipped"]
    assert index.namespaces() == []


FACTS = ServerFacts("redis", "7.2.4", "standalone", 1 << 30, "volatile-lru", 1 << 20, 0.1)


def judged(facts: ServerFacts) -> dict[str, tuple[str, str]]:
    return {check.name: (check.status, check.detail + check.fix) for check in judge_server(facts)}


def test_a_server_as_it_should_be_has_no_warnings() -> None:
    assert {status for status, _ in judged(FACTS).values()} == {"ok"}


@pytest.mark.parametrize(
    ("change", "name", "status", "words"),
    [
        ({"version": "5.0.14"}, "server", "warning", "upgrade"),
        ({"version": None}, "server", "ok", "does not report"),
        ({"maxmemory_bytes": 0}, "memory policy", "warning", "set maxmemory"),
        (
            {"maxmemory_bytes": 0, "maxmemory_policy": "noeviction"},
            "memory policy", "warning", "with no limit",
        ),
        ({"maxmemory_policy": "noeviction"}, "memory policy", "ok", "once full"),
        (
            {"maxmemory_policy": "noeviction", "used_bytes": 1 << 30},
            "memory policy", "warning", "set maxmemory-policy volatile-lru",
        ),
        ({"maxmemory_policy": "allkeys-lru"}, "memory policy", "ok", "may also evict pinned"),
        ({"maxmemory_policy": None}, "memory policy", "ok", "does not report"),
        ({"clock_skew_s": -40.0}, "clock", "warning", "-40.0 s"),
        ({"denied": ("INFO",)}, "ACL", "ok", "INFO"),
    ],
)  # fmt: skip
def test_what_a_server_says_is_explained(
    change: dict[str, object], name: str, status: str, words: str
) -> None:
    found, text = judged(replace(FACTS, **change))[name]  # type: ignore[arg-type]
    assert found == status
    assert words in text


def test_an_error_in_the_settings_counts_as_denied() -> None:
    assert failure("bulk", "open", ConfigError("bad")).status == "denied"


@pytest.mark.parametrize("area", ["bulk", "hot"])
def test_a_reader_is_well_without_writing(area: str) -> None:
    store = GuardedStore(MemoryStore(), guard_of(may_write=False))
    listed = store if area == "bulk" else None
    checks = probe_store_as("reader", area, store, listed)  # type: ignore[arg-type]
    assert {check.status for check in checks} == {"ok"}
    index = MemoryIndex()
    guard = guard_of("index", verbs=INDEX_VERBS, may_write=False)
    checks = probe_index_as("reader", GuardedIndex(index, guard))
    assert [check.status for check in checks] == ["ok"] * 3
    assert index.namespaces() == []


@pytest.mark.parametrize("area", ["bulk", "hot"])
def test_a_sweeper_is_well_without_putting(area: str) -> None:
    store = that(MemoryStore(), put=refuse, put_if_absent=refuse)
    listed = store if area == "bulk" else None
    checks = probe_store_as("sweeper", area, store, listed)  # type: ignore[arg-type]
    assert {check.status for check in checks} == {"ok"}
    assert "delete nothing" in [check.name for check in checks]
    assert {check.status for check in probe_index_as("sweeper", MemoryIndex())} == {"ok"}


def test_a_writer_is_well_without_deleting() -> None:
    checks = probe_store("bulk", that(MemoryStore(), delete=refuse))
    assert [check.status for check in checks] == ["ok"] * 7 + ["skipped"]
    assert "not needed" in checks[-1].detail


def test_what_comes_back_for_a_key_that_cannot_exist_is_told() -> None:
    checks = probe_store_as("reader", "bulk", that(MemoryStore(), get=lambda *_: b"x"))
    assert [check.name for check in checks if check.status == "failed"] == ["get nothing"]
