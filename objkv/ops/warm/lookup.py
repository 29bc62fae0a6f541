"""Looks up stored chunks of a prompt, as replicas do, and requests those that agents hold back."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import Final, NamedTuple

from objkv.agent.unsaved.requests import CHUNKS_MAX, PutRequest
from objkv.cache.match import usable_chunks
from objkv.errors import PayloadError, StoreDenied
from objkv.index.base import WriteIndex
from objkv.index.shapes import SHAPES_HASH
from objkv.keys.chunk import payload_path
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


class HeldBack(NamedTuple):
    """Chunks that node agents hold back: computed, but stored nowhere."""

    chunks: int
    is_requested: bool
    """Whether their agents will read a request to put them."""


_NOTHING_HELD: Final = HeldBack(0, is_requested=True)
_LOOK_S, _AGAIN_S = 0.3, 1.0
"""Pauses between looks for chunks that are held back, and between requests of the same ones."""
_REFUSED_S: Final = 3.0
"""After this time without an agent that reads requests, none will. Until then, chunks that were
computed before may be on their way to the store."""
_NOT_REQUESTED: Final = (
    "a node agent holds payloads back, and no agent reads a request of this command to store them: "
    "use credentials and the role of a writer here, or set the agent's save_to_bucket to all"
)


class PromptLookup:
    """Looks up chunks of one namespace in the index. Safe from many threads. Raises
    ``StoreError``."""

    def __init__(
        self, index: WriteIndex, identity: Identity, adapters: Mapping[str, bytes] | None = None
    ) -> None:
        """``adapters``: content digests of LoRA adapters by their names in requests."""
        self._index = index
        self._adapters = adapters or {}
        self.identity = identity
        self.namespace = identity.namespace()
        self._fields: tuple[str, ...] = ()
        """Those that the fleet writes, once they are known."""

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
        shards = [None if record is None else record.shards for record in records]
        usable = usable_chunks(shards, self.identity.groups, self.identity.chunk_tokens)
        nbytes = tuple(0 if record is None else record.nbytes for record in records)
        return Found(len(hashes), usable, nbytes)

    def request_puts(self, missing: Sequence[bytes]) -> HeldBack:
        """Request chunks that are not stored of the agents that hold them back. Takes one round
        trip if none does, and otherwise two, and one for each agent. At most ``CHUNKS_MAX`` chunks
        are requested."""
        if not self._fields:
            (record,) = self._index.lookup(self.namespace, [SHAPES_HASH])
            self._fields = () if record is None else tuple(sorted(record.shards))
        held = self._held(missing[:1], self._fields)
        fields = tuple(field for _, field in held)
        wanted: defaultdict[str, dict[bytes, None]] = defaultdict(dict)
        for (chunk, _), holder in self._held(missing[:CHUNKS_MAX], fields).items():
            wanted[holder][chunk] = None
        if not wanted:
            return _NOTHING_HELD
        try:
            sent = [
                self._index.request(holder, PutRequest(self.namespace, fields, (*chunks,)).pack())
                for holder, chunks in wanted.items()
            ]
        except StoreDenied:
            sent = [False]
        return HeldBack(sum(map(len, wanted.values())), all(sent))

    def _held(self, chunks: Sequence[bytes], fields: Sequence[str]) -> dict[tuple[bytes, str], str]:
        """Return the holders of payloads, without those that have none."""
        names = [(chunk, field) for chunk in chunks for field in fields]
        if not names:
            return {}
        holders = self._index.holders([payload_path(self.namespace, *name) for name in names])
        return {name: one for name, one in zip(names, holders, strict=True) if one}


class ChunkRequests:
    """Has agents put the chunks of one prompt, again and again while some are missing."""

    def __init__(self, lookup: PromptLookup, clock: Callable[[], float] = monotonic) -> None:
        self._lookup, self._clock = lookup, clock
        self._next_s, self._refused_s = -inf, inf

    def send(self, missing: Sequence[bytes]) -> str:
        """Request missing chunks, unless that was done just before. Returns why they will not be
        stored, once that is clear, and otherwise an empty text. Raises ``StoreError``."""
        now_s = self._clock()
        if now_s < self._next_s:
            return ""
        held = self._lookup.request_puts(missing)
        self._next_s = now_s + (_AGAIN_S if held.chunks else _LOOK_S)
        self._refused_s = inf if held.is_requested else min(self._refused_s, now_s)
        return _NOT_REQUESTED if now_s - self._refused_s >= _REFUSED_S else ""


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
