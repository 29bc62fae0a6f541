"""What the processes that are killed do: save as replicas do, sweep, rebuild."""

from collections.abc import Sequence
from dataclasses import dataclass

from objkv.assembly.backends import Backends
from objkv.cache.chunks import CacheSettings, ChunkCache
from objkv.codec.payload import read_header
from objkv.index.base import ChunkEntry
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import identity_path
from objkv.keys.prefix import prefix_hashes, root_hash
from objkv.ops.backends_view import BackendsView
from objkv.ops.rebuild import Rebuild
from objkv.ops.runs import Counters, WorkPool
from objkv.ops.sweep.remove import SweepLimits
from objkv.ops.sweep.sweep import Sweep
from objkv.ops.verify import PAYLOADS, RECORDED, Budget, Verify
from objkv.telemetry import NullRecorder
from tests.contracts.damage import CHUNK, IDENTITY, SHARDS
from tests.crash.places import LEASE_MS
from tests.support.samples import payload_of, walked

NAMESPACE = IDENTITY.namespace()
LARGE_ITEMS = 96 << 10
"""Of a layer: a put of such a payload takes a while."""


@dataclass(frozen=True)
class Save:
    """One chunk to be saved; what is in it follows from its name."""

    key: ChunkKey
    chunk: ChunkEntry
    tokens: Sequence[int]
    is_large: bool = False

    def payload(self) -> bytes:
        items = LARGE_ITEMS if self.is_large else 32
        return payload_of(self.key, self.chunk, self.tokens, "none", width=items, is_varied=True)


def saves(first_token: int, count: int, *, large: int = 0) -> list[Save]:
    """The chunks of one prompt, the last ``large`` of them large."""
    tokens = range(first_token, first_token + count * CHUNK)
    hashes = prefix_hashes(NAMESPACE, tokens, CHUNK)
    made = []
    for place, prefix_hash in enumerate(hashes):
        parent = hashes[place - 1] if place else root_hash(NAMESPACE)
        start = place * CHUNK
        chunk = ChunkEntry(NAMESPACE, prefix_hash, parent, start, start + CHUNK)
        key = ChunkKey(NAMESPACE, prefix_hash, 0, SHARDS[place % 2])
        made.append(Save(key, chunk, tokens, place >= count - large))
    return made


def save_all(
    backends: Backends, wanted: Sequence[Save], writer: str, *, lease_ms: int = LEASE_MS
) -> int:
    """Save each as ``Saver`` does; how many."""
    settings = CacheSettings(writer, ttl_s=3600, lease_ms=lease_ms, hot_save_bytes_max=1 << 20)
    cache = ChunkCache(backends.bulk, backends.hot, backends.index, settings, NullRecorder())
    backends.bulk.put_if_absent(identity_path(NAMESPACE), IDENTITY.canonical())
    saved = 0
    for save in wanted:
        payload = save.payload()
        if not cache.take_lease(save.key.path()):
            continue
        try:
            header = read_header(payload)
            cache.save(header.claim.key.path(), payload, header)
            saved += 1
        finally:
            cache.release_lease(save.key.path())
    return saved


def sweep_all(view: BackendsView) -> Counters:
    """As ``objkv sweep --apply --force --grace 0``."""
    pool = WorkPool(workers=2)
    limits = SweepLimits(apply=True, grace_s=-60, put_s=-60)
    work = Sweep(view, walked(view), limits)
    for units in (work.leftovers(), work.parts(), work.missing(), work.documents(), work.totals()):
        pool.run(units)
    return pool.counters


def rebuild_all(view: BackendsView) -> Counters:
    """As ``objkv rebuild``."""
    pool = WorkPool(workers=2)
    walk = walked(view)
    work, found = Rebuild(view, apply=True), walk.scope.namespaces
    pool.run(work.parts(walk.inventory, found))
    pool.run(work.parts(walk.inventory, found, lost=True))
    pool.run(work.namespaces(found))
    return pool.counters


def verify_all(view: BackendsView) -> Counters:
    """As ``objkv verify --all``."""
    pool, walk = WorkPool(workers=2), walked(view)
    work = Verify(view, walk.scope.namespaces, quarantine=False, budget=Budget(1 << 30))
    where = PAYLOADS if view.is_own_index else RECORDED
    pool.run(work.parts(walk.inventory, walk.inventory.slices(where), where))
    return pool.counters
