"""The stores and the index as maintenance commands use them, and the bulk store's namespaces."""

import json
import math
import os
import random
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, Protocol, Self, TypeVar, cast

from pydantic import TypeAdapter

from objkv.cache.chunks import LEASE_MS
from objkv.codec.seal import Seal
from objkv.config import Config
from objkv.errors import PayloadError, StoreError
from objkv.index.base import PruneIndex, ReadIndex, Record, ShardRecord, WriteIndex
from objkv.keys.chunk import ChunkKey
from objkv.keys.encoder import ENCODER_SCHEME
from objkv.keys.identity import (
    FORMAT,
    HASH_SCHEME,
    NAMESPACE_HEX,
    Identity,
    canonical_json,
    identity_path,
    seals_of,
)
from objkv.stores.base import Entry, HotStore, PruneStore, ReadStore

T = TypeVar("T")
QUARANTINE = "quarantine"
"""Folder of the bulk store for corrupt payloads, under their own paths."""
CHUNKS_AT_ONCE = 500
"""Chunks per lookup, in one round trip to the index."""
_NAMESPACE = re.compile(rf"[0-9a-f]{{{NAMESPACE_HEX}}}")
HANDOFF_LAYOUT = "handoff-1"
"""Page layout of namespaces for prompts in transfer between engines, which have no chunks."""
SAMPLE_LAYOUT = "sample-1"
"""That of the namespace of ``bench`` and ``doctor``, which no replica has."""
DOCUMENT_BYTES_MAX: Final = 4 << 20
_TEXT_MAX = 200
PATIENCE_S = 30.0
"""Longer than the default pause of any circuit breaker."""
_FIRST_S = 0.2
_LONGEST_S = 5.0
_NOT_REPEATED: Final = ("scan", "unfinished", "discard", "check", "close")
"""Scans cannot be resumed, and one that ends early would look complete."""


def retrying(backend: T, *, sleep: Callable[[float], None] = time.sleep) -> T:
    """Wrap a store or an index so that its calls are retried for ``PATIENCE_S``."""
    return cast(T, _Retrying(backend, sleep))


def without_retries(backend: T) -> T:
    """Return the store or index without retries, for calls that must not be repeated blindly."""
    return cast(T, backend.inner) if isinstance(backend, _Retrying) else backend


def pauses() -> Iterator[float]:
    """Yield the seconds to wait before each further attempt, for ``PATIENCE_S`` in all."""
    waited_s, next_s = 0.0, _FIRST_S
    while waited_s < PATIENCE_S:
        pause_s = next_s * random.uniform(0.5, 1.0)  # noqa: S311  # not a secret
        yield pause_s
        waited_s, next_s = waited_s + pause_s, min(2 * next_s, _LONGEST_S)


class _Retrying:
    """Forwards all methods of ``inner``."""

    def __init__(self, inner: object, sleep: Callable[[float], None]) -> None:
        self.inner = inner
        self._sleep = sleep

    def __getattr__(self, verb: str) -> Any:
        call = getattr(self.inner, verb)
        if verb in _NOT_REPEATED:
            return call

        def repeated(*args: Any, **named: Any) -> Any:
            for pause_s in pauses():
                try:
                    return call(*args, **named)
                except StoreError as exc:
                    if not exc.transient:
                        raise
                self._sleep(pause_s)
            return call(*args, **named)

        return repeated


class Opened(Protocol):
    """Open stores and index, as ``assembly`` opens them."""

    @property
    def bulk(self) -> PruneStore: ...
    @property
    def hot(self) -> HotStore | None: ...
    @property
    def index(self) -> WriteIndex: ...
    @property
    def admin(self) -> PruneIndex | None: ...


@dataclass(frozen=True, slots=True)
class BackendsView:
    """The stores, the index, and the settings that a command needs with them."""

    bulk: PruneStore
    hot: HotStore | None
    index: WriteIndex
    is_own_index: bool
    """Whether the bulk store is its own index, so that no separate records exist."""
    ttl_s: int
    owner: str
    """Name of this process in leases."""
    lease_ms: int = LEASE_MS
    seal_of: Callable[["StoredNamespace"], Seal | None] = lambda namespace: None
    """The seal of a namespace's payloads. Raises ``ConfigError`` without its keys."""
    admin: PruneIndex | None = None
    """The index for pins and totals; None for the read-only role."""

    @classmethod
    def of(
        cls,
        config: Config,
        opened: Opened,
        command: str,
        seal_of: Callable[["StoredNamespace"], Seal | None] = lambda namespace: None,
    ) -> Self:
        """Return the view of ``command``. Calls to what is ``opened`` are retried."""
        return cls(
            bulk=retrying(opened.bulk),
            hot=opened.hot and retrying(opened.hot),
            index=retrying(opened.index),
            admin=opened.admin and retrying(opened.admin),
            is_own_index=config.index_url.startswith("bulk:"),
            ttl_s=config.ttl_s,
            owner=f"{command}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}",
            seal_of=seal_of,
        )


