"""Finds the namespace of endpoints, by a chunk that each of them computes."""

import asyncio
import secrets
from collections.abc import Sequence
from time import monotonic

from objkv.errors import ConfigError
from objkv.index.base import ReadIndex
from objkv.keys.identity import Identity
from objkv.keys.prefix import PromptExtras, prefix_hashes
from objkv.ops.backends_view import HANDOFF_LAYOUT, read_identities, stored_namespaces
from objkv.ops.match import look_up
from objkv.ops.warm.endpoint import Endpoint, EndpointError
from objkv.stores.base import ReadStore

SALT = "objkv-warm-"
"""The start of the salts of probe chunks."""
_CHUNK_TOKENS = 256
"""The default chunk, used while nothing is stored yet."""
_PAUSE_S = 0.1


def hashes_of(identity: Identity, tokens: Sequence[int], salt: str | None) -> list[bytes]:
    """Return the prefix hashes of the prompt's whole chunks; only these can be stored."""
    extras = PromptExtras(salt=salt)
    return prefix_hashes(identity.namespace(), tokens, identity.chunk_tokens, extras)


def known_identities(bulk: ReadStore) -> dict[str, Identity]:
    """Return the identities of all namespaces with KV of prompts, without hand-offs."""
    every = read_identities(bulk, stored_namespaces(bulk))
    return {name: one for name, one in every if one.page_layout != HANDOFF_LAYOUT}


def nothing_saved(endpoint: str, wait_s: float) -> str:
    return (
        f"{endpoint} saved nothing here within {wait_s:.0f} s: check that it uses the objkv "
        "connector, that it may save (kv_role, role, quota), and that its bulk_url and index_url "
        "are those of this command; objkv doctor shows them here, the line 'objkv ready' in the "
        "server's log shows them there"
    )


async def find_identity_of(
    endpoints: Sequence[Endpoint],
    tokens: Sequence[int],
    bulk: ReadStore,
    index: ReadIndex,
    *,
    wait_s: float,
) -> Identity:
    """Return the common identity of all endpoints, and verify that they save to this store.

    Each computes a chunk of ``tokens`` under a random salt, which cannot be stored yet; its
    namespace is the one in which that appears. Raises ``ConfigError`` if it does not within
    ``wait_s``, or if namespaces differ, and ``EndpointError`` if a request fails.
    """
    found = {one.name: await _find(one, tokens, bulk, index, wait_s) for one in endpoints}
    if len({identity.namespace() for identity in found.values()}) > 1:
        each = ", ".join(f"{name} {identity.namespace()}" for name, identity in found.items())
        raise ConfigError(
            f"the endpoints do not share a namespace: {each}; objkv diff shows why; warm each "
            "group of endpoints separately"
        )
    return next(iter(found.values()))


async def _find(
    endpoint: Endpoint, tokens: Sequence[int], bulk: ReadStore, index: ReadIndex, wait_s: float
) -> Identity:
    salt = SALT + secrets.token_hex(8)
    longest, ends_s = 0, 0.0
    while True:
        known = await asyncio.to_thread(known_identities, bulk)
        sizes = {_CHUNK_TOKENS, *(identity.chunk_tokens for identity in known.values())}
        if max(sizes) > longest:  # the first time, and when a namespace of longer chunks appears
            longest = max(sizes)
            await _compute(endpoint, tokens, salt, sorted(sizes, reverse=True), wait_s)
            ends_s = monotonic() + wait_s
        for identity in known.values():
            first = hashes_of(identity, _of_size(tokens, identity.chunk_tokens), salt)
            [record], _ = await asyncio.to_thread(look_up, index, identity, first)
            if record is not None and record.shards:
                return identity
        if monotonic() >= ends_s:
            raise ConfigError(nothing_saved(endpoint.name, wait_s))
        await asyncio.sleep(_PAUSE_S)


async def _compute(
    endpoint: Endpoint, tokens: Sequence[int], salt: str, sizes: Sequence[int], wait_s: float
) -> None:
    """Compute a chunk of the first of ``sizes`` that the endpoint accepts."""
    left, ends_s = list(sizes), monotonic() + wait_s
    while True:
        made = [*_of_size(tokens, left[0]), tokens[0]]  # the last token is never saved
        try:
            await endpoint.compute(made, salt)
            return
        except EndpointError as exc:
            if exc.kind == "refused" and len(left) > 1:  # longer than the model's context
                left.pop(0)
                continue
            pause_s = exc.after_s or 5 * _PAUSE_S
            if exc.kind == "refused" or monotonic() + pause_s >= ends_s:
                raise
            await asyncio.sleep(pause_s)


def _of_size(tokens: Sequence[int], size: int) -> list[int]:
    """Return ``tokens``, cut or repeated to ``size``."""
    return (list(tokens[:size]) * (size // len(tokens[:size]) + 1))[:size]
