"""Both ends as commands that change them see them, and what the bulk store says of namespaces."""

import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Final, get_args

from objkv.cache.chunks import shard_record
from objkv.codec.payload import Header, header_bytes_needed, read_header
from objkv.codec.seal import Seal
from objkv.config import Config
from objkv.errors import ConfigError, PayloadError
from objkv.index.base import ChunkEntry, PruneIndex, ReadIndex, Record, ShardRecord, WriteIndex
from objkv.index.shapes import SHAPES_HASH
from objkv.keys.chunk import ChunkKey
from objkv.keys.encoder import ENCODER_SCHEME
from objkv.keys.identity import (
    FORMAT,
    HASH_SCHEME,
    NAMESPACE_HEX,
    GroupIdentity,
    GroupKind,
    Identity,
    canonical_json,
    identity_path,
    seals_of,
)
from objkv.keys.topology import Shard
from objkv.ops.retrying import retrying
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
class BackendsView:
    """Stores and index, and what their users agreed on."""

    bulk: PruneStore
    hot: PruneStore | None
    index: WriteIndex
    is_own_index: bool
    """Whether the bulk store is its own index, so that there are no records beside payloads."""
    ttl_s: int
    lease_ms: int
    owner: str
    """Names this process in leases."""
    seal_of: Callable[["StoredNamespace"], Seal | None] = lambda namespace: None
    """What its payloads are sealed with. Raises ``ConfigError`` if the keys for that are not
    here."""
    admin: PruneIndex | None = None
    """The index itself, on which operators pin and count; None for the read-only role."""

    @classmethod
    def of(
        cls,
        config: Config,
        stores: tuple[PruneStore, PruneStore | None],
        index: WriteIndex,
        admin: PruneIndex | None,
        *,
        command: str,
        seal_of: Callable[["StoredNamespace"], Seal | None] = lambda namespace: None,
    ) -> "BackendsView":
        """The view of ``command``: calls to ``stores`` (bulk, hot) and ``index`` are retried."""
        bulk, hot = stores
        return cls(
            bulk=retrying(bulk),
            hot=None if hot is None else retrying(hot),
            index=retrying(index),
            admin=None if admin is None else retrying(admin),
            is_own_index=config.index_url.startswith("bulk:"),
            ttl_s=config.ttl_s,
            lease_ms=config.lease_ms,
            owner=f"{command}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}",
            seal_of=seal_of,
        )


@dataclass(frozen=True, slots=True)
class StoredNamespace:
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
class NamespacePart:
    """A folder of a namespace: about a 256th of it, chosen by hash."""

    namespace: str
    fan: str

    @property
    def name(self) -> str:
        """As it begins the keys in it, without the ``/``."""
        return f"{self.namespace}/{self.fan}"


@dataclass(frozen=True, slots=True)
class StoredPayload:
    """A payload, and what the index says of its chunk."""

    key: ChunkKey
    entry: Entry
    record: Record | None
    """None also where the bulk store is its own index."""

    @property
    def shard(self) -> ShardRecord | None:
        """What is recorded of the payload."""
        return None if self.record is None else self.record.shards.get(self.key.field)


def read_namespace(bulk: ReadStore, name: str) -> StoredNamespace:
    """What is told of ``name`` by its document."""
    document = bulk.get_range(identity_path(name), 0, _DOCUMENT_BYTES_MAX)
    if document is None or sha256(document).hexdigest()[:NAMESPACE_HEX] != name:
        return StoredNamespace(name, is_known=False)
    try:
        values = json.loads(document)
        epoch, tenant = values.pop("weights_epoch"), values["tenant"]
        if type(epoch) is not int or type(tenant) is not str:
            return StoredNamespace(name, is_known=False)
        is_chunks = values.get("hash") == HASH_SCHEME
        has_shapes = is_chunks and values.get("page_layout") != HANDOFF_LAYOUT
        seals = seals_of(values.get("extra"))
        return StoredNamespace(name, True, tenant, epoch, canonical_json(values), has_shapes, seals)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return StoredNamespace(name, is_known=False)


def stored_namespaces(bulk: ReadStore) -> list[str]:
    """The folders of the bulk store that are named as namespaces are."""
    return [name for name in bulk.folders("") if _NAMESPACE.fullmatch(name)]