@dataclass(frozen=True, slots=True)
class StoredNamespace:
    """One namespace in the bulk store, with the values that all kinds of identity have."""

    name: str
    is_known: bool
    """Whether its identity document exists and has the digest that names the namespace."""
    tenant: str | None = None
    weights_epoch: int = 0
    rest: bytes = b""
    """The rest of the document; equal for namespaces that differ only by their epoch."""
    has_chunks: bool = False
    """Whether it holds KV of prompts, and not encoder outputs or hand-offs."""
    seals: tuple[str, ...] = ()
    """How its payloads are sealed: ``signed``, ``encrypted``."""
    is_old_format: bool = False
    """Whether its payloads have a format that is not read any more."""
    model: str | None = None
    """As the next two, untrusted; None if the document is unreadable or has none."""
    kv_dtype: str | None = None
    chunk_tokens: int | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class StoredPayload:
    """A payload and the record of its chunk."""

    key: ChunkKey
    entry: Entry | None
    """None if only the index has it."""
    record: Record | None
    """None also if the bulk store is its own index."""

    @property
    def shard(self) -> ShardRecord | None:
        """The payload's part of the record."""
        return None if self.record is None else self.record.shards.get(self.key.field)


def read_namespace(bulk: ReadStore, name: str) -> StoredNamespace:
    """Read the namespace ``name`` from its identity document."""
    try:
        document = identity_document(bulk, name)
    except PayloadError as exc:
        return StoredNamespace(name, False, problem=str(exc))
    if document is None:
        return StoredNamespace(name, False, problem="no identity document")
    why = "its identity document is damaged or of another namespace"
    damaged = StoredNamespace(name, False, problem=why)
    if sha256(document).hexdigest()[:NAMESPACE_HEX] != name:
        return damaged
    try:
        values = json.loads(document)
        epoch, tenant = values.pop("weights_epoch"), values["tenant"]
        if type(epoch) is not int or type(tenant) is not str:
            return damaged
        is_chunks, size = values.get("hash") == HASH_SCHEME, values.get("chunk_tokens")
        texts = {
            name: value[:_TEXT_MAX]
            for name in ("model", "kv_dtype")
            if isinstance(value := values.get(name), str)
        }
        return StoredNamespace(
            name,
            is_known=True,
            tenant=tenant,
            weights_epoch=epoch,
            rest=canonical_json(values),
            has_chunks=is_chunks
            and values.get("page_layout") not in (HANDOFF_LAYOUT, SAMPLE_LAYOUT),
            seals=seals_of(values.get("extra")),
            is_old_format=values["format"] < FORMAT,
            chunk_tokens=size if type(size) is int and 0 < size < 1 << 40 else None,
            **texts,
        )
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return damaged


def stored_namespaces(bulk: ReadStore) -> list[str]:
    """Return the folders of the bulk store that have the name of a namespace."""
    return [name for name in bulk.folders("") if _NAMESPACE.fullmatch(name)]


def with_records(
    view: BackendsView, namespace: str, payloads: Sequence[tuple[ChunkKey, Entry | None]]
) -> list[StoredPayload]:
    """Return these payloads of one namespace with their records of now, in one round trip."""
    if view.is_own_index:
        return [StoredPayload(key, entry, None) for key, entry in payloads]
    hashes = list(dict.fromkeys(key.prefix_hash for key, _ in payloads))
    found = dict(zip(hashes, view.index.lookup(namespace, hashes), strict=True))
    return [StoredPayload(key, entry, found[key.prefix_hash]) for key, entry in payloads]


def recorded(index: ReadIndex, key: ChunkKey) -> tuple[Record | None, ShardRecord | None]:
    """Return the record of a payload's chunk, and the payload's part of it."""
    [record] = index.lookup(key.namespace, [key.prefix_hash])
    return record, None if record is None else record.shards.get(key.field)


def record_keys(namespace: str, record: Record) -> Iterator[ChunkKey]:
    """Yield the keys of the payloads in a record, skipping invalid fields."""
    for field in record.shards:
        with suppress(ValueError):
            yield ChunkKey.of(namespace, record.prefix_hash, field)


