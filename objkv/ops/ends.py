"""Both ends as commands that change them see them, and what the bulk store says of namespaces."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from hashlib import sha256

from objkv.codec.payload import Header, header_bytes_needed, read_header
from objkv.codec.seal import Seal
from objkv.errors import PayloadError
from objkv.index.base import PruneIndex, Record, ShardRecord
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import HASH_SCHEME, NAMESPACE_HEX, canonical_json, identity_path, seals_of
from objkv.keys.topology import Shard
from objkv.stores.base import Entry, PruneStore, ReadStore

QUARANTINE = "quarantine"
"""Folder of the bulk store in which what was found corrupt lies under its own path."""
CHUNKS_AT_ONCE = 500
"""Asked of the index in one round trip."""
_NAMESPACE = re.compile(rf"[0-9a-f]{{{NAMESPACE_HEX}}}")
_FAN = re.compile(r"[0-9a-f]{2}")
HANDOFF_LAYOUT = "handoff-1"
"""Of namespaces that hold prompts on their way from one engine to another, and no chunks."""
_HEADER_GUESS = 16 << 10
"""Of most models' headers all: one request instead of two."""
_LENGTH_BYTES = 8
_DOCUMENT_BYTES_MAX = 4 << 20
"""Of an identity; what is longer is none."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Both ends, and what their users agreed on."""

    bulk: PruneStore
    hot: PruneStore | None
    index: PruneIndex
    is_own_index: bool
    """Whether the bulk store is its own index, so that there are no records beside payloads."""
    ttl_s: int
    lease_ms: int
    owner: str
    """Names this process in leases."""
    seal_of: Callable[["Namespace"], Seal | None] = lambda namespace: None
    """What its payloads are sealed with. Raises ``ConfigError`` if the keys for that are not
    here."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """One folder of the bulk store, and what its document says whatever kind of identity it is."""

    name: str
    is_known: bool
    """Whether its identity document is there, and is the one whose digest names it."""
    tenant: str | None = None
    weights_epoch: int = 0
    rest: bytes = b""
    """All the rest of the document: equal where only the epochs differ."""
    has_shapes: bool = False
    """Whether readers find chunks of other shapes by a record that says which there are."""
    seals: tuple[str, ...] = ()
    """``signed``, ``encrypted``: how its payloads are sealed."""


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """A folder of a namespace: about a 256th of it, chosen by hash."""

    namespace: str
    fan: str

    @property
    def name(self) -> str:
        """As it begins the keys in it, without the ``/``."""
        return f"{self.namespace}/{self.fan}"


@dataclass(frozen=True, slots=True)
class Stored:
    """A payload, and what the index says of its chunk."""

    key: ChunkKey
    entry: Entry
    record: Record | None
    """None also where the bulk store is its own index."""

    @property
    def shard(self) -> ShardRecord | None:
        """What is recorded of the payload."""
        return None if self.record is None else self.record.shards.get(self.key.field)


def read_namespace(bulk: ReadStore, name: str) -> Namespace:
    """What is told of ``name`` by its document."""
    document = bulk.get_range(identity_path(name), 0, _DOCUMENT_BYTES_MAX)
    if document is None or sha256(document).hexdigest()[:NAMESPACE_HEX] != name:
        return Namespace(name, is_known=False)
    try:
        values = json.loads(document)
        epoch, tenant = values.pop("weights_epoch"), values["tenant"]
        if type(epoch) is not int or type(tenant) is not str:
            return Namespace(name, is_known=False)
        is_chunks = values.get("hash") == HASH_SCHEME
        has_shapes = is_chunks and values.get("page_layout") != HANDOFF_LAYOUT
        seals = seals_of(values.get("extra"))
        return Namespace(name, True, tenant, epoch, canonical_json(values), has_shapes, seals)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return Namespace(name, is_known=False)


def stored_namespaces(bulk: ReadStore) -> list[str]:
    """The folders of the bulk store that are named as namespaces are."""
    return [name for name in bulk.folders("") if _NAMESPACE.fullmatch(name)]


def stored_parts(bulk: ReadStore, namespaces: Sequence[str]) -> list[Part]:
    """The parts of ``namespaces`` in which there may be something."""
    return [
        Part(name, fan) for name in namespaces for fan in bulk.folders(name) if _FAN.fullmatch(fan)
    ]


def stored_entries(bulk: ReadStore, part: Part) -> Iterator[tuple[ChunkKey | None, Entry]]:
    """The payloads in ``part``, and, without a key, what is none."""
    for entry in bulk.scan(f"{part.name}/"):
        try:
            yield ChunkKey.parse(entry.key), entry
        except ValueError:
            yield None, entry


def stored_payloads(
    ends: Ends, part: Part, *, other: Callable[[Entry], None] = lambda entry: None
) -> Iterator[list[Stored]]:
    """The payloads in ``part`` with their records, some hundreds at a time; ``other`` hears of
    entries that are no payloads. About 1 KiB of memory each."""
    batch: list[tuple[ChunkKey, Entry]] = []
    for key, entry in stored_entries(ends.bulk, part):
        if key is None:
            other(entry)
            continue
        batch.append((key, entry))
        if len(batch) == CHUNKS_AT_ONCE:
            yield _with_records(ends, batch)
            batch = []
    if batch:
        yield _with_records(ends, batch)


def _with_records(ends: Ends, batch: list[tuple[ChunkKey, Entry]]) -> list[Stored]:
    if ends.is_own_index:
        return [Stored(key, entry, None) for key, entry in batch]
    hashes = list(dict.fromkeys(key.prefix_hash for key, _ in batch))
    found = dict(zip(hashes, ends.index.lookup(batch[0][0].namespace, hashes), strict=True))
    return [Stored(key, entry, found[key.prefix_hash]) for key, entry in batch]


def record_keys(namespace: str, record: Record) -> Iterator[ChunkKey]:
    """The keys of the payloads that a record promises; fields that name none are left out."""
    for field in record.shards:
        group, _, shard = field.partition(".")
        try:
            key = ChunkKey(namespace, record.prefix_hash, int(group), Shard.parse(shard))
        except (AssertionError, ValueError):
            continue
        if key.field == field:
            yield key


def looks(
    bulk: ReadStore, pool: Executor, keys: Sequence[ChunkKey], *, at_once: int
) -> Iterator[Entry | None]:
    """What the bulk store has of ``keys``, in order; so many are asked for at once."""
    # Pieces rather than keys: a thread that is woken for each takes longer than a folder's answer.
    size = max(1, -(-len(keys) // at_once))
    pieces = [keys[start : start + size] for start in range(0, len(keys), size)]
    for found in pool.map(lambda piece: [bulk.head(key.path()) for key in piece], pieces):
        yield from found


def stored_header(bulk: ReadStore, entry: Entry, seal: Seal | None) -> Header | None:
    """The header of a payload, None if it is gone. Raises ``PayloadError`` unless its checksum, or
    seal, and its length are right; whose it is remains to be compared."""
    start = bulk.get_range(entry.key, 0, _HEADER_GUESS)
    if start is None:
        return None
    if len(start) < _LENGTH_BYTES:
        raise PayloadError(f"{len(start)} bytes are no payload")
    needed = header_bytes_needed(start[:_LENGTH_BYTES])
    if needed > len(start) and len(start) == _HEADER_GUESS:
        more = bulk.get_range(entry.key, 0, needed)
        if more is None:
            return None
        start = more
    header = read_header(start, seal=seal)
    if header.nbytes != entry.nbytes:
        raise PayloadError(f"{entry.nbytes} bytes where the header says {header.nbytes}")
    return header
