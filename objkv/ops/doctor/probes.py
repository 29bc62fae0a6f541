"""Tries each operation of a replica once, on a temporary key that is removed again."""

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from objkv.config import Role
from objkv.errors import ConfigError, ObjkvError, StoreDenied, StoreError, StoreUnavailable
from objkv.index.base import ChunkEntry, ShardRecord, WriteIndex
from objkv.keys.identity import NAMESPACE_HEX
from objkv.keys.prefix import PREFIX_HASH_BYTES
from objkv.stores.base import HotStore, ReadStore

PROBE_PREFIX = "objkv-doctor"
_PROBE_BYTES = 8_192
_RANGE = (4_096, 4_196)
_TTL_S = 60
"""Lifetime of the record and the lease: long enough for a server that answers within seconds."""
CLOCK_SKEW_MAX_S = 60
_NOT_ALLOWED = f"not allowed and not needed: {_PROBE_BYTES} bytes stay until they are deleted"
_PROXY = "check for a proxy or cache that answers instead of the store"
_UNTESTED = "use a server that objkv is tested with, see docs/indexes.md"
Area = Literal["bulk", "hot", "index", "seal", "engine", "agent"]
Status = Literal["ok", "warning", "failed", "unreachable", "denied", "skipped"]
BAD: frozenset[Status] = frozenset(("failed", "unreachable", "denied"))


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    area: Area
    name: str
    status: Status
    detail: str = ""
    fix: str = ""
    """The suggested fix; empty if nothing is wrong."""
    elapsed_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """``act`` raises ``StoreError``, returns a description of the problem, or returns nothing."""

    name: str
    act: Callable[[], str | None]
    fix: str
    """The suggested fix if ``act`` reports a problem."""
    may_be_denied: bool = False
    """Whether replicas work without this right."""


def probe_store(area: Area, store: HotStore, clock: Callable[[], float] = time.time) -> list[Check]:
    """Put, refuse to overwrite, get, head, get a range, get into a buffer, delete."""
    key = f"{PROBE_PREFIX}/{secrets.token_hex(8)}"
    checks = run_steps(area, _store_steps(store, key, secrets.token_bytes(_PROBE_BYTES), clock))
    if any(check.status in BAD for check in checks):
        with suppress(StoreError):  # the failure is reported already
            store.delete(key)
    return checks


def probe_index(index: WriteIndex) -> list[Check]:
    """Ping, publish, look up, count a hit, forget, lease; in a namespace of its own."""
    probe = _IndexProbe(index)
    checks = run_steps("index", probe.steps())
    if any(check.status in BAD for check in checks):
        with suppress(StoreError):
            probe.clean()
    return checks


def run_steps(area: Area, steps: Iterable[Step]) -> list[Check]:
    """Run the steps in order. After a step that raised an error, skip the rest."""
    checks: list[Check] = []
    broken = ""
    for step in steps:
        if broken:
            checks.append(Check(area, step.name, "skipped", f"because {broken} failed"))
            continue
        begun = time.perf_counter()
        try:
            problem = step.act()
        except StoreError as exc:
            if step.may_be_denied and isinstance(exc, StoreDenied):
                checks.append(Check(area, step.name, "skipped", _NOT_ALLOWED))
                continue
            checks.append(failure(area, step.name, exc))
            broken = step.name
            continue
        elapsed_ms = round((time.perf_counter() - begun) * 1000, 3)
        fix = step.fix if problem else ""
        status: Status = "failed" if problem else "ok"
        checks.append(Check(area, step.name, status, problem or "", fix, elapsed_ms))
    return checks


def failure(area: Area, name: str, error: ObjkvError) -> Check:
    """Return the check that ``error`` ended. The message of a denied check contains its fix."""
    url = "bulk_url" if area == "bulk" else "index_url"
    if isinstance(error, StoreUnavailable):
        fix = f"check that {url} is correct and that this machine can reach it"
        return Check(area, name, "unreachable", str(error), fix)
    if isinstance(error, StoreDenied | ConfigError):
        return Check(area, name, "denied", str(error))
    return Check(area, name, "failed", str(error), f"check that {url} is correct")


def _store_steps(
    store: HotStore, key: str, value: bytes, clock: Callable[[], float]
) -> Sequence[Step]:
    buffer = memoryview(bytearray(len(value)))
    start, end = _RANGE

    def head() -> str:
        entry = store.head(key)
        if entry is None or entry.nbytes != len(value):
            return f"the store reports the wrong size: {entry and entry.nbytes}"
        skew_s = entry.modified_s - clock()
        if abs(skew_s) > CLOCK_SKEW_MAX_S:
            return f"the store's clock differs from this machine's by {skew_s:+.0f} s"
        return ""

    def get_into() -> str:
        same = store.get_into(key, buffer) == len(value) and buffer == value
        return _unless(same, "the store returned other bytes")

    def delete() -> str:
        store.delete(key)
        return _unless(store.get(key) is None, "the key still exists after the delete")

    way = _PROXY
    return (
        Step("check", store.check, ""),
        Step(
            "put",
            lambda: _unless(
                store.put_if_absent(key, value), "the store reports a new key as present"
            ),
            way,
        ),
        Step(
            "put refused when present",
            lambda: _unless(
                not store.put_if_absent(key, value[::-1]), "a second writer overwrote the first"
            ),
            "use a server that supports PUT with If-None-Match: * (AWS S3, Ceph and MinIO do)",
        ),
        Step(
            "get", lambda: _unless(store.get(key) == value, "the store returned other bytes"), way
        ),
        Step("head", head, "synchronize both clocks with NTP"),
        Step(
            "get range",
            lambda: _unless(
                store.get_range(key, start, end) == value[start:end],
                "the store returned other bytes",
            ),
            "use a server that supports the Range header",
        ),
        Step("get into buffer", get_into, way),
        Step("delete", delete, "disable retention and legal hold for this prefix", True),
    )


