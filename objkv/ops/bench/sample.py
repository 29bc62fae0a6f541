"""Test data of the benchmarks: payloads whose pages compress about as well as a real model's KV,
and index records for all chunks of one prompt."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Imported early: numpy imports it on first use, and would lose an interrupt during that import.
from numpy.random import default_rng

from objkv.codec.payload import (
    Claim,
    Header,
    LayerSpec,
    Provenance,
    check_frames,
    check_layers,
    encode,
    header_bytes_needed,
    read_claimed,
)
from objkv.errors import PayloadError
from objkv.index.base import ChunkEntry, ShardRecord, WriteIndex
from objkv.keys.chunk import ChunkKey
from objkv.keys.prefix import prefix_hashes, root_hash, token_digest
from objkv.keys.topology import Shard
from objkv.stores.base import ReadStore

NAMESPACE = "0" * 32
FOLDER = "bench"
"""The first folder of every key that a benchmark writes."""
CHUNK_TOKENS = 256
FIELD = "0.L0-32_H0-8"
RECORD = ShardRecord(
    nbytes=(32 << 20) + 12_288,
    raw_bytes=32 << 20,
    codec="none",
    hot=False,
    header_checksum="0" * 32,
    created_s=1,
)
_CONTENT = 256
_BLOCK_TOKENS = 16
_LENGTH_BYTES = 8


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


# With its header, a payload of 256 KiB or 1 MiB is just below that size, as it is put in Redis.
PAYLOAD_256_KIB = Shape("256 KiB", layers=15, layer_bytes=16 << 10)
PAYLOAD_1_MIB = Shape("1 MiB", layers=15, layer_bytes=64 << 10)
PAYLOAD_8_MIB = Shape("8 MiB", layers=32, layer_bytes=256 << 10)
PAYLOAD_32_MIB = Shape("32 MiB", layers=32, layer_bytes=1 << 20)
"""One chunk of 256 tokens of an 8B model: 32 layers, 8 KV heads of 128."""


@dataclass(frozen=True, slots=True)
class PayloadSample:
    """A payload, its key, and the claim and layers that a reader expects."""

    key: str
    claim: Claim
    layers: tuple[LayerSpec, ...]
    payload: memoryview


def make_samples(shape: Shape, count: int, folder: str = FOLDER) -> list[PayloadSample]:
    """Return ``count`` different payloads in codec ``none``, with keys below ``folder``."""
    specs = tuple(shape.specs())
    page = np.frombuffer(kv_like(shape.layer_bytes), np.uint8)
    samples = []
    for number in range(count):
        claim, provenance = sample_claim(shape, number)
        # Different bytes in each layer of each payload, at the cost of one pass.
        first = number * shape.layers
        pages = [(page ^ np.uint8((first + i) % 256)).data for i in range(shape.layers)]
        payload = encode(claim, specs, pages, codec="none", provenance=provenance)
        samples.append(PayloadSample(f"{folder}/{claim.key.path()}", claim, specs, payload))
    return samples


def sample_claim(shape: Shape, number: int = 0) -> tuple[Claim, Provenance]:
    """Return claim and provenance of a payload of ``shape``; each ``number`` has its own key."""
    prefix_hash = default_rng(number).bytes(20)
    key = ChunkKey(NAMESPACE, prefix_hash, 0, Shard(0, shape.layers, 0, 1))
    tokens = _BLOCK_TOKENS * shape.specs()[0].shape[0]
    claim = Claim(key, root_hash(NAMESPACE), 0, tokens)
    return claim, Provenance(token_digest(()), "objkv bench", 0)


def kv_like(nbytes: int, seed: int = 0) -> bytes:
    """Return BF16 numbers that shuffled zstd makes 1.46 times smaller and shuffled lz4 1.15 to 1.2
    times. As in a trained model, some channels of K are far from zero, and scales differ."""
    source = default_rng(seed)
    values: npt.NDArray[np.float32] = source.standard_normal(
        (nbytes // 2 // _CONTENT, _CONTENT), dtype=np.float32
    )
    far = _CONTENT // 4
    values[:, :far] += 8 * source.standard_normal(far, dtype=np.float32)
    values *= np.exp(source.standard_normal(_CONTENT, dtype=np.float32) / 2)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


class Verifier:
    """Verifies a payload in a slab while it arrives, as a replica does: first the header, then the
    checksum of each complete frame. One instance per get."""

    def __init__(self, sample: PayloadSample, slab: memoryview) -> None:
        self._sample = sample
        self._slab = slab
        self._header: Header | None = None
        self._frames = 0

    def arrived(self, nbytes: int) -> None:
        """The progress callback for ``get_into``. Raises ``PayloadError``."""
        if self._header is None:
            if nbytes < _LENGTH_BYTES or nbytes < header_bytes_needed(self._slab[:nbytes]):
                return
            layers = self._sample.layers
            self._header = read_claimed(self._slab[:nbytes], self._sample.claim, layers)
            check_layers(self._header.frames.layers, layers)
        self._frames = check_frames(self._header, self._slab[:nbytes], self._frames)

    def finish(self, nbytes: int | None) -> None:
        """Finish after all ``nbytes`` have arrived. Raises ``PayloadError`` if not all is valid."""
        if nbytes is None:
            raise PayloadError(f"{self._sample.key} is missing")
        self.arrived(nbytes)
        if self._header is None or self._header.nbytes != nbytes:
            raise PayloadError(f"{self._sample.key}: {nbytes} bytes do not match its header")
        assert self._frames == len(self._header.frames)

    @property
    def frames(self) -> int:
        """The number of frames verified so far."""
        return self._frames


def get_verified(store: ReadStore, sample: PayloadSample, slab: memoryview) -> None:
    """Get a sample into ``slab`` and verify it. Raises ``PayloadError`` if that fails."""
    verifier = Verifier(sample, slab)
    verifier.finish(store.get_into(sample.key, slab, verifier.arrived))


def make_tokens(count: int) -> list[int]:
    """Return the token ids of a prompt."""
    return [(number * 7919) % 128_000 for number in range(count)]


def chunk_hashes(chunks: int) -> list[bytes]:
    """Return the prefix hashes of the prompt's first ``chunks`` chunks."""
    return prefix_hashes(NAMESPACE, make_tokens(chunks * CHUNK_TOKENS), CHUNK_TOKENS)


def publish(
    index: WriteIndex, hashes: list[bytes], *, ttl_s: int = 3_600, namespace: str = NAMESPACE
) -> None:
    """Publish a record for each of ``hashes``."""
    parent = root_hash(namespace)
    for number, prefix_hash in enumerate(hashes):
        start = number * CHUNK_TOKENS
        entry = ChunkEntry(namespace, prefix_hash, parent, start, start + CHUNK_TOKENS)
        index.publish(entry, {FIELD: RECORD}, ttl_s=ttl_s)
        parent = prefix_hash
