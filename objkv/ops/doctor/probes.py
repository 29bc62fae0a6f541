"""Tries each operation that a role uses once, on a payload and a record of its own.

What is not deleted at the end, because a writer may not delete, expires: see ``ops.bench.sample``.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, get_args

from objkv.config import Role
from objkv.errors import (
    ConfigError,
    ObjkvError,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from objkv.index.base import ChunkEntry, ShardRecord, WriteIndex
from objkv.keys.identity import NAMESPACE_HEX
from objkv.keys.prefix import PREFIX_HASH_BYTES
from objkv.ops.bench.sample import Shape, make_samples, stored_for_a_while
from objkv.stores.base import HotStore, ReadStore

CLOCK_SKEW_MAX_S = 60
_SAMPLE = Shape("8 KiB", layers=1, layer_bytes=8 << 10)
_RANGE = (4_096, 4_196)
_TTL_S = 60
"""Lifetime of the record and the lease: long enough for a server that answers within seconds."""
_PROXY = "check for a proxy or cache that answers instead of the store"
_UNTESTED = "use a server that objkv is tested with, see docs/indexes.md"
_VOLATILE = "another program removes keys: use a database that no other program flushes"
_FIELD = "0.L0-1_H0-1"
Area = Literal["bulk", "hot", "index", "seal", "engine", "agent"]
Bad = Literal["unreachable", "denied", "full", "failed"]
Status = Literal["ok", "warning", "not checked", Bad]
BAD: tuple[Bad, ...] = get_args(Bad)
"""The worst first."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    area: Area
    name: str
    status: Status
    detail: str = ""
    fix: str = ""
    """The suggested fix, or how to check what was not checked. Empty if there is nothing to do, or
    if ``detail`` says it."""


@dataclass(frozen=True, slots=True)
class Step:
    """``act`` raises ``StoreError``, returns a description of the problem, or returns nothing."""

    name: str
    act: Callable[[], str | None]
    fix: str = ""
    """The suggested fix if ``act`` reports a problem."""


def probe_store(
    role: Role, area: Area, store: HotStore, *, listed: ReadStore | None = None
) -> list[Check]:
    """Probe the operations of ``role`` on a store. Only a writer puts a payload; other roles look
    for one that cannot exist. ``listed``: the same store, if its keys are listed."""
    [sample] = samples = make_samples(_SAMPLE, 1)
    key, value = sample.key, bytes(sample.payload)
    if role == "writer":
        first = Step("check", store.check)
        steps = [*_write_steps(store, key, value), *_read_steps(store, key, value)]
        steps += _list_steps(listed, key, found=True)
        checks = run_steps(area, [first])
        if checks[0].status in BAD:
            return [*checks, *_not_checked(area, steps, first.name)]
        try:
            with stored_for_a_while(store, samples, expires=area == "hot"):
                return [*checks, *run_steps(area, steps)]
        except StoreError as exc:
            return [*checks, failure(area, "put", exc), *_not_checked(area, steps[1:], "put")]
    every = _read_steps(store, key, None)
    # The rights of other roles in Redis do not suffice for all.
    chosen = [one for one in every if listed is not None or one.name in _IN_REDIS]
    steps = [Step("check", store.check), *chosen, *_list_steps(listed, key, found=False)]
    if role == "sweeper":
        steps.append(Step("delete", lambda: (store.delete(key), "")[1]))
    return run_steps(area, steps)


_IN_REDIS = ("get", "get into buffer")


def _write_steps(store: HotStore, key: str, value: bytes) -> Sequence[Step]:
    again = "use a server that supports PUT with If-None-Match: * (AWS S3, Ceph and MinIO do)"
    return (
        Step(
            "put",
            lambda: _unless(
                store.put_if_absent(key, value), "the store reports a new key as present"
            ),
            _PROXY,
        ),
        Step(
            "put refused when present",
            lambda: _unless(
                not store.put_if_absent(key, value[::-1]), "a second writer overwrote the first"
            ),
            again,
        ),
    )


def _read_steps(store: HotStore, key: str, value: bytes | None) -> Sequence[Step]:
    """Return steps that expect ``value``; None: that the key does not exist."""
    buffer = memoryview(bytearray(1 << 14))
    other = "the store returned other bytes"
    if value is None:
        other = "the store returned a value for a key that cannot exist"
    start, end = _RANGE

    def head() -> str:
        entry = store.head(key)
        if (entry and entry.nbytes) != (value and len(value)):
            return f"the store reports the wrong size: {entry and entry.nbytes}"
        skew_s = 0.0 if entry is None else entry.modified_s - time.time()
        if abs(skew_s) > CLOCK_SKEW_MAX_S:
            return f"the store's clock differs from this machine's by {skew_s:+.0f} s"
        return ""

    def get_into() -> str:
        nbytes = store.get_into(key, buffer)
        return _unless((None if nbytes is None else buffer[:nbytes]) == value, other)

    def get_part() -> str:
        wanted = None if value is None else value[start:end]
        return _unless(store.get(key, start, end) == wanted, other)

    return (
        Step("get", lambda: _unless(store.get(key) == value, other), _PROXY),
        Step("head", head, "synchronize both clocks with NTP"),
        Step("get range", get_part, "use a server that supports the Range header"),
        Step("get into buffer", get_into, _PROXY),
    )


