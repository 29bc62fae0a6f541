"""How much an import adds to what tenants have stored."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from objkv.index.base import ReadIndex
from objkv.keys.chunk import ChunkKey
from objkv.ops.bring_in import Arrival
from objkv.ops.ends import CHUNKS_AT_ONCE
from objkv.ops.manifest import Line


def new_bytes(
    index: ReadIndex, lines: Sequence[Line], arrivals: Sequence[Arrival]
) -> dict[str | None, int]:
    """By tenant, the bytes of payloads without a record: those with one are counted already. Every
    tenant of the export is there, also with 0."""
    tenants = {one.namespace.name: one.namespace.tenant for one in arrivals}
    found: dict[str | None, int] = dict.fromkeys(tenants.values(), 0)
    by_namespace: defaultdict[str, list[tuple[ChunkKey, int]]] = defaultdict(list)
    for line in lines:
        key = ChunkKey.parse(line.key)
        by_namespace[key.namespace].append((key, line.nbytes))
    for name, stored in by_namespace.items():
        for start in range(0, len(stored), CHUNKS_AT_ONCE):
            some = stored[start : start + CHUNKS_AT_ONCE]
            found[tenants[name]] += sum(_unrecorded(index, name, some))
    return found


def _unrecorded(
    index: ReadIndex, namespace: str, some: Sequence[tuple[ChunkKey, int]]
) -> Iterator[int]:
    hashes = list(dict.fromkeys(key.prefix_hash for key, _ in some))
    records = dict(zip(hashes, index.lookup(namespace, hashes), strict=True))
    for key, nbytes in some:
        record = records[key.prefix_hash]
        if record is None or key.field not in record.shards:
            yield nbytes