def stored_parts(bulk: ReadStore, namespaces: Sequence[str]) -> list[NamespacePart]:
    """The parts of ``namespaces`` in which there may be something."""
    return [
        NamespacePart(name, fan)
        for name in namespaces
        for fan in bulk.folders(name)
        if _FAN.fullmatch(fan)
    ]


def stored_entries(bulk: ReadStore, part: NamespacePart) -> Iterator[tuple[ChunkKey | None, Entry]]:
    """The payloads in ``part``, and, without a key, what is none."""
    for entry in bulk.scan(f"{part.name}/"):
        try:
            yield ChunkKey.parse(entry.key), entry
        except ValueError:
            yield None, entry


def stored_payloads(
    view: BackendsView, part: NamespacePart, *, other: Callable[[Entry], None] = lambda entry: None
) -> Iterator[list[StoredPayload]]:
    """The payloads in ``part`` with their records, some hundreds at a time; ``other`` hears of
    entries that are no payloads. About 1 KiB of memory each."""
    batch: list[tuple[ChunkKey, Entry]] = []
    for key, entry in stored_entries(view.bulk, part):
        if key is None:
            other(entry)
            continue
        batch.append((key, entry))
        if len(batch) == CHUNKS_AT_ONCE:
            yield _with_records(view, batch)
            batch = []
    if batch:
        yield _with_records(view, batch)


def _with_records(view: BackendsView, batch: list[tuple[ChunkKey, Entry]]) -> list[StoredPayload]:
    if view.is_own_index:
        return [StoredPayload(key, entry, None) for key, entry in batch]
    hashes = list(dict.fromkeys(key.prefix_hash for key, _ in batch))
    found = dict(zip(hashes, view.index.lookup(batch[0][0].namespace, hashes), strict=True))
    return [StoredPayload(key, entry, found[key.prefix_hash]) for key, entry in batch]


def recorded(index: ReadIndex, key: ChunkKey) -> tuple[Record | None, ShardRecord | None]:
    """The record of a payload's chunk, and the part of it that is the payload's."""
    [record] = index.lookup(key.namespace, [key.prefix_hash])
    return record, None if record is None else record.shards.get(key.field)


def publish_payload(view: BackendsView, header: Header, *, is_hot: bool = False) -> None:
    """Record a payload that is in the bulk store, as its header describes it."""
    claim, key = header.claim, header.claim.key
    chunk = ChunkEntry(
        key.namespace, key.prefix_hash, claim.parent_hash, claim.token_start, claim.token_end
    )
    shard = replace(shard_record(header), hot=is_hot)
    view.index.publish(chunk, {key.field: shard}, ttl_s=view.ttl_s)


def publish_shapes(view: BackendsView, namespace: str, fields: Iterable[str], now_s: float) -> None:
    """Say that these shards are in use, so that replicas of every shape look for them."""
    empty = ShardRecord(0, 0, "none", False, "", int(now_s))
    entry = ChunkEntry(namespace, SHAPES_HASH, SHAPES_HASH, 0, 1)
    view.index.publish(entry, dict.fromkeys(fields, empty), ttl_s=view.ttl_s)


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


