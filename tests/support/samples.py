"""A small fleet's leftovers: real payloads, records and an identity, saved as replicas save."""

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Final

import numpy as np

from objkv.cache.chunks import shard_record
from objkv.codec.payload import Claim, LayerSpec, Provenance, encode, read_header
from objkv.codec.seal import Seal
from objkv.index.base import ChunkEntry, PruneIndex, WriteIndex
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import (
    NAMESPACE_HEX,
    GroupIdentity,
    Identity,
    canonical_json,
    identity_path,
)
from objkv.keys.prefix import PromptExtras, prefix_hashes, root_hash, token_digest
from objkv.keys.topology import Shard
from objkv.ops.backends_view import BackendsView
from objkv.ops.inventory.file import Inventory
from objkv.ops.inventory.walk import Walk, find_scope
from objkv.ops.runs import WorkPool
from objkv.stores.base import HotStore, PruneStore, WriteStore

CHUNK = 16
CREATED_S = 1_700_000_000
IDENTITY = Identity(
    model="acme/tiny",
    weights="0" * 16,
    quantization=None,
    kv_dtype="bfloat16",
    groups=(GroupIdentity("full", None, ("l.0", "l.1"), heads=2, content=8, block_size=8),),
    page_layout="canonical",
    chunk_tokens=CHUNK,
    weights_epoch=0,
    tenant="default",
)
NAMESPACE = IDENTITY.namespace()
FIELD: Final = "0"
"""Of a payload that has all of the group."""
LEFT, RIGHT = Shard(0, 2, 0, 1), Shard(0, 2, 1, 2)
TOKENS = tuple(range(100, 100 + 3 * CHUNK))
"""Three chunks."""


def save_identity(bulk: WriteStore, identity: Identity = IDENTITY) -> None:
    bulk.put(identity_path(identity.namespace()), identity.canonical())


def save_in_format(bulk: WriteStore, number: int, *, tenant: str = "default") -> str:
    document = canonical_json({**IDENTITY.document(), "format": number, "tenant": tenant})
    namespace = sha256(document).hexdigest()[:NAMESPACE_HEX]
    bulk.put(identity_path(namespace), document)
    bulk.put(ChunkKey(namespace, bytes(20), 0).path(), bytes(9_000))
    return namespace


def save(
    bulk: WriteStore,
    index: WriteIndex | None,
    tokens: Sequence[int] = TOKENS,
    *,
    shards: Sequence[Shard | None] = (None,),
    codec: str = "none",
    width: int = 8,
    namespace: str = NAMESPACE,
    salt: str | None = None,
    size: int = CHUNK,
    created_s: int | None = None,
    ttl_s: int = 3_600,
) -> list[ChunkKey]:
    """Save every whole chunk of ``tokens``, each of ``size``; bulk first, then the record, unless
    another payload is there. One has four bytes for each token, head and each of ``width``."""
    hashes = prefix_hashes(namespace, tokens, size, PromptExtras(salt=salt))
    keys = []
    for number, prefix_hash in enumerate(hashes):
        parent = hashes[number - 1] if number else root_hash(namespace)
        chunk = ChunkEntry(namespace, prefix_hash, parent, number * size, (number + 1) * size)
        for shard in shards:
            key = ChunkKey(namespace, prefix_hash, 0, shard)
            payload = payload_of(key, chunk, tokens, codec, width=width, created_s=created_s)
            is_stored = bulk.put_if_absent(key.path(), payload) or bulk.get(key.path()) == payload
            if is_stored and index is not None:
                index.publish(chunk, {key.field: shard_record(read_header(payload))}, ttl_s=ttl_s)
            keys.append(key)
    return keys


def payload_of(
    key: ChunkKey,
    chunk: ChunkEntry,
    tokens: Sequence[int],
    codec: str,
    *,
    width: int = 8,
    created_s: int | None = None,
    seal: Seal | None = None,
    is_varied: bool = False,
) -> bytes:
    """A payload of ``chunk``, which ends in ``tokens``, with a true header. Its
    pages are compressible, and depend on its key if ``is_varied``. By default it was written as
    many seconds after ``CREATED_S`` as tokens are before it."""
    blocks = (chunk.token_end - chunk.token_start) // 8
    heads = 2 if key.shard is None else key.shard.head_end - key.shard.head_start
    layers = [LayerSpec(name, "BF16", (blocks, heads, 8, width)) for name in ("l.0", "l.1")]
    pages = [bytes([number]) * layer.nbytes for number, layer in enumerate(layers)]
    if is_varied:
        chance = np.random.default_rng(list(key.prefix_hash))
        pages = [chance.integers(0, 4, layer.nbytes, np.uint8).tobytes() for layer in layers]
    digest = token_digest(tokens[chunk.token_start : chunk.token_end])
    claim = Claim(key, chunk.parent_hash, chunk.token_start, chunk.token_end)
    written_s = CREATED_S + chunk.token_start if created_s is None else created_s
    provenance = Provenance(digest, "host-1:4242", written_s)
    return bytes(encode(claim, layers, pages, codec=codec, provenance=provenance, seal=seal))


def view_of(
    bulk: PruneStore, index: PruneIndex, hot: HotStore | None = None, **agreed: Any
) -> BackendsView:
    usual = {"is_own_index": False, "ttl_s": 3_600, "owner": "test", "admin": index}
    return BackendsView(bulk, hot, index, **{**usual, **agreed})


def walked(view: BackendsView, only: str | None = None) -> Walk:
    walk = Walk(view, Inventory(), find_scope(view, only), 2)
    for units in (walk.records(), walk.payloads(), walk.leftovers()):
        WorkPool(workers=2).run(units)
    walk.judge(ttl_s=view.ttl_s)
    return walk
