"""Stores with known defects, for tests of the commands that find them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np

from objkv.assembly.backends import Backends
from objkv.cache.chunks import shard_record
from objkv.codec.payload import Header, Provenance, read_header
from objkv.codec.seal import Seal
from objkv.index.base import ChunkEntry
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import Identity, identity_path, sealed_extra
from objkv.keys.prefix import prefix_hashes, root_hash, token_digest
from objkv.keys.topology import Shard
from tests.support import samples
from tests.support.samples import CHUNK

CHAIN_CHUNKS = 8
"""Chunks per prompt."""
SHARDS = (None, Shard(0, 2, 0, 1))
IDENTITY = replace(
    samples.IDENTITY,
    model="acme/damaged",
    groups=(replace(samples.IDENTITY.groups[0], content=32),),
    weights_epoch=3,
)
_CODECS = ("none", "blosc")


@dataclass(frozen=True, slots=True)
class Defects:
    """How many payloads of each kind to plant."""

    good: int = 64
    orphan: int = 0
    missing: int = 0
    old_epoch: int = 0
    unidentified: int = 0
    header: int = 0
    """With a flipped bit in the header; so ``frame`` in a frame."""
    frame: int = 0
    short: int = 0
    """Without their last byte."""
    empty: int = 0
    foreign: int = 0
    """Intact, but of another chunk."""
    mismatch: int = 0
    """With a record that contradicts their header."""
    hot: int = 0
    """With a hot copy that has a flipped bit; none without a hot store."""


@dataclass(slots=True)
class Planted:
    namespace: str
    paths: dict[str, list[str]] = field(default_factory=dict)

    def __getitem__(self, kind: str) -> list[str]:
        return self.paths.get(kind, [])


class DamagedStore:
    """Writes payloads as replicas do, and then damages some."""

    def __init__(
        self,
        ends: Backends,
        *,
        seed: int = 0,
        seal: Seal | None = None,
        seals: tuple[str, ...] = (),
    ) -> None:
        """``seal`` seals all payloads; ``seals`` names the ways it does so."""
        self._ends = ends
        self._seal = seal
        self._identity = replace(IDENTITY, extra=sealed_extra(IDENTITY.extra, seals))
        self._seed = seed
        self._made = 0
        self.planted = Planted(self._identity.namespace())

    def plant(self, defects: Defects) -> Planted:
        own = self._identity
        old = replace(own, weights_epoch=own.weights_epoch - 1)
        for identity in (own, old) if defects.old_epoch else (own,):
            self._ends.bulk.put(identity_path(identity.namespace()), identity.canonical())
        for kind in (one.name for one in fields(defects)):
            count = getattr(defects, kind)
            if kind == "hot" and self._ends.hot is None:
                count = 0
            self.planted.paths[kind] = sorted(self._one(kind, old) for _ in range(count))
        return self.planted

    def _one(self, kind: str, old: Identity) -> str:
        namespace = self._identity.namespace()
        if kind == "old_epoch":
            namespace = old.namespace()
        if kind == "unidentified":
            namespace = "5" * 32
        chunk, tokens = self._next(namespace)
        key = ChunkKey(namespace, chunk.prefix_hash, 0, SHARDS[self._made % len(SHARDS)])
        codec = _CODECS[self._made % len(_CODECS)]
        payload = make_payload(key, chunk, tokens, codec=codec, seal=self._seal)
        header = read_header(payload)
        record = shard_record(header)
        if spoil := _SPOILERS.get(kind):
            payload = spoil(payload, header)
        if kind == "foreign":
            other = ChunkKey(namespace, bytes(20), 0, key.shard)
            payload = make_payload(other, chunk, tokens, codec="none", seal=self._seal)
        if kind != "missing":
            self._ends.bulk.put_if_absent(key.path(), payload)
        if kind == "mismatch":
            record = replace(record, header_checksum="0" * 32)
        if kind == "hot" and self._ends.hot is not None:
            self._ends.hot.put(key.path(), _flipped(payload, len(payload) - 1))
            record = replace(record, hot=True)
        if kind not in ("orphan", "unidentified"):
            self._ends.index.publish(chunk, {key.field: record}, ttl_s=86_400)
        return key.path()

    def _next(self, namespace: str) -> tuple[ChunkEntry, Sequence[int]]:
        """Return the next chunk. No two calls return chunks of the same prompt."""
        number, place = divmod(self._made, CHAIN_CHUNKS)
        self._made += 1
        first = self._seed * 1_000_000 + number * CHAIN_CHUNKS * CHUNK
        tokens = range(first, first + (place + 1) * CHUNK)
        hashes = prefix_hashes(namespace, tokens, CHUNK)
        parent = hashes[-2] if place else root_hash(namespace)
        start = place * CHUNK
        chunk = ChunkEntry(namespace, hashes[-1], parent, start, start + CHUNK)
        return chunk, tokens[start:]


def make_payload(
    key: ChunkKey,
    chunk: ChunkEntry,
    tokens: Sequence[int],
    *,
    codec: str,
    layer_items: int = 32,
    seal: Seal | None = None,
) -> bytes:
    """Return a compressible payload whose pages depend only on its key and length."""
    chance = np.random.default_rng(list(key.prefix_hash))
    told = Provenance(token_digest(tokens), "damage:0", 1_700_000_000)
    return samples.payload_of(
        key,
        chunk,
        told,
        codec,
        width=layer_items,
        pages=lambda _, nbytes: chance.integers(0, 4, nbytes, np.uint8).tobytes(),
        seal=seal,
    )


def _flipped(payload: bytes, place: int) -> bytes:
    spoilt = bytearray(payload)
    spoilt[place] ^= 4
    return bytes(spoilt)


_SPOILERS: dict[str, Callable[[bytes, Header], bytes]] = {
    "header": lambda payload, header: _flipped(payload, 200),
    "frame": lambda payload, header: _flipped(payload, header.frames.starts[-1]),
    "short": lambda payload, header: payload[:-1],
    "empty": lambda payload, header: b"",
}
