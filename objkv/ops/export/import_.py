"""Brings an export into a cache: every byte checked, bulk first, the index last.

Whoever brings payloads in vouches for them: that the KV in them belongs to the prompt that their
name stands for is what only the writer knows. What can be checked is: lengths, checksums, SHA-256,
names, and that replicas of the identity would accept it. In a sealed namespace payloads are sealed
anew, with the keys that are here.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Final

from objkv.cache.chunks import existing_header
from objkv.cache.match import keeps_all, stored_blocks
from objkv.codec.payload import Claim, Header, encode, frame_pages, read_header
from objkv.codec.seal import Seal
from objkv.errors import ConfigError, PayloadError
from objkv.index.base import ReadIndex
from objkv.index.shapes import FIELDS_MAX
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import GroupIdentity, Identity, identity_path
from objkv.keys.prefix import root_hash
from objkv.ops.backends_view import (
    CHUNKS_AT_ONCE,
    HANDOFF_LAYOUT,
    BackendsView,
    StoredNamespace,
    identity_document,
    parse_identity,
    publish_payload,
    publish_shapes,
    read_namespace,
    recorded,
)
from objkv.ops.export.manifest import ManifestLine
from objkv.ops.rebuild import is_same
from objkv.ops.runs import Check, Counters, Unit
from objkv.ops.verify_payload import Budget, Checker
from objkv.stores.base import ReadStore

_STATE: Final = "I8"
"""States are bytes of several things."""
_PLAIN: Final = {"bfloat16": "BF16", "float16": "F16", "half": "F16", "float32": "F32"}
_FP8: Final = {
    "fp8": {"F8_E4M3"},
    "fp8_e4m3": {"F8_E4M3"},
    "fp8_e5m2": {"F8_E5M2"},
    "fp8_fnuz": {"F8_E4M3FNUZ"},
    "fp8_e4m3_fnuz": {"F8_E4M3FNUZ"},
    "fp8_e5m2_fnuz": {"F8_E5M2FNUZ"},
}
_BYTES: Final = {"U8", "I8"}
"""Of every other quantised cache: its elements are the kernel's own."""
_CHECKPOINTS: Final = {"F8_E4M3", "F8_E4M3FNUZ"}
"""What a quantised checkpoint may choose where nobody said what the cache is kept as."""


def check_told(header: Header, line: ManifestLine) -> None:
    """Raises ``PayloadError`` unless the payload is the one that the manifest tells of."""
    claim = header.claim
    if claim.key.path() != line.key:
        raise PayloadError(f"claims to be {claim.key.path()}")
    told = (line.token_start, line.token_end, line.parent)
    if told != (claim.token_start, claim.token_end, claim.parent_hash.hex()):
        raise PayloadError("its tokens, or the chunk before it, are not those of the manifest")


def check_fits(header: Header, identity: Identity) -> None:
    """Raises ``PayloadError`` unless replicas of ``identity`` could load the payload.

    The identity does not determine the scales of a quantised cache, nor the block size where
    replicas divide tokens into blocks of their own: any are accepted, and readers compare them with
    their own.
    """
    claim = header.claim
    number, shard = claim.key.group, claim.key.shard
    if number >= len(identity.groups):
        raise PayloadError(f"of group {number}, which the model does not have")
    group = identity.groups[number]
    if shard.layer_end > len(group.layers) or shard.head_end > group.heads:
        raise PayloadError(
            f"of shard {shard}, and group {number} has {len(group.layers)} layers and "
            f"{group.heads} heads"
        )
    _check_place(claim, identity)
    names = group.layers[shard.layer_start : shard.layer_end]
    found = header.frames.layers
    if tuple(layer.name for layer in found) != names:
        raise PayloadError(f"its layers are not those of group {number}")
    dtype = found[0].dtype
    if dtype not in _dtypes(identity, group):
        raise PayloadError(f"its pages are {dtype}, which is not how {identity.kv_dtype} is kept")
    pages = _pages(identity, group, shard.head_end - shard.head_start, found[0].shape[2])
    if pages is None:
        raise PayloadError(f"of group {number}, which has no payloads in such chunks")
    is_plain = group.kind == "mamba" or dtype in _PLAIN.values()
    for layer in found:
        if (layer.dtype, layer.shape) != (dtype, pages):
            told, due = "x".join(map(str, layer.shape)), "x".join(map(str, pages))
            raise PayloadError(f"layer {layer.name}: {layer.dtype} {told}, not {dtype} {due}")
        if is_plain and layer.scales:
            raise PayloadError(f"layer {layer.name}: has scales, and is not quantised")


def _check_place(claim: Claim, identity: Identity) -> None:
    size = identity.chunk_tokens
    if claim.token_start % size or claim.token_end - claim.token_start != size:
        raise PayloadError(f"its tokens are no chunk of {size}")
    is_first = claim.token_start == 0
    if is_first != (claim.parent_hash == root_hash(claim.key.namespace)):
        raise PayloadError("the chunk before it is not one that could be")


