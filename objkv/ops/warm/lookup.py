"""Looks up stored chunks of a prompt, as replicas do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from objkv.cache.match import shards_to_read, usable_chunks
from objkv.errors import PayloadError
from objkv.index.base import ReadIndex
from objkv.keys.identity import Identity
from objkv.keys.prefix import PromptExtras, prefix_hashes
from objkv.ops.backends_view import HANDOFF_LAYOUT, read_identity, stored_namespaces
from objkv.stores.base import ReadStore


@dataclass(frozen=True, slots=True)
class Found:
    """The lookup's result for one prompt."""

    chunks: int
    """The prompt's whole chunks."""
    usable: int
    """Leading chunks that would be served."""
    nbytes: tuple[int, ...]
    """Stored bytes of each chunk."""

    @property
    def is_all(self) -> bool:
        """Whether all chunks are stored."""
        return self.usable == self.chunks


class PromptLookup:
    """Looks up chunks of one namespace in the index. Safe from many threads. Raises
    ``StoreError``."""

    def __init__(
        self, index: ReadIndex, identity: Identity, adapters: Mapping[str, bytes] | None = None
    ) -> None:
        """``adapters``: content digests of LoRA adapters by their names in requests."""
        self._index = index
        self._adapters = adapters or {}
        self.identity = identity
        self.namespace = identity.namespace()

    def hashes(
        self, tokens: Sequence[int], salt: str | None = None, adapter: str | None = None
    ) -> list[bytes]:
        """Return the prefix hashes of the prompt's whole chunks; only these can be stored."""
        digest = None if adapter is None else self._adapters[adapter]
        extras = PromptExtras(lora_digest=digest, salt=salt)
        return prefix_hashes(self.namespace, tokens, self.identity.chunk_tokens, extras)

    def find(self, hashes: Sequence[bytes]) -> Found:
        """Look up the chunks in one round trip."""
        if not hashes:
            return Found(0, 0, ())
        records = self._index.lookup(self.namespace, hashes)
        groups = self.identity.groups
        shards = [shards_to_read(record, len(groups)) for record in records]
        usable = usable_chunks(shards, groups, self.identity.chunk_tokens)
        nbytes = tuple(0 if record is None else record.nbytes for record in records)
        return Found(len(hashes), usable, nbytes)


def known_identities(bulk: ReadStore) -> dict[str, Identity]:
    """Return the identities of all namespaces that hold KV chunks, which excludes encoder outputs
    and hand-offs."""
    found = {}
    for name in stored_namespaces(bulk):
        try:
            identity = read_identity(bulk, name)
        except PayloadError:  # encoder outputs, or damaged: no chunks to match
            continue
        if identity is not None and identity.page_layout != HANDOFF_LAYOUT:
            found[name] = identity
    return found
