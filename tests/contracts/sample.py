"""Stores with made-up KV, to try routers and reports without an engine.

The payloads are valid and unsealed, and contain no model's KV.
"""

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from objkv.assembly.backends import Backends, open_backends
from objkv.cache.chunks import shard_record
from objkv.codec.payload import Claim, LayerSpec, Provenance, encode, read_header
from objkv.config import local_path, resolve_config
from objkv.index.base import ChunkEntry
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import GroupIdentity, Identity, identity_path
from objkv.keys.prefix import PromptExtras, prefix_hashes, root_hash, token_digest
from objkv.telemetry import NullRecorder

_LAYERS = ("layers.0", "layers.1")
_HEADS, _BLOCK_TOKENS, _CONTENT = 2, 16, 16


@dataclass(frozen=True, slots=True)
class SamplePrompt:
    """A prompt that a made-up replica has computed."""

    tokens: Sequence[int]
    model: str = "acme/sample"
    tenant: str = "default"
    cache_salt: str | None = None
    age_s: float = 0.0
    """Time since its payloads were written."""
    hits: int = 0
    """How often each chunk has been loaded."""


def save_sample(
    prompts: Iterable[SamplePrompt],
    *,
    bulk_url: str,
    index_url: str,
    chunk_tokens: int = 256,
    **settings: Any,
) -> int:
    """Save every whole chunk of ``prompts`` as a replica does; return the number of new chunks.

    ``settings``: others by name, as for ``objkv.open``. Raises ``ConfigError`` and ``StoreError``.
    """
    config = resolve_config({"bulk_url": bulk_url, "index_url": index_url, **settings}).config
    folder = local_path(bulk_url) if bulk_url.startswith("file:") else None
    with open_backends(config, NullRecorder()) as stores:
        return sum(_save(stores, one, chunk_tokens, folder, config.ttl_s) for one in prompts)


def _save(
    stores: Backends, prompt: SamplePrompt, size: int, folder: Path | None, ttl_s: int
) -> int:
    identity = _identity(prompt, size)
    namespace, now_s = identity.namespace(), time.time()
    stores.bulk.put_if_absent(identity_path(namespace), identity.canonical())
    hashes = prefix_hashes(namespace, prompt.tokens, size, PromptExtras(salt=prompt.cache_salt))
    saved = 0
    for number, prefix_hash in enumerate(hashes):
        parent = hashes[number - 1] if number else root_hash(namespace)
        key = ChunkKey(namespace, prefix_hash, 0)
        entry = ChunkEntry(namespace, prefix_hash, parent, number * size, (number + 1) * size)
        payload = _payload(key, entry, prompt, int(now_s - prompt.age_s))
        if not stores.bulk.put_if_absent(key.path(), payload):
            continue
        saved += 1
        if folder is not None:
            os.utime(folder / key.path(), (now_s, now_s - prompt.age_s))
        stores.index.publish(entry, {key.field: shard_record(read_header(payload))}, ttl_s=ttl_s)
    for _ in range(prompt.hits):
        stores.index.touch(namespace, hashes, ttl_s=ttl_s)
    return saved


def _identity(prompt: SamplePrompt, size: int) -> Identity:
    group = GroupIdentity("full", None, _LAYERS, _HEADS, _CONTENT, _BLOCK_TOKENS)
    return Identity(
        model=prompt.model,
        weights="sample",
        quantization=None,
        kv_dtype="bfloat16",
        groups=(group,),
        page_layout="canonical",
        chunk_tokens=size,
        weights_epoch=0,
        tenant=prompt.tenant,
    )


def _payload(key: ChunkKey, entry: ChunkEntry, prompt: SamplePrompt, created_s: int) -> bytes:
    blocks = (entry.token_end - entry.token_start) // _BLOCK_TOKENS
    shape = (blocks, _HEADS, _BLOCK_TOKENS, _CONTENT)
    layers = [LayerSpec(name, "BF16", shape) for name in _LAYERS]
    pages = [bytes([number]) * layer.nbytes for number, layer in enumerate(layers)]
    tokens = prompt.tokens[entry.token_start : entry.token_end]
    claim = Claim(key, entry.parent_hash, entry.token_start, entry.token_end)
    provenance = Provenance(token_digest(tokens), "sample", created_s)
    return bytes(encode(claim, layers, pages, codec="none", provenance=provenance))