def _dtypes(identity: Identity, group: GroupIdentity) -> set[str]:
    """Those that the pages of a group may have."""
    if group.kind == "mamba":
        return {_STATE}
    plain = _PLAIN.get(identity.kv_dtype)
    if plain is not None:
        return {plain} | (set() if identity.quantization is None else _CHECKPOINTS)
    # Some layers of a quantised cache may be left as the model has them.
    models = _PLAIN.get(dict(identity.extra).get("dtype", ""))
    return _FP8.get(identity.kv_dtype, _BYTES) | (set() if models is None else {models})


def _pages(
    identity: Identity, group: GroupIdentity, heads: int, found_size: int
) -> tuple[int, int, int, int] | None:
    """The shape of a layer's pages: blocks, heads, tokens of a block, content. None where the group
    has no payloads.

    ``found_size``: of the payload's blocks, which may be any where a token can be taken by itself.
    """
    blocks, size = stored_blocks(group, identity.chunk_tokens), group.block_size
    if not blocks:
        return None
    if group.kind == "mamba":
        return 1, heads, 1, group.content
    is_divisible = identity.page_layout == "canonical" and keeps_all(group) and size == 1
    if is_divisible and identity.chunk_tokens % found_size == 0:
        blocks, size = identity.chunk_tokens // found_size, found_size
    return blocks, heads, size, group.content


_LINES_AT_ONCE: Final = 32
_COPIES: Final = 3
"""Of a payload's length that is in memory: as read, as encoded, and as given to the store."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A namespace of an export, as this cache will have it."""

    namespace: StoredNamespace
    identity: Identity
    document: bytes | None
    """What is to be written first; None where the cache has it."""


def arrivals(view: BackendsView, source: ReadStore, names: Sequence[str]) -> list[Arrival]:
    """The namespaces ``names`` of an export. Raises ``ConfigError`` for one that neither the cache
    nor the export has the right document of, and for one that is not of KV: nobody could tell what
    its payloads must be."""
    found = []
    for name in names:
        document, known = None, read_namespace(view.bulk, name)
        text = identity_document(view.bulk, name) if known.is_known else None
        if text is None:  # also where the cache's was deleted just now
            known = read_namespace(source, name)
            text = document = identity_document(source, name)
        if text is None or not known.is_known:
            raise ConfigError(
                f"{name}: a foreign namespace: neither this cache nor the export has its identity "
                f"document ({identity_path(name)}), so what its payloads are cannot be told"
            )
        found.append(Arrival(known, _identity_of(text, name), document))
    return found


def _identity_of(document: bytes, name: str) -> Identity:
    try:
        identity = parse_identity(document, name)
    except PayloadError as exc:
        raise ConfigError(f"{exc}: only KV can be brought in") from exc
    if identity.page_layout == HANDOFF_LAYOUT:
        raise ConfigError(f"{name}: of hand-offs from engine to engine, not of chunks")
    return identity


