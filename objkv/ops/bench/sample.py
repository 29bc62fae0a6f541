"""Test data of ``bench`` and ``doctor``: payloads of random bytes in a namespace of their own.

They have no record, so ``objkv sweep`` deletes them like any other such payload: a writer may not
delete what it has put.
"""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from random import Random

from objkv.codec.payload import check_frames, encode, read_claimed
from objkv.codec.values import Claim, LayerSpec, Provenance
from objkv.errors import PayloadError, StoreError
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import GroupIdentity, Identity, identity_path
from objkv.keys.prefix import PREFIX_HASH_BYTES, root_hash, token_digest
from objkv.keys.topology import Shard
from objkv.ops.backends_view import SAMPLE_LAYOUT
from objkv.stores.base import HotStore, ReadValues

CHUNK_TOKENS = 256
_CONTENT, _BLOCK_TOKENS = 256, 16
IDENTITY = Identity(
    model="objkv-bench",
    weights="none",
    weights_epoch=0,
    tenant="objkv-bench",
    quantization=None,
    kv_dtype="bfloat16",
    groups=(GroupIdentity("full", None, ("layers.0",), 1, _CONTENT, _BLOCK_TOKENS),),
    page_layout=SAMPLE_LAYOUT,
    chunk_tokens=CHUNK_TOKENS,
)
"""Of the namespace of all samples, which no replica has."""
NAMESPACE = IDENTITY.namespace()


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a payload: ``layers`` layers of ``layer_bytes`` each, BF16."""

    name: str
    layers: int
    layer_bytes: int

    def __post_init__(self) -> None:
        assert self.layer_bytes % (_BLOCK_TOKENS * _CONTENT * 2) == 0

    def specs(self) -> list[LayerSpec]:
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


def make_samples(shape: Shape, count: int) -> list[PayloadSample]:
    """Return ``count`` different payloads in codec ``none``, with random keys."""
    specs, provenance = tuple(shape.specs()), Provenance(token_digest(()), "bench", 0)
    page = Random(0).randbytes(shape.layer_bytes)  # noqa: S311  # not a secret
    samples = []
    for number in range(count):
        prefix_hash = secrets.token_bytes(PREFIX_HASH_BYTES)
        key = ChunkKey(NAMESPACE, prefix_hash, 0, Shard(0, shape.layers, 0, 1))
        claim = Claim(key, root_hash(NAMESPACE), 0, _BLOCK_TOKENS * specs[0].shape[0])
        # Different bytes in each layer of each payload, at the cost of one pass.
        first = number * shape.layers
        keys = [(first + i) % 256 for i in range(shape.layers)]
        pages = [memoryview(page.translate(bytes(b ^ key for b in range(256)))) for key in keys]
        payload = encode(claim, specs, pages, codec="none", provenance=provenance)
        samples.append(PayloadSample(key.path(), claim, specs, payload))
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


@contextmanager
def stored_for_a_while(
    store: HotStore, samples: list[PayloadSample], *, expires: bool
) -> Iterator[None]:
    """After the block, delete the samples that it has put, as far as the rights allow it.
    ``expires``: whether the store lets values expire by itself. If not, the document of the
    samples' namespace is put first, without which no sweep would judge them."""
    paths = [sample.key for sample in samples]
    if not expires and store.put_if_absent(identity_path(NAMESPACE), IDENTITY.canonical()):
        paths.append(identity_path(NAMESPACE))
    try:
        yield
    finally:
        with suppress(StoreError):
            for path in paths:
                store.delete(path)
