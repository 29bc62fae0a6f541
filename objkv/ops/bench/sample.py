"""Test data of the bench: payloads of random bytes, and index records of a prompt."""

from dataclasses import dataclass

import numpy as np

# Imported early: numpy imports it on first use, and would lose an interrupt during that import.
from numpy.random import default_rng

from objkv.codec.payload import (
    Claim,
    LayerSpec,
    Provenance,
    check_frames,
    encode,
    read_claimed,
)
from objkv.errors import PayloadError
from objkv.index.base import ChunkEntry, ShardRecord, WriteIndex
from objkv.keys.chunk import ChunkKey
from objkv.keys.prefix import prefix_hashes, root_hash, token_digest
from objkv.keys.topology import Shard
from objkv.stores.base import ReadValues

NAMESPACE = "0" * 32
FOLDER = "bench"
"""The first folder of the keys in ``PayloadSample``."""
CHUNK_TOKENS = 256
FIELD = "0.L0-32_H0-8"
RECORD = ShardRecord((32 << 20) + 12_288, 32 << 20, True, False, "0" * 16, 1)
_CONTENT, _BLOCK_TOKENS = 256, 16


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a payload: ``layers`` layers of ``layer_bytes`` each, BF16."""

    name: str
    layers: int
    layer_bytes: int

    def __post_init__(self) -> None:
        assert self.layer_bytes % (_BLOCK_TOKENS * _CONTENT * 2) == 0

    @property
    def raw_bytes(self) -> int:
        """Bytes of all pages."""
        return self.layers * self.layer_bytes

    def specs(self) -> list[LayerSpec]:
        """Return the layers' specs."""
        blocks = self.layer_bytes // (_BLOCK_TOKENS * _CONTENT * 2)
        shape = (blocks, 1, _BLOCK_TOKENS, _CONTENT)
        return [LayerSpec(f"layers.{i}", "BF16", shape) for i in range(self.layers)]


# With its header, a payload of 256 KiB is just below that size, as it is put in Redis.
PAYLOAD_256_KIB = Shape("256 KiB", layers=15, layer_bytes=16 << 10)
PAYLOAD_8_MIB = Shape("8 MiB", layers=32, layer_bytes=256 << 10)


@dataclass(frozen=True, slots=True)
class PayloadSample:
    """A payload, its key, and the claim and layers that a reader expects."""

    key: str
    claim: Claim
    layers: tuple[LayerSpec, ...]
    payload: memoryview


def make_samples(
    shape: Shape, count: int, folder: str = FOLDER, *, namespace: str = NAMESPACE
) -> list[PayloadSample]:
    """Return ``count`` different payloads in codec ``none``, with keys below ``folder``."""
    specs, provenance = tuple(shape.specs()), Provenance(token_digest(()), "bench", 0)
    page = np.frombuffer(default_rng(0).bytes(shape.layer_bytes), np.uint8)
    samples = []
    for number in range(count):
        key = ChunkKey(namespace, default_rng(number).bytes(20), 0, Shard(0, shape.layers, 0, 1))
        claim = Claim(key, root_hash(namespace), 0, _BLOCK_TOKENS * specs[0].shape[0])
        # Different bytes in each layer of each payload, at the cost of one pass.
        first = number * shape.layers
        pages = [(page ^ np.uint8((first + i) % 256)).data for i in range(shape.layers)]
        payload = encode(claim, specs, pages, codec="none", provenance=provenance)
        samples.append(PayloadSample(f"{folder}/{key.path()}", claim, specs, payload))
    return samples


def get_verified(store: ReadValues, sample: PayloadSample, slab: memoryview) -> None:
    """Get a sample into ``slab`` and verify every byte. Raises ``PayloadError`` if that fails."""
    nbytes = store.get_into(sample.key, slab)
    if nbytes is None:
        raise PayloadError(f"{sample.key} is missing")
    header = read_claimed(slab[:nbytes], sample.claim, sample.layers)
    if header.nbytes != nbytes:
        raise PayloadError(f"{sample.key} has {nbytes} bytes, its header states {header.nbytes}")
    check_frames(header, slab[:nbytes])


def chunk_hashes(chunks: int) -> list[bytes]:
    """Return the prefix hashes of a prompt of ``chunks`` chunks."""
    return prefix_hashes(NAMESPACE, range(chunks * CHUNK_TOKENS), CHUNK_TOKENS)


def publish(index: WriteIndex, hashes: list[bytes], *, ttl_s: int, namespace: str) -> None:
    """Publish a record for each of ``hashes``."""
    parent = root_hash(namespace)
    for number, prefix_hash in enumerate(hashes):
        start = number * CHUNK_TOKENS
        entry = ChunkEntry(namespace, prefix_hash, parent, start, start + CHUNK_TOKENS)
        index.publish(entry, {FIELD: RECORD}, ttl_s=ttl_s)
        parent = prefix_hash
