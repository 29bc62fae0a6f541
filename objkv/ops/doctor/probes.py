"""Tries what replicas do, once each, on a key of its own that it removes again."""

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
from objkv.stores.base import PruneStore

PROBE_PREFIX = "objkv-doctor"
_PROBE_BYTES = 8_192
_RANGE = (4_096, 4_196)
_TTL_S = 60
"""Of the record and the lease: a server that takes seconds to answer breaks no promise."""
CLOCK_SKEW_MAX_S = 60
_NOT_ALLOWED = f"not allowed, nor needed: {_PROBE_BYTES} bytes stay until somebody deletes them"
Area = Literal["bulk", "hot", "index", "seal", "engine"]
Status = Literal["ok", "warning", "failed", "unreachable", "denied", "skipped"]
BAD: frozenset[Status] = frozenset(("failed", "unreachable", "denied"))


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was tried or looked at."""

    area: Area
    name: str
    status: Status
    detail: str = ""
    fix: str = ""
    """What to do about it; empty where nothing is wrong."""
    elapsed_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """``act`` raises ``StoreError``, or returns what came out wrong, or nothing."""

    name: str
    act: Callable[[], str | None]
    fix: str
    """What to do if it comes out wrong."""
    may_be_denied: bool = False
    """Whether replicas do without it."""


def probe_store(
    area: Area, store: PruneStore, clock: Callable[[], float] = time.time
) -> list[Check]:
    """Put, refuse to overwrite, get, head, get a range, get into a buffer, delete."""
    key = f"{PROBE_PREFIX}/{secrets.token_hex(8)}"
    checks = run_steps(area, _store_steps(store, key, secrets.token_bytes(_PROBE_BYTES), clock))
    if any(check.status in BAD for check in checks):
        with suppress(StoreError):  # whatever failed is told already
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
    """Run the steps in order; after one that could not be made, the rest are skipped."""
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
    """The check that ``error`` ended. What was denied says by itself what to do."""
    url = "bulk_url" if area == "bulk" else "index_url"
    if isinstance(error, StoreUnavailable):
        fix = f"check that {url} is right, and that this machine reaches it"
        return Check(area, name, "unreachable", str(error), fix)
    if isinstance(error, StoreDenied | ConfigError):
        return Check(area, name, "denied", str(error))
    return Check(area, name, "failed", str(error), f"check that {url} is right")


def _store_steps(
    store: PruneStore, key: str, value: bytes, clock: Callable[[], float]
) -> Sequence[Step]:
    buffer = memoryview(bytearray(len(value)))
    start, end = _RANGE

    def head() -> str:
        entry = store.head(key)
        if entry is None or entry.nbytes != len(value):
            return f"the size came back as {entry and entry.nbytes}"
        skew_s = entry.modified_s - clock()
        if abs(skew_s) > CLOCK_SKEW_MAX_S:
            return f"its clock is {skew_s:+.0f} s from this machine's"
        return ""

    def get_into() -> str:
        same = store.get_into(key, buffer) == len(value) and buffer == value
        return _unless(same, "other bytes came back")

    def delete() -> str:
        store.delete(key)
        return _unless(store.get(key) is None, "it is still there afterwards")

    way = "look for a proxy or cache on the way to the store that answers in its place"
    return (
        Step("check", store.check, ""),
        Step(
            "put",
            lambda: _unless(store.put_if_absent(key, value), "a key that cannot exist did"),
            way,
        ),
        Step(
            "put refused when present",
            lambda: _unless(
                not store.put_if_absent(key, value[::-1]), "a second writer overwrote the first"
            ),
            "use a server that honours PUT with If-None-Match: * (AWS S3, Ceph, MinIO do)",
        ),
        Step("get", lambda: _unless(store.get(key) == value, "other bytes came back"), way),
        Step("head", head, "set both clocks by NTP"),
        Step(
            "get range",
            lambda: _unless(
                store.get_range(key, start, end) == value[start:end], "other bytes came back"
            ),
            "use a server that honours the Range header",
        ),
        Step("get into buffer", get_into, way),
        Step("delete", delete, "switch off retention and legal hold for this prefix", True),
    )


class _IndexProbe:
    """One record and one lease of its own, which expire by themselves."""

    def __init__(self, index: WriteIndex) -> None:
        self._index = index
        self._namespace = secrets.token_hex(NAMESPACE_HEX // 2)
        self._hash = secrets.token_bytes(PREFIX_HASH_BYTES)
        self._field = "0.L0-1_H0-1"
        self._lease = f"{PROBE_PREFIX}/{secrets.token_hex(8)}"
        self._shard = ShardRecord(1, 1, "none", False, secrets.token_hex(16), int(time.time()))

    def steps(self) -> Sequence[Step]:
        volatile = "something else removes keys: give objkv a database that nobody flushes"
        odd = "use a server that objkv is tested with, see docs/indexes.md"
        return (
            Step("check", self._index.check, ""),
            Step("publish", self._publish, volatile),
            Step("lookup", self._lookup, volatile),
            Step("touch", self._touch, volatile),
            Step("forget", self._forget, odd),
            Step("lease", self._take_lease, odd),
        )

    def clean(self) -> None:
        """Remove what a failed probe left."""
        self._index.forget(self._namespace, self._hash, self._field, self._shard)

    def _publish(self) -> None:
        chunk = ChunkEntry(self._namespace, self._hash, bytes(PREFIX_HASH_BYTES), 0, 1)
        self._index.publish(chunk, {self._field: self._shard}, ttl_s=_TTL_S)

    def _lookup(self) -> str:
        [record] = self._index.lookup(self._namespace, [self._hash])
        same = record is not None and record.shards.get(self._field) == self._shard
        return _unless(same, "a record that was published cannot be found")

    def _touch(self) -> str:
        self._index.touch(self._namespace, [self._hash], ttl_s=_TTL_S)
        [record] = self._index.lookup(self._namespace, [self._hash])
        return _unless(record is not None and record.hits == 1, "the hit was not counted")

    def _forget(self) -> str:
        other = replace(self._shard, nbytes=2)
        if self._index.forget(self._namespace, self._hash, self._field, other):
            return "a record that differs was removed"
        gone = self._index.forget(self._namespace, self._hash, self._field, self._shard)
        return _unless(gone, "the record could not be removed")

    def _take_lease(self) -> str:
        mine = self._index.lease(self._lease, "a", ttl_ms=1000 * _TTL_S)
        other = self._index.lease(self._lease, "b", ttl_ms=1000 * _TTL_S)
        self._index.release(self._lease, "a")
        return _unless(mine and not other, "two owners held one lease")


def _unless(right: bool, problem: str) -> str:
    return "" if right else problem


def probe_store_as(role: Role, area: Area, store: PruneStore) -> list[Check]:
    """What ``role`` does with a store; readers and sweepers put nothing, but look for a key that
    cannot exist."""
    return (
        probe_store(area, store)
        if role == "writer"
        else run_steps(area, _role_store_steps(role, area, store))
    )


def probe_index_as(role: Role, index: WriteIndex) -> list[Check]:
    """What ``role`` does with the index; sweepers change records as replicas do."""
    return run_steps("index", _read_steps(index)) if role == "reader" else probe_index(index)


def _role_store_steps(role: Role, area: Area, store: PruneStore) -> Sequence[Step]:
    key = f"{PROBE_PREFIX}/{secrets.token_hex(8)}"
    way = "look for a proxy or cache on the way to the store that answers in its place"
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
    if area == "bulk":
        steps += [
            Step("head nothing", lambda: _nothing(store.head(key)), way),
            Step("list nothing", lambda: _nothing(next(store.scan(f"{key}/"), None)), way),
        ]
    return steps


def _read_steps(index: WriteIndex) -> Sequence[Step]:
    namespace = secrets.token_hex(NAMESPACE_HEX // 2)
    hashes = [secrets.token_bytes(PREFIX_HASH_BYTES)]
    odd = "use a server that objkv is tested with, see docs/indexes.md"
    return (
        Step("check", index.check, ""),
        Step("lookup", lambda: _nothing(index.lookup(namespace, hashes)[0]), odd),
        Step("find", lambda: _nothing(index.find(namespace, hashes, ["0.L0-1_H0-1"])[0]), odd),
    )


def _nothing(found: object) -> str:
    return "" if found is None else "something came back for a key that cannot exist"
