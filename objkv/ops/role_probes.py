"""Tries what a reader and a sweeper do, who may not do all that replicas do otherwise.

Nothing is put where that is not their right: what they ask for is not there, and not finding it is
what is tried.
"""

import secrets
from collections.abc import Sequence

from objkv.config import Role
from objkv.index.base import PruneIndex
from objkv.keys.identity import NAMESPACE_HEX
from objkv.keys.prefix import PREFIX_HASH_BYTES
from objkv.ops.probes import PROBE_PREFIX, Area, Check, Step, probe_index, probe_store, run_steps
from objkv.stores.base import PruneStore


def probe_store_as(role: Role, area: Area, store: PruneStore) -> list[Check]:
    """What ``role`` does with a store."""
    return (
        probe_store(area, store)
        if role == "writer"
        else run_steps(area, _role_store_steps(role, area, store))
    )


def probe_index_as(role: Role, index: PruneIndex) -> list[Check]:
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


def _read_steps(index: PruneIndex) -> Sequence[Step]:
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