class _IndexProbe:
    """Probes the index with a temporary record and lease, which expire on their own."""

    def __init__(self, index: WriteIndex) -> None:
        self._index = index
        self._namespace = secrets.token_hex(NAMESPACE_HEX // 2)
        self._hash = secrets.token_bytes(PREFIX_HASH_BYTES)
        self._field = "0.L0-1_H0-1"
        self._lease = f"{PROBE_PREFIX}/{secrets.token_hex(8)}"
        self._shard = ShardRecord(1, 1, True, False, secrets.token_hex(8), int(time.time()))

    def steps(self) -> Sequence[Step]:
        volatile = "another program removes keys: use a database that no other program flushes"
        odd = _UNTESTED
        return (
            Step("check", self._index.check, ""),
            Step("publish", self._publish, volatile),
            Step("lookup", self._lookup, volatile),
            Step("touch", self._touch, volatile),
            Step("forget", self._forget, odd),
            Step("lease", self._take_lease, odd),
        )

    def clean(self) -> None:
        """Remove the record of a failed probe."""
        self._index.forget(self._namespace, self._hash, self._field, self._shard)

    def _publish(self) -> None:
        chunk = ChunkEntry(self._namespace, self._hash, bytes(PREFIX_HASH_BYTES), 0, 1)
        self._index.publish(chunk, {self._field: self._shard}, ttl_s=_TTL_S)

    def _lookup(self) -> str:
        [record] = self._index.lookup(self._namespace, [self._hash])
        same = record is not None and record.shards.get(self._field) == self._shard
        return _unless(same, "the index does not find the published record")

    def _touch(self) -> str:
        self._index.touch(self._namespace, [self._hash], ttl_s=_TTL_S)
        [record] = self._index.lookup(self._namespace, [self._hash])
        return _unless(record is not None and record.hits == 1, "the index did not count the hit")

    def _forget(self) -> str:
        other = replace(self._shard, nbytes=2)
        if self._index.forget(self._namespace, self._hash, self._field, other):
            return "the index removed a record that had changed"
        gone = self._index.forget(self._namespace, self._hash, self._field, self._shard)
        return _unless(gone, "the index did not remove the record")

    def _take_lease(self) -> str:
        mine = self._index.lease(self._lease, "a", ttl_ms=1000 * _TTL_S)
        other = self._index.lease(self._lease, "b", ttl_ms=1000 * _TTL_S)
        self._index.release(self._lease, "a")
        return _unless(mine and not other, "two owners hold the same lease")


def _unless(right: bool, problem: str) -> str:
    return "" if right else problem


def probe_store_as(
    role: Role, area: Area, store: HotStore, listed: ReadStore | None = None
) -> list[Check]:
    """Probe the operations of ``role`` on a store. Readers and sweepers do not put; they look up a
    key that cannot exist. ``listed``: the same store, if its keys are listed."""
    return (
        probe_store(area, store)
        if role == "writer"
        else run_steps(area, _role_store_steps(role, store, listed))
    )


def probe_index_as(role: Role, index: WriteIndex) -> list[Check]:
    """Probe the operations of ``role`` on the index. Sweepers change records as replicas do."""
    return run_steps("index", _read_steps(index)) if role == "reader" else probe_index(index)


def _role_store_steps(role: Role, store: HotStore, listed: ReadStore | None) -> Sequence[Step]:
    key = f"{PROBE_PREFIX}/{secrets.token_hex(8)}"
    way = _PROXY
    buffer = memoryview(bytearray(8))

    def delete() -> str:
        store.delete(key)
        return ""

    steps = [
        Step("check", store.check, ""),
        Step("get nothing", lambda: _nothing(store.get(key)), way),
        Step("get nothing into buffer", lambda: _nothing(store.get_into(key, buffer)), way),
    ]
    if role == "sweeper":
        steps += [Step("delete nothing", delete, "")]
    if listed is not None:
        steps += [
            Step("head nothing", lambda: _nothing(store.head(key)), way),
            Step("list nothing", lambda: _nothing(next(listed.scan(f"{key}/"), None)), way),
        ]
    return steps


def _read_steps(index: WriteIndex) -> Sequence[Step]:
    namespace = secrets.token_hex(NAMESPACE_HEX // 2)
    hashes = [secrets.token_bytes(PREFIX_HASH_BYTES)]
    odd = _UNTESTED
    return (
        Step("check", index.check, ""),
        Step("lookup", lambda: _nothing(index.lookup(namespace, hashes)[0]), odd),
        Step("find", lambda: _nothing(index.find(namespace, hashes, ["0.L0-1_H0-1"])[0]), odd),
    )


def _nothing(found: object) -> str:
    return "" if found is None else "the backend returned a value for a key that cannot exist"