class Import:
    """Units that bring payloads in. Counts ``added``, ``present`` (stored already), ``indexed``
    (stored, and had no record) and ``busy`` (being saved by a replica); finds ``missing`` and
    ``refused``."""

    def __init__(
        self,
        view: BackendsView,
        source: ReadStore,
        arrivals: Sequence[Arrival],
        *,
        budget: Budget,
        codec: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._view = view
        self._source = source
        self._arrivals: Mapping[str, Arrival] = {one.namespace.name: one for one in arrivals}
        self._budget = budget
        self._codec = codec
        self._clock = clock
        self._checker = Checker(view, budget)
        self._fields: Mapping[str, set[str]] = {name: set() for name in self._arrivals}
        """Of the payloads that are there now, by namespace."""

    def documents(self) -> int:
        """Write the identity documents that this cache lacks; how many."""
        new = [one for one in self._arrivals.values() if one.document is not None]
        for one in new:
            assert one.document is not None
            self._view.bulk.put_if_absent(identity_path(one.namespace.name), one.document)
        return len(new)

    def lines(self, lines: Sequence[ManifestLine]) -> Iterator[Unit]:
        """These payloads."""
        for start in range(0, len(lines), _LINES_AT_ONCE):
            some = lines[start : start + _LINES_AT_ONCE]
            # What an earlier run brought in may be gone, and what it left out may come now.
            yield Unit(f"import {start}", self._work(some), again=True)

    def shapes(self) -> Iterator[Unit]:
        """Say which shards there are now, so that replicas of every shape look for them. To be done
        after the lines."""
        for name, arrival in self._arrivals.items():
            if arrival.namespace.has_shapes:
                yield Unit(f"shapes {name}", self._shapes_work(name), again=True)

    def _shapes_work(self, name: str) -> Callable[[Counters, Check], None]:
        def work(counters: Counters, check: Check) -> None:
            if fields := sorted(self._fields[name])[:FIELDS_MAX]:
                publish_shapes(self._view, name, fields, self._clock())

        return work

    def _work(self, lines: Sequence[ManifestLine]) -> Callable[[Counters, Check], None]:
        def work(counters: Counters, check: Check) -> None:
            for line in lines:
                check()
                self._bring(line, counters)

        return work

    def _bring(self, line: ManifestLine, counters: Counters) -> None:
        key = ChunkKey.parse(line.key)
        arrival = self._arrivals[key.namespace]
        try:
            with self._budget.taking(_COPIES * line.nbytes):
                entry = self._source.head(line.key)
                if entry is None:
                    counters.find("missing", line.key, line.nbytes, "not in the export")
                    return
                if entry.nbytes != line.nbytes:
                    raise PayloadError(
                        f"{entry.nbytes} bytes where the manifest says {line.nbytes}"
                    )
                header, payload = self._read(line)
                check_fits(header, arrival.identity)
                seal = self._view.seal_of(arrival.namespace)
                if seal is not None or self._codec != "none":
                    header, payload = _encoded(header, payload, self._codec, seal)
                became = self._save(header, payload, seal)
                counters.count(became, header.nbytes)
                if became != "busy":
                    self._fields[key.namespace].add(key.field)
        except PayloadError as exc:
            counters.find("refused", line.key, line.nbytes, str(exc))

    def _read(self, line: ManifestLine) -> tuple[Header, bytes]:
        payload = self._source.get(line.key)
        if payload is None:
            raise PayloadError("gone while it was read")
        if sha256(payload).hexdigest() != line.sha256:
            raise PayloadError("its SHA-256 is not the manifest's")
        header = self._checker.read(payload, None)
        check_told(header, line)
        if header.marks.signed_by or header.codec != "none":
            raise PayloadError("not plain: objkv export writes neither seals nor other codecs")
        return header, payload

    def _save(self, header: Header, payload: bytes, seal: Seal | None) -> str:
        """As a replica saves: what became of it."""
        view, claim = self._view, header.claim
        path = claim.key.path()
        if not view.index.lease(path, view.owner, ttl_ms=view.lease_ms):
            return "busy"
        try:
            if view.bulk.put_if_absent(path, payload):
                publish_payload(view, header)
                return "added"
            there = existing_header(view.bulk, claim, seal)
            if there is None:  # cut short, or not what it claims to be: nobody can use it
                view.bulk.put(path, payload)
                publish_payload(view, header)
                return "added"
            _, shard = recorded(view.index, claim.key)
            if view.is_own_index or (shard is not None and is_same(shard, there)):
                return "present"
            publish_payload(view, there)
            return "indexed"
        finally:
            view.index.release(path, view.owner)


def _encoded(header: Header, payload: bytes, codec: str, seal: Seal | None) -> tuple[Header, bytes]:
    frames = header.frames
    pages = [frame_pages(header, number, payload, None) for number in range(len(frames))]
    provenance = header.provenance
    if (
        seal is not None and seal.encrypts
    ):  # token ids are the prompt, and headers are not encrypted
        provenance = replace(provenance, tokens=None)
    made = encode(header.claim, frames.layers, pages, codec=codec, provenance=provenance, seal=seal)
    return read_header(made, seal=seal), bytes(made)


def new_bytes(
    index: ReadIndex, lines: Sequence[ManifestLine], arrivals: Sequence[Arrival]
) -> dict[str | None, int]:
    """By tenant, the bytes of payloads without a record: those with one are counted already. Every
    tenant of the export is there, also with 0."""
    tenants = {one.namespace.name: one.namespace.tenant for one in arrivals}
    found: dict[str | None, int] = dict.fromkeys(tenants.values(), 0)
    by_namespace: defaultdict[str, list[tuple[ChunkKey, int]]] = defaultdict(list)
    for line in lines:
        key = ChunkKey.parse(line.key)
        by_namespace[key.namespace].append((key, line.nbytes))
    for name, stored in by_namespace.items():
        for start in range(0, len(stored), CHUNKS_AT_ONCE):
            some = stored[start : start + CHUNKS_AT_ONCE]
            found[tenants[name]] += sum(_unrecorded(index, name, some))
    return found


def _unrecorded(
    index: ReadIndex, namespace: str, some: Sequence[tuple[ChunkKey, int]]
) -> Iterator[int]:
    hashes = list(dict.fromkeys(key.prefix_hash for key, _ in some))
    records = dict(zip(hashes, index.lookup(namespace, hashes), strict=True))
    for key, nbytes in some:
        record = records[key.prefix_hash]
        if record is None or key.field not in record.shards:
            yield nbytes
