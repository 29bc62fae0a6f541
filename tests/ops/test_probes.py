"""Probes: what works, what is refused, what answers wrongly; and nothing stays behind."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from objkv.config import Role
from objkv.errors import ConfigError, StoreDenied, StoreError, StoreFull, StoreUnavailable
from objkv.index.base import PruneIndex, ServerFacts
from objkv.index.guarded import INDEX_VERBS, GuardedIndex
from objkv.keys.chunk import ChunkKey
from objkv.ops.bench.sample import NAMESPACE
from objkv.ops.doctor.probes import Area, Check, failure, probe_index, probe_store
from objkv.ops.doctor.servers import check_server
from objkv.stores.guarded import GuardedStore
from tests.contracts.clock import ManualClock
from tests.contracts.flaky import FlakyStore
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.stores.guards import guard_of

READS = ["get", "head", "get range", "get into buffer"]
WRITER_STEPS = ["check", "put", "put refused when present", *READS, "list"]
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


def bulk_checks(store: Any, role: Role = "writer") -> list[Check]:
    return probe_store(role, "bulk", store, listed=store)


def test_stores_and_indexes_that_keep_their_promises_are_left_as_they_were(
    bulk: MemoryStore, index: MemoryIndex
) -> None:
    bulk.put("a", b"1")
    checks = bulk_checks(bulk)
    assert [check.name for check in checks] == WRITER_STEPS
    assert [entry.key for entry in bulk.scan("")] == ["a"]
    checks += (found := probe_index("writer", index))
    assert [check.name for check in found] == INDEX_STEPS
    assert index.namespaces() == []
    assert set(statuses(checks)) == {"ok"}
    assert not any(check.fix for check in checks)


def test_a_writer_is_well_without_deleting_and_what_stays_can_be_swept() -> None:
    store = that(MemoryStore(), delete=refuse)
    assert set(statuses(bulk_checks(store))) == {"ok"}
    document, payload = sorted(entry.key for entry in store.scan(""))[::-1]
    assert document == f"{NAMESPACE}/identity.json", "without it no sweep judges the payload"
    assert ChunkKey.parse(payload).namespace == NAMESPACE


@pytest.mark.parametrize(
    ("store", "name", "fix"),
    [
        (that(MemoryStore(), put_if_absent=overwrite), "put refused when present", "If-None-Match"),
        (that(MemoryStore(), get=lambda s, key, *_: MemoryStore.get(s, key)), "get range", "Range"),
        (that(MemoryStore(), get=lambda *_: b"x"), "get", "proxy"),
        (MemoryStore(clock=lambda: 0), "head", "NTP"),
    ],
)
def test_a_store_that_breaks_a_promise_is_told_with_what_to_do(
    store: MemoryStore, name: str, fix: str
) -> None:
    bad = next(check for check in bulk_checks(store) if check.status != "ok")
    assert (bad.name, bad.status) == (name, "failed")
    assert fix in bad.fix


@pytest.mark.parametrize(
    ("error", "status", "fix"),
    [
        (StoreUnavailable("nobody there"), "unreachable", "check that bulk_url is correct"),
        (StoreFull("OOM: raise maxmemory"), "full", ""),
        (StoreDenied("403: set x"), "denied", ""),
        (ConfigError("bad"), "denied", ""),
        (StoreError("odd"), "failed", "check that bulk_url is correct"),
    ],
)
def test_each_kind_of_error_has_a_status_and_a_fix(
    error: StoreError, status: str, fix: str
) -> None:
    found = failure("bulk", "put", error)
    assert (found.status, found.detail, found.fix[: len(fix)]) == (status, str(error), fix)
    assert bool(found.fix) == bool(fix), "the sentence of the error has the fix"


def test_after_a_call_that_fails_the_rest_is_not_checked(bulk: MemoryStore) -> None:
    store = FlakyStore(bulk)
    store.fail_next(StoreDenied("403"))
    checks = bulk_checks(store)
    assert [check.name for check in checks] == WRITER_STEPS
    assert statuses(checks) == ["ok", "denied"] + ["not checked"] * 6
    checks = bulk_checks(that(MemoryStore(), check=refuse))
    assert statuses(checks) == ["denied"] + ["not checked"] * 7
    store = that(MemoryStore(), get=refuse)
    checks = bulk_checks(store)
    assert statuses(checks) == ["ok", "ok", "ok", "denied"] + ["not checked"] * 4
    assert checks[4].detail == "because get failed"
    assert list(store.scan("")) == []
    index = that(MemoryIndex(), touch=refuse)
    checks = probe_index("writer", index)
    assert statuses(checks) == ["ok", "ok", "ok", "denied", "not checked", "not checked"]
    assert index.namespaces() == []


def test_an_index_that_is_slow_keeps_its_promises_all_the_same() -> None:
    clock = ManualClock()

    def lease(index: MemoryIndex, *told: str, ttl_ms: int) -> bool:
        granted = MemoryIndex.lease(index, *told, ttl_ms=ttl_ms)
        clock.advance(30)
        return granted

    index = that(MemoryIndex(clock=clock), lease=lease)
    assert statuses(probe_index("writer", index)) == ["ok"] * len(INDEX_STEPS)


@pytest.mark.parametrize(
    ("index", "name"),
    [
        (that(MemoryIndex(), publish=lambda *_, **__: None), "lookup"),
        (that(MemoryIndex(), forget=lambda index, *told: index.drop(*told[:2])), "forget"),
        (that(MemoryIndex(), lease=lambda *_, **__: True), "lease"),
    ],
)
def test_an_index_that_breaks_a_promise_is_told(index: PruneIndex, name: str) -> None:
    bad = [check for check in probe_index("writer", index) if check.status != "ok"]
    assert (bad[0].name, bad[0].status) == (name, "failed")
    assert bad[0].fix


@pytest.mark.parametrize("area", ["bulk", "hot"])
def test_a_reader_is_well_without_writing_and_a_sweeper_without_putting(area: Area) -> None:
    guarded: Any = GuardedStore(MemoryStore(), guard_of(may_write=False))
    checks = probe_store("reader", area, guarded, listed=guarded if area == "bulk" else None)
    index = MemoryIndex()
    guard = guard_of("index", verbs=INDEX_VERBS, may_write=False)
    checks += probe_index("reader", GuardedIndex(index, guard))
    store = that(MemoryStore(), put=refuse, put_if_absent=refuse)
    swept = probe_store("sweeper", area, store, listed=store if area == "bulk" else None)
    assert swept[-1].name == "delete"
    checks += [*swept, *probe_index("sweeper", index)]
    assert set(statuses(checks)) == {"ok"}
    assert index.namespaces() == []
    names = [check.name for check in swept]
    assert ("head" in names) == (area == "bulk"), "no role but the writer may ask Redis for it"
    found = bulk_checks(that(MemoryStore(), get=lambda *_: b"x"), "reader")
    assert [check.name for check in found if check.status == "failed"] == ["get", "get range"]


FACTS = ServerFacts("redis", "7.2.4", "standalone", 1 << 30, "volatile-lru", 1 << 20, 0.1)
UNKNOWN = ServerFacts("redis", None, None, None, None, None, None, ("INFO", "TIME"))


@pytest.mark.parametrize(
    ("change", "name", "status", "words"),
    [
        ({}, "memory policy", "ok", "evicts old records"),
        ({"version": "5.0.14"}, "server", "warning", "upgrade"),
        ({"version": None}, "server", "not checked", "does not report"),
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
        ({"maxmemory_policy": None}, "memory policy", "not checked", "does not report"),
        ({"clock_skew_s": -40.0}, "clock", "warning", "-40.0 s"),
    ],
)  # fmt: skip
def test_what_a_server_says_is_explained(
    change: dict[str, Any], name: str, status: str, words: str
) -> None:
    checks = {check.name: check for check in check_server(replace(FACTS, **change))}
    assert checks.pop(name).status == status
    assert set(statuses(list(checks.values()))) == {"ok"}
    [found] = [c for c in check_server(replace(FACTS, **change)) if c.name == name]
    assert words in found.detail + found.fix


def test_what_the_rights_do_not_show_is_not_fine() -> None:
    checks = check_server(UNKNOWN)
    assert statuses(checks) == ["not checked"] * 3
    assert {check.detail for check in checks} == {"this user may not run INFO and TIME"}
    assert all("role sweeper" in check.fix for check in checks)