def _list_steps(listed: ReadStore | None, key: str, *, found: bool) -> Sequence[Step]:
    if listed is None:
        return ()

    def scan() -> str:
        entry = next(listed.scan(f"{key.rpartition('/')[0]}/"), None)
        return _unless(found or entry is None or entry.key != key, "the list has other keys")

    return (Step("list", scan, _PROXY),)


def probe_index(role: Role, index: WriteIndex) -> list[Check]:
    """Probe the operations of ``role`` on the index: of writers and sweepers, publish, look up,
    count a hit, forget and lease, in a namespace of its own."""
    if role == "reader":
        return run_steps("index", _index_read_steps(index))
    probe = _IndexProbe(index)
    checks = run_steps("index", probe.steps())
    if any(check.status in BAD for check in checks):
        with suppress(StoreError):
            probe.clean()
    return checks


def _not_checked(area: Area, steps: Iterable[Step], broken: str) -> list[Check]:
    why = f"because {broken} failed"
    return [Check(area, step.name, "not checked", why) for step in steps]


def run_steps(area: Area, steps: Iterable[Step]) -> list[Check]:
    """Run the steps in order. After a step that raised an error, the rest is not checked."""
    checks: list[Check] = []
    broken = ""
    for step in steps:
        if broken:
            checks += _not_checked(area, [step], broken)
            continue
        try:
            problem = step.act()
        except StoreError as exc:
            checks.append(failure(area, step.name, exc))
            broken = step.name
            continue
        fix = step.fix if problem else ""
        status: Status = "failed" if problem else "ok"
        checks.append(Check(area, step.name, status, problem or "", fix))
    return checks


def failure(area: Area, name: str, error: ObjkvError) -> Check:
    """Return the check that ``error`` ended. The message of a denied check contains its fix."""
    url = "bulk_url" if area == "bulk" else "index_url"
    if isinstance(error, StoreFull):
        return Check(area, name, "full", str(error))
    if isinstance(error, StoreUnavailable):
        fix = f"check that {url} is correct and that this machine can reach it"
        fix *= "disk is full" not in str(error)  # which the message tells how to mend
        return Check(area, name, "unreachable", str(error), fix)
    if isinstance(error, StoreDenied | ConfigError):
        return Check(area, name, "denied", str(error))
    return Check(area, name, "failed", str(error), f"check that {url} is correct")


class _IndexProbe:
    """Probes the index with a temporary record and lease, which expire on their own."""

    def __init__(self, index: WriteIndex) -> None:
        self._index = index
        self._namespace = secrets.token_hex(NAMESPACE_HEX // 2)
        self._hash = secrets.token_bytes(PREFIX_HASH_BYTES)
        self._lease = f"doctor/{secrets.token_hex(8)}"
        self._shard = ShardRecord(1, 1, True, False, secrets.token_hex(8), int(time.time()))

    def steps(self) -> Sequence[Step]:
        return (
            Step("check", self._index.check),
            Step("publish", self._publish, _VOLATILE),
            Step("lookup", self._lookup, _VOLATILE),
            Step("touch", self._touch, _VOLATILE),
            Step("forget", self._forget, _UNTESTED),
            Step("lease", self._take_lease, _UNTESTED),
        )

    def clean(self) -> None:
        """Remove the record of a failed probe."""
        self._index.forget(self._namespace, self._hash, _FIELD, self._shard)

    def _publish(self) -> None:
        chunk = ChunkEntry(self._namespace, self._hash, bytes(PREFIX_HASH_BYTES), 0, 1)
        self._index.publish(chunk, {_FIELD: self._shard}, ttl_s=_TTL_S)

    def _lookup(self) -> str:
        [record] = self._index.lookup(self._namespace, [self._hash])
        same = record is not None and record.shards.get(_FIELD) == self._shard
        return _unless(same, "the index does not find the published record")

    def _touch(self) -> str:
        self._index.touch(self._namespace, [self._hash], ttl_s=_TTL_S)
        [record] = self._index.lookup(self._namespace, [self._hash])
        return _unless(record is not None and record.hits == 1, "the index did not count the hit")

    def _forget(self) -> str:
        other = replace(self._shard, nbytes=2)
        if self._index.forget(self._namespace, self._hash, _FIELD, other):
            return "the index removed a record that had changed"
        gone = self._index.forget(self._namespace, self._hash, _FIELD, self._shard)
        return _unless(gone, "the index did not remove the record")

    def _take_lease(self) -> str:
        mine = self._index.lease(self._lease, "a", ttl_ms=1000 * _TTL_S)
        other = self._index.lease(self._lease, "b", ttl_ms=1000 * _TTL_S)
        self._index.release(self._lease, "a")
        return _unless(mine and not other, "two owners hold the same lease")


def _index_read_steps(index: WriteIndex) -> Sequence[Step]:
    namespace = secrets.token_hex(NAMESPACE_HEX // 2)
    hashes = [secrets.token_bytes(PREFIX_HASH_BYTES)]
    other = "the index returned a record that cannot exist"
    return (
        Step("check", index.check),
        Step(
            "lookup", lambda: _unless(index.lookup(namespace, hashes) == [None], other), _UNTESTED
        ),
        Step(
            "find",
            lambda: _unless(index.find(namespace, hashes, [_FIELD]) == [None], other),
            _UNTESTED,
        ),
    )


def _unless(right: bool, problem: str) -> str:
    return "" if right else problem