class Lease:
    """The lease of what lies at ``path``, whose holder knows when it ends: retried calls may
    outlast it. For one thread. Raises ``StoreError``."""

    def __init__(
        self, view: BackendsView, path: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._index = view.index
        self._owner = view.owner
        self._ms = view.lease_ms
        self._path = path
        self._clock = clock
        self._end_s = 0.0

    def take(self) -> bool:
        """Whether nobody else holds it."""
        began_s = self._clock()
        if not self._index.lease(self._path, self._owner, ttl_ms=self._ms):
            return False
        self._end_s = began_s + self._ms / 1000
        return True

    def renew(self) -> bool:
        """Hold it for its whole time from now; False if it may have ended before: then somebody
        else may have had it, and what was read under it is no longer known to be so."""
        end_s = self._end_s
        return self._clock() < end_s and self.take() and self._clock() < end_s

    def release(self) -> None:
        """Give it back."""
        self._index.release(self._path, self._owner)


DOCUMENT_BYTES_MAX: Final = 4 << 20
_BEGINNING = re.compile(rf"[0-9a-f]{{1,{NAMESPACE_HEX}}}")


def read_identity(bulk: ReadStore, namespace: str) -> Identity | None:
    """What ``namespace`` stands for, or None if the bulk store has no document of it.

    Raises ``PayloadError`` if the document is not the one whose digest names the namespace.
    """
    document = identity_document(bulk, namespace)
    return None if document is None else parse_identity(document, namespace)


def identity_document(bulk: ReadStore, namespace: str) -> bytes | None:
    """What lies where the namespace's document should be, None if nothing does.

    Raises ``PayloadError`` for more than any document is.
    """
    path = identity_path(namespace)
    document = bulk.get_range(path, 0, DOCUMENT_BYTES_MAX + 1)
    if document is not None and len(document) > DOCUMENT_BYTES_MAX:
        raise PayloadError(f"{path}: longer than any identity document")
    return document


def parse_identity(document: bytes, namespace: str) -> Identity:
    """The identity that ``document`` spells, whose digest must be ``namespace``.

    Raises ``PayloadError`` for anything else, also for formats newer than this version.
    """
    try:
        values = json.loads(document)
        written = (values.pop("format"), values.pop("hash"))
        if written == (FORMAT, ENCODER_SCHEME):
            raise PayloadError(f"{identity_path(namespace)}: of encoder outputs, not of KV")
        if written != (FORMAT, HASH_SCHEME):
            raise PayloadError(f"{identity_path(namespace)}: written as {written}: not known here")
        groups = tuple(
            GroupIdentity(**{**group, "layers": tuple(group["layers"])})
            for group in values.pop("groups")
        )
        extra = tuple((str(name), str(value)) for name, value in values.pop("extra"))
        identity = Identity(**values, groups=groups, extra=extra)
        if not _is_well_typed(identity):
            raise TypeError
        digest = identity.namespace()
    # The document is somebody else's: whatever the values' own checks say of it is its fault.
    except (AssertionError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as exc:
        raise PayloadError(f"{identity_path(namespace)}: not an identity document") from exc
    if digest != namespace:
        raise PayloadError(f"{identity_path(namespace)}: is the document of {digest}")
    return identity


def _is_well_typed(identity: Identity) -> bool:
    groups = identity.groups
    texts: list[object] = [identity.model, identity.weights, identity.kv_dtype, identity.tenant]
    texts += [identity.page_layout, *(layer for group in groups for layer in group.layers)]
    numbers: list[object] = [identity.chunk_tokens, identity.weights_epoch]
    for group in groups:
        numbers += [group.heads, group.content, group.block_size]
        numbers += [] if group.window is None else [group.window]
        texts += [group.kind] + ([] if group.state is None else [group.state])
    texts += [] if identity.quantization is None else [identity.quantization]
    are_known = all(group.kind in get_args(GroupKind) for group in groups)
    # ``type`` and not ``isinstance``: True is an int to Python.
    return {*map(type, texts)} <= {str} and {*map(type, numbers)} <= {int} and are_known


def pick_namespace(known: Sequence[str], beginning: str | None) -> str:
    """The one namespace that begins so; the only one there is for None.

    A complete name is taken as it is, because an index may have forgotten it. Raises
    ``ConfigError`` that lists the choices.
    """
    if beginning is not None and _BEGINNING.fullmatch(beginning) is None:
        raise ConfigError(f"{beginning!r} is no namespace: write 32 hex digits, or the first few")
    if beginning is not None and len(beginning) == NAMESPACE_HEX:
        return beginning
    found = [name for name in known if name.startswith(beginning or "")]
    if len(found) == 1:
        return found[0]
    if not known:
        raise ConfigError(
            "the index has no namespaces: no replica has saved yet, or index_url is not theirs"
        )
    if beginning is None:
        told = ", ".join(sorted(known))
        raise ConfigError(f"{len(known)} namespaces; choose one with --namespace: {told}")
    what = f"{len(found)} namespaces begin" if found else "no namespace begins"
    what += f" with {beginning}"
    raise ConfigError(f"{what}; choose one of: {', '.join(sorted(found or known))}")
