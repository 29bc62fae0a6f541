"""Tries each operation that a role uses once, on a payload and a record of its own.

What is not deleted at the end, because a writer may not delete, expires: see ``ops.bench.sample``.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
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
_AGAIN = "use a server that supports PUT with If-None-Match: * (AWS S3, Ceph and MinIO do)"
_FIELD = "0.L0-1_H0-1"
_IN_REDIS = ("get", "get into buffer")
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
    """The suggested fix, or how to check what was not checked. Empty if ``detail`` says it."""


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
    steps = [Step("check", store.check)]
    with ExitStack() as stack:
        if role == "writer":

            def put() -> str:
                stack.enter_context(stored_for_a_while(store, samples, expires=area == "hot"))
                is_put = store.put_if_absent(key, value)
                return _unless(is_put, "the store reports a new key as present")

            def put_again() -> str:
                is_put = store.put_if_absent(key, value[::-1])
                return _unless(not is_put, "a second writer overwrote the first")

            steps += [Step("put", put, _PROXY), Step("put refused when present", put_again, _AGAIN)]
            steps += _read_steps(store, key, value)
        else:
            # The rights of other roles in Redis do not suffice for all.
            every = _read_steps(store, key, None)
            steps += [one for one in every if listed is not None or one.name in _IN_REDIS]
        if listed is not None:
            steps.append(_list_step(listed, key, found=role == "writer"))
        if role == "sweeper":
            steps.append(Step("delete", lambda: (store.delete(key), "")[1]))
        return run_steps(area, steps)


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


def _list_step(listed: ReadStore, key: str, *, found: bool) -> Step:
    def scan() -> str:
        entry = next(listed.scan(f"{key.rpartition('/')[0]}/"), None)
        return _unless(found or entry is None or entry.key != key, "the list has other keys")

    return Step("list", scan, _PROXY)


def run_steps(area: Area, steps: Iterable[Step]) -> list[Check]:
    """Run the steps in order. After a step that raised an error, the rest is not checked."""
    checks: list[Check] = []
    broken = ""
    for step in steps:
        if broken:
            checks.append(Check(area, step.name, "not checked", f"because {broken} failed"))
            continue
        try:
            problem = step.act()
        except StoreError as exc:
            checks.append(failure(area, step.name, exc))
            broken = step.name
        else:
            status: Status = "failed" if problem else "ok"
            checks.append(Check(area, step.name, status, problem or "", step.fix * bool(problem)))
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


def probe_index(role: Role, index: WriteIndex) -> list[Check]:
    """Probe the operations of ``role`` on the index: of writers and sweepers, publish, look up,
    count a hit, forget and lease, in a namespace of its own. Its record and its lease expire on
    their own."""
    namespace = secrets.token_hex(NAMESPACE_HEX // 2)
    prefix_hash = secrets.token_bytes(PREFIX_HASH_BYTES)
    if role == "reader":
        return run_steps("index", _index_read_steps(index, namespace, [prefix_hash]))
    shard = ShardRecord(1, 1, True, False, secrets.token_hex(8), int(time.time()))

    def publish() -> None:
        chunk = ChunkEntry(namespace, prefix_hash, bytes(PREFIX_HASH_BYTES), 0, 1)
        index.publish(chunk, {_FIELD: shard}, ttl_s=_TTL_S)

    def lookup() -> str:
        [record] = index.lookup(namespace, [prefix_hash])
        same = record is not None and record.shards.get(_FIELD) == shard
        return _unless(same, "the index does not find the published record")

    def touch() -> str:
        index.touch(namespace, [prefix_hash], ttl_s=_TTL_S)
        [record] = index.lookup(namespace, [prefix_hash])
        return _unless(record is not None and record.hits == 1, "the index did not count the hit")

    def forget() -> str:
        if index.forget(namespace, prefix_hash, _FIELD, replace(shard, nbytes=2)):
            return "the index removed a record that had changed"
        gone = index.forget(namespace, prefix_hash, _FIELD, shard)
        return _unless(gone, "the index did not remove the record")

    def lease() -> str:
        path = f"doctor/{secrets.token_hex(8)}"
        mine, other = (index.lease(path, owner, ttl_ms=1000 * _TTL_S) for owner in "ab")
        index.release(path, "a")
        return _unless(mine and not other, "two owners hold the same lease")

    steps = (
        Step("check", index.check),
        Step("publish", publish, _VOLATILE),
        Step("lookup", lookup, _VOLATILE),
        Step("touch", touch, _VOLATILE),
        Step("forget", forget, _UNTESTED),
        Step("lease", lease, _UNTESTED),
    )
    checks = run_steps("index", steps)
    if any(check.status in BAD for check in checks):
        with suppress(StoreError):
            index.forget(namespace, prefix_hash, _FIELD, shard)
    return checks


def _index_read_steps(
    index: WriteIndex, namespace: str, hashes: Sequence[bytes]
) -> tuple[Step, ...]:
    other = "the index returned a record that cannot exist"

    def lookup() -> str:
        return _unless(index.lookup(namespace, hashes) == [None], other)

    def find() -> str:
        return _unless(index.find(namespace, hashes, [_FIELD]) == [None], other)

    found = Step("lookup", lookup, _UNTESTED), Step("find", find, _UNTESTED)
    return Step("check", index.check), *found


def _unless(right: bool, problem: str) -> str:
    return "" if right else problem
