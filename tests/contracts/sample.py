"""Stores with made-up KV, to try routers and reports without an engine.

The payloads are valid and unsealed, and contain no model's KV.
"""

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from objkv.assembly.backends import Backends, open_backends
from objkv.config import local_path, resolve_config
from objkv.telemetry import NullRecorder
from tests.support import samples


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
    changes = {"model": prompt.model, "tenant": prompt.tenant, "chunk_tokens": size}
    identity = replace(samples.IDENTITY, **changes)
    namespace, now_s = identity.namespace(), time.time()
    known = {entry.key for entry in stores.bulk.scan(namespace)}
    samples.save_identity(stores.bulk, identity)
    keys = samples.save(
        stores.bulk,
        stores.index,
        prompt.tokens,
        namespace=namespace,
        salt=prompt.cache_salt,
        chunk_tokens=size,
        created_s=int(now_s - prompt.age_s),
        ttl_s=ttl_s,
    )
    new = [key.path() for key in keys if key.path() not in known]
    for path in new if folder is not None else ():
        os.utime(folder / path, (now_s, now_s - prompt.age_s))
    for _ in range(prompt.hits):
        stores.index.touch(namespace, [key.prefix_hash for key in keys], ttl_s=ttl_s)
    return len(new)
