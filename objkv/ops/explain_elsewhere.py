"""Whether what a match lacks is stored under another name: in another namespace, or without the
salt or the adapter that was asked for."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from objkv.errors import PayloadError
from objkv.index.base import ReadIndex
from objkv.keys.identity import Identity
from objkv.keys.prefix import PromptExtras, prefix_hashes
from objkv.ops.diff import diff
from objkv.ops.ends import stored_namespaces
from objkv.ops.identities import read_identity
from objkv.ops.match import match_prompt
from objkv.stores.base import ReadStore

NAMESPACES_MAX: Final = 64
"""Others that are looked at: a lookup each."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Another namespace that has more of the prompt."""

    namespace: str
    tokens: int
    """Of the prompt that would be served there."""
    reason: str
    """Why that one does not share with the one that was asked for."""


def find_elsewhere(
    bulk: ReadStore,
    index: ReadIndex,
    identity: Identity,
    tokens: Sequence[int],
    extras: PromptExtras,
    *,
    token_end: int,
) -> list[Elsewhere]:
    """Other namespaces in which at least the first ``token_end`` tokens are stored, or those of its
    whole chunks; the longest match first."""
    own, found = identity.namespace(), []
    names = [name for name in stored_namespaces(bulk) if name != own]
    for name in names[:NAMESPACES_MAX]:
        try:
            other = read_identity(bulk, name)
        except PayloadError:
            continue  # of another version, or of encoder outputs
        if other is None:
            continue
        served = match_prompt(index, other, tokens, extras).usable_tokens
        if served >= token_end // other.chunk_tokens * other.chunk_tokens > 0:
            reason = diff(json.loads(identity.canonical()), json.loads(other.canonical())).reason
            found.append(Elsewhere(name, served, reason))
    return sorted(found, key=lambda one: (-one.tokens, one.namespace))


def without_extras(
    index: ReadIndex, identity: Identity, tokens: Sequence[int], extras: PromptExtras, number: int
) -> str | None:
    """A sentence, if chunk ``number`` is stored without the salt or the adapter of ``extras``."""
    tries: list[tuple[str, PromptExtras]] = []
    if extras.salt is not None:
        tries.append(("without the cache_salt", replace(extras, salt=None)))
    if extras.lora_digest is not None:
        tries.append(("without the adapter", replace(extras, lora_digest=None)))
    if extras.salt is not None and extras.lora_digest is not None:
        both = replace(extras, salt=None, lora_digest=None)
        tries.append(("without the cache_salt and the adapter", both))
    namespace, size = identity.namespace(), identity.chunk_tokens
    for told, other in tries:
        wanted = prefix_hashes(namespace, tokens, size, other)[number]
        if index.lookup(namespace, [wanted])[0] is not None:
            return f"the same tokens are stored {told}, and so not for this request"
    return None