class Lease:
    """The lease of ``path`` within a block, which gets None if another process holds it. Knows the
    time of its end, because retried calls may outlast it. For one thread. Raises ``StoreError``."""

    def __init__(
        self, view: BackendsView, path: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._view, self._path, self._clock = view, path, clock
        self._end_s = -math.inf

    def __enter__(self) -> Self | None:
        return self if self._acquire() else None

    def __exit__(self, *_: object) -> None:
        if self._end_s > -math.inf:
            self._view.index.release(self._path, self._view.owner)

    def _acquire(self) -> bool:
        began_s, ms = self._clock(), self._view.lease_ms
        if not self._view.index.lease(self._path, self._view.owner, ttl_ms=ms):
            return False
        self._end_s = began_s + ms / 1000
        return True

    def renew(self) -> bool:
        """Extend the lease to its full time; False if it may have expired. Then another process may
        have held it, and values read under it may be outdated."""
        end_s = self._end_s
        return self._clock() < end_s and self._acquire() and self._clock() < end_s


def delete_unchanged(
    view: BackendsView, entry: Entry, lease: Lease, *, sleep: Callable[[float], None] = time.sleep
) -> bool:
    """Delete ``entry``; False if the key may hold another payload by now. A failed delete may have
    succeeded on the server, and a writer may have saved since, so the entry is checked before each
    further attempt. Raises ``StoreError``."""
    waits = pauses()
    while lease.renew():
        try:
            without_retries(view.bulk).delete(entry.key)
        except StoreError as exc:
            pause_s = next(waits, None)
            if not exc.transient or pause_s is None:
                raise
        else:
            return True
        sleep(pause_s)
        now = view.bulk.head(entry.key)
        if now != entry:
            return now is None
    return False


def read_identity(bulk: ReadStore, namespace: str) -> Identity | None:
    """Return the identity of ``namespace``; None if the bulk store has no document of it. Raises
    ``PayloadError`` if the document does not have the digest that names the namespace."""
    document = identity_document(bulk, namespace)
    return None if document is None else parse_identity(document, namespace)


def read_identities(bulk: ReadStore, names: Iterable[str]) -> Iterator[tuple[str, Identity]]:
    """Yield those of the namespaces ``names`` that have one: none of another version of objkv, of
    encoder outputs, or with a damaged document."""
    for name in names:
        with suppress(PayloadError):
            if (identity := read_identity(bulk, name)) is not None:
                yield name, identity


def identity_document(bulk: ReadStore, namespace: str) -> bytes | None:
    """Return its identity document; None without one. Raises ``PayloadError`` if it is too long."""
    path = identity_path(namespace)
    document = bulk.get(path, 0, DOCUMENT_BYTES_MAX + 1)
    if document is not None and len(document) > DOCUMENT_BYTES_MAX:
        raise PayloadError(f"{path}: too long for an identity document")
    return document


def parse_identity(document: bytes, namespace: str) -> Identity:
    """Parse an identity document whose digest must be ``namespace``. Raises ``PayloadError`` for
    anything else, including formats newer than this version."""
    try:
        values = json.loads(document)
        written = (values.pop("format"), values.pop("hash"))
        if written == (FORMAT, ENCODER_SCHEME):
            raise PayloadError(f"{identity_path(namespace)}: for encoder outputs, not for KV")
        if written != (FORMAT, HASH_SCHEME):
            number, why = written[0], "unknown, perhaps of a later version of objkv"
            if type(number) is int and number < FORMAT:
                why = "not read any more; objkv sweep --apply deletes its payloads"
            elif type(number) is int and number > FORMAT:
                why += "; update objkv here"
            else:  # the number is no integer, or the hash is another
                number = f"{number!r} with hash {written[1]!r}"
            raise PayloadError(f"{identity_path(namespace)}: format {number} is {why}")
        identity = TypeAdapter(Identity).validate_json(json.dumps(values), strict=True)
        digest = identity.namespace()
    # The document is untrusted, so a failed check of its values means that it is invalid.
    except (AssertionError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as exc:
        fix = "delete it, and a replica of that model writes it again when it starts"
        if sha256(document).hexdigest()[:NAMESPACE_HEX] == namespace:  # as it was written
            fix = "it may be of a later version of objkv: update objkv here"
        raise PayloadError(f"{identity_path(namespace)}: not an identity document; {fix}") from exc
    if digest != namespace:
        raise PayloadError(f"{identity_path(namespace)}: belongs to another namespace, {digest}")
    return identity
