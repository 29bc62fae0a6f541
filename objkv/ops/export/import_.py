"""Imports an export into a cache: checks every byte, writes the bulk store first, the index last.

The import checks lengths, checksums, SHA-256, names, and that replicas of the identity would accept
each payload. It cannot check that the KV belongs to the prompt in a payload's name, so the operator
must trust the source. In a sealed namespace, payloads are sealed again with the configured keys.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import cycle
from typing import Final

from objkv.cache.chunks import existing_header
from objkv.cache.match import keeps_all, stored_blocks
from objkv.codec.payload import Claim, Header, encode, frame_pages, read_header
from objkv.codec.seal import Seal
from objkv.errors import ConfigError, PayloadError
from objkv.index.base import ReadIndex
from objkv.index.shapes import FIELDS_MAX
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import FIRST_DRAFT_GROUP, GroupIdentity, Identity, identity_path
from objkv.keys.prefix import root_hash
from objkv.keys.states import SplitState, part_names
from objkv.keys.topology import Shard
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
"""States are stored as bytes, because they consist of several tensors."""
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
"""Dtypes of every other quantised cache, whose elements have a layout of the kernel."""
_CHECKPOINTS: Final = {"F8_E4M3", "F8_E4M3FNUZ"}
"""Dtypes that a quantised checkpoint may choose if --kv-cache-dtype is auto."""


def check_told(header: Header, line: ManifestLine) -> None:
    """Raise ``PayloadError`` unless the payload matches its line of the manifest."""
    claim = header.claim
    if claim.key.path() != line.key:
        raise PayloadError(f"claims to be {claim.key.path()}")
    expected = (line.token_start, line.token_end, line.parent)
    if expected != (claim.token_start, claim.token_end, claim.parent_hash.hex()):
        raise PayloadError("its tokens or its parent chunk differ from the manifest")


def check_fits(header: Header, identity: Identity) -> None:
    """Raise ``PayloadError`` unless replicas of ``identity`` could load the payload.

    The identity does not determine the scales of a quantised cache, nor the block size if replicas
    may choose their own. Any values are accepted, and readers compare them with their own.
    """
    claim = header.claim
    number, shard = claim.key.group, claim.key.shard
    if number >= FIRST_DRAFT_GROUP:  # a draft's, which only replicas with that draft can check
        _check_place(claim, identity)
        return
    if number >= len(identity.groups):
        raise PayloadError(f"it belongs to group {number}, which the model does not have")
    group = identity.groups[number]
    if shard.layer_end > len(group.layers) or shard.head_end > group.heads:
        raise PayloadError(
            f"its shard is {shard}, but group {number} has {len(group.layers)} layers and "
            f"{group.heads} heads"
        )
    _check_place(claim, identity)
    names = group.layers[shard.layer_start : shard.layer_end]
    found = header.frames.layers
    split = SplitState.parse(group.state)
    views = split.views(1) if split else ()
    if [layer.name for layer in found] != part_names(names, len(views)):
        raise PayloadError(f"its layers differ from those of group {number}")
    dtype = found[0].dtype
    if group.page is None and dtype not in _dtypes(identity, group):
        raise PayloadError(f"its pages are {dtype}, but the KV cache is {identity.kv_dtype}")
    pages = _pages(identity, group, shard, found[0].shape)
    if pages is None:
        raise PayloadError(f"group {number} has no payloads in chunks of this length")
    is_plain = group.kind == "mamba" or dtype in _PLAIN.values()
    parts = [(1, pages[1], view.rows, view.nbytes) for view in views] or [pages]
    for layer, pages in zip(found, cycle(parts), strict=False):
        if (layer.dtype, layer.shape) != (dtype, pages):
            given, due = "x".join(map(str, layer.shape)), "x".join(map(str, pages))
            raise PayloadError(f"layer {layer.name}: {layer.dtype} {given}, not {dtype} {due}")
        if is_plain and layer.scales:
            raise PayloadError(f"layer {layer.name}: has scales but is not quantised")


def _check_place(claim: Claim, identity: Identity) -> None:
    size = identity.chunk_tokens
    if claim.token_start % size or claim.token_end - claim.token_start != size:
        raise PayloadError(f"its tokens are not a whole chunk of {size} tokens")
    is_first = claim.token_start == 0
    if is_first != (claim.parent_hash == root_hash(claim.key.namespace)):
        raise PayloadError("its parent hash does not fit its first token")


def _dtypes(identity: Identity, group: GroupIdentity) -> set[str]:
    """Return the dtypes that the pages of a group may have."""
    if group.kind == "mamba":
        return {_STATE}
    plain = _PLAIN.get(identity.kv_dtype)
    if plain is not None:
        return {plain} | (set() if identity.quantization is None else _CHECKPOINTS)
    # Some layers of a quantised cache may keep the dtype of the model.
    models = _PLAIN.get(dict(identity.extra).get("dtype", ""))
    return _FP8.get(identity.kv_dtype, _BYTES) | (set() if models is None else {models})


def _pages(
    identity: Identity, group: GroupIdentity, shard: Shard, found: tuple[int, ...]
) -> tuple[int, int, int, int] | None:
    """Return the shape of a layer's pages: blocks, heads, tokens per block, content.

    None if the group has no payloads. ``found`` is the shape in the payload. Its block size may be
    any if tokens are stored one by one, and only replicas know how a page is divided that holds
    other things than tokens.
    """
    heads, tokens = shard.head_end - shard.head_start, identity.chunk_tokens // shard.tokens.size
    blocks, size = stored_blocks(group, identity.chunk_tokens), group.block_size
    if not blocks:
        return None
    if group.kind == "mamba":
        return 1, heads, 1, group.content
    if group.page is not None:
        return blocks, heads, found[2], found[3]
    found_size = found[2]
    is_divisible = identity.page_layout == "canonical" and keeps_all(group) and size == 1
    if is_divisible and tokens % found_size == 0:
        blocks, size = tokens // found_size, found_size
    return blocks, heads, size, group.content


_LINES_AT_ONCE: Final = 32
_COPIES: Final = 3
"""Copies of a payload in memory: as read, as encoded, and as passed to the store."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A namespace of an export, as it will be in this cache."""

    namespace: StoredNamespace
    identity: Identity
    document: bytes | None
    """The identity document to write first; None if the cache has it."""


