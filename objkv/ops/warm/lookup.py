"""What of a prompt is stored, as the replicas would find it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from objkv.cache.match import usable_chunks
from objkv.errors import PayloadError
from objkv.index.base import ReadIndex, Record
from objkv.keys.identity import Identity
from objkv.keys.prefix import PromptExtras, prefix_hashes
from objkv.ops.backends_view import HANDOFF_LAYOUT, read_identity, stored_namespaces
from objkv.stores.base import ReadStore


@dataclass(frozen=True, slots=True)
class Found:
    """Of one prompt."""

    chunks: int
    """That the prompt has."""
    usable: int
    """That would be served, from the first one on."""
    nbytes: tuple[int, ...]
    """Bytes stored of each chunk."""

    @property
    def is_all(self) -> bool:
        """Whether there is nothing left to compute and save."""
        return self.usable == self.chunks


class PromptLookup:
    """The chunks of one namespace, by the index. Safe from many threads; raises ``StoreError``."""

    def __init__(
        self, index: ReadIndex, identity: Identity, adapters: Mapping[str, bytes] | None = None
    ) -> None:
        """``adapters``: content digests of LoRA adapters by the names that requests have."""
        self._index = index
        self._adapters = adapters or {}
        self.identity = identity
        self.namespace = identity.namespace()

    def hashes(
        self, tokens: Sequence[int], salt: str | None = None, adapter: str | None = None
    ) -> list[bytes]:
        """Names of the prompt's whole chunks: what can be stored of it."""
        digest = None if adapter is None else self._adapters[adapter]
        extras = PromptExtras(lora_digest=digest, salt=salt)
        return prefix_hashes(self.namespace, tokens, self.identity.chunk_tokens, extras)

    def find(self, hashes: Sequence[bytes]) -> Found:
        """What is there of them, in one round trip."""
        if not hashes:
            return Found(0, 0, ())
        records = self._index.lookup(self.namespace, hashes)
        shards = [None if record is None else record.shards for record in records]
        usable = usable_chunks(shards, self.identity.groups, self.identity.chunk_tokens)
        nbytes = tuple(0 if record is None else record.nbytes for record in records)
        return Found(len(hashes), usable, nbytes)

    def records(self, hashes: Sequence[bytes]) -> list[Record]:
        """What the index knows of them."""
        found = self._index.lookup(self.namespace, hashes) if hashes else []
        return [record for record in found if record is not None]


def known_identities(bulk: ReadStore) -> dict[str, Identity]:
    """The namespaces that replicas have announced, without those that hold no chunks of KV: encoder
    outputs, and hand-offs."""
    found = {}
    for name in stored_namespaces(bulk):
        try:
            identity = read_identity(bulk, name)
        except PayloadError:  # of encoder outputs, or damaged: nothing to be matched there
            continue
        if identity is not None and identity.page_layout != HANDOFF_LAYOUT:
            found[name] = identity
    return found