def arrivals(view: BackendsView, source: ReadStore, names: Sequence[str]) -> list[Arrival]:
    """Return the namespaces ``names`` of an export.

    Raises ``ConfigError`` for a namespace without a valid identity document in the cache or the
    export, and for one that does not contain KV.
    """
    found = []
    for name in names:
        document, known = None, read_namespace(view.bulk, name)
        text = identity_document(view.bulk, name) if known.is_known else None
        if text is None:  # also if the cache's document was deleted just now
            known = read_namespace(source, name)
            text = document = identity_document(source, name)
        if text is None or not known.is_known:
            raise ConfigError(
                f"{name} is a foreign namespace: neither this cache nor the export has its "
                f"identity document ({identity_path(name)}), so its payloads cannot be checked"
            )
        found.append(Arrival(known, _identity_of(text, name), document))
    return found


def _identity_of(document: bytes, name: str) -> Identity:
    try:
        identity = parse_identity(document, name)
    except PayloadError as exc:
        raise ConfigError(f"{exc}; only KV can be imported") from exc
    if identity.page_layout == HANDOFF_LAYOUT:
        raise ConfigError(f"{name} contains hand-offs between engines, which cannot be imported")
    return identity


class Import:
    """The units of work of an import.

    They count ``added``, ``present`` (already stored), ``indexed`` (stored without a record) and
    ``busy`` (being saved by a replica), and find ``missing`` and ``refused``.
    """

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
        """Shard fields of the payloads that are stored now, by namespace."""

    def documents(self) -> int:
        """Write the identity documents that this cache lacks, and return their number."""
        new = [one for one in self._arrivals.values() if one.document is not None]
        for one in new:
            assert one.document is not None
            self._view.bulk.put_if_absent(identity_path(one.namespace.name), one.document)
        return len(new)

    def lines(self, lines: Sequence[ManifestLine]) -> Iterator[Unit]:
        """Yield units that import these payloads."""
        for start in range(0, len(lines), _LINES_AT_ONCE):
            some = lines[start : start + _LINES_AT_ONCE]
            # Repeated in every run: chunks of an earlier run may be deleted since.
            yield Unit(f"import {start}", self._work(some), again=True, items=len(some))

    def shapes(self) -> Iterator[Unit]:
        """Yield units that publish the stored shards, so that replicas of every shape find them.

        They must run after ``lines``.
        """
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
                    counters.find("missing", line.key, line.nbytes, "missing from the export")
                    return
                if entry.nbytes != line.nbytes:
                    raise PayloadError(
                        f"{entry.nbytes} bytes, but the manifest states {line.nbytes}"
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
            raise PayloadError("deleted while it was read")
        if sha256(payload).hexdigest() != line.sha256:
            raise PayloadError("its SHA-256 differs from the manifest")
        header = self._checker.read(payload, None)
        check_told(header, line)
        if header.marks.signed_by or header.codec != "none":
            raise PayloadError("sealed or compressed, which objkv export never writes")
        return header, payload

    def _save(self, header: Header, payload: bytes, seal: Seal | None) -> str:
        """Save a payload as a replica does, and return the counter to increase."""
        view, claim = self._view, header.claim
        path = claim.key.path()
        if not view.index.lease(path, view.owner, ttl_ms=view.lease_ms):
            return "busy"
        try:
            if view.bulk.put_if_absent(path, payload):
                publish_payload(view, header)
                return "added"
            there = existing_header(view.bulk, claim, seal)
            if there is None:  # truncated or another chunk's, so replicas cannot use it
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
    if seal is not None and seal.encrypts:
        # Token ids reveal the prompt, and headers are not encrypted.
        provenance = replace(provenance, tokens=None)
    made = encode(header.claim, frames.layers, pages, codec=codec, provenance=provenance, seal=seal)
    return read_header(made, seal=seal), bytes(made)


def new_bytes(
    index: ReadIndex, lines: Sequence[ManifestLine], arrivals: Sequence[Arrival]
) -> dict[str | None, int]:
    """Return the bytes of payloads without a record, by tenant.

    Payloads with a record are already counted. Every tenant of the export is included, even with 0.
    """
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
