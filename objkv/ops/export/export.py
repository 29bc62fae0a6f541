"""Exports chunks as plain safetensors files: uncompressed, unsealed and fully verified.

The result is a bulk store of its own, with the same paths and identity documents. Any safetensors
reader can open its files, and ``objkv`` can use it with ``bulk_url: file:///…``. The cache is not
changed. A file from an earlier run is kept if it is the correct export of the payload.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Final

from objkv.codec.payload import Header, encode, frame_pages
from objkv.codec.seal import Seal
from objkv.codec.values import ENCRYPTED, UNSEALED
from objkv.errors import PayloadError
from objkv.index.base import ReadIndex, Record
from objkv.index.shapes import is_shapes, shape_path
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import identity_path
from objkv.ops.backends_view import (
    BackendsView,
    NamespacePart,
    StoredNamespace,
    identity_document,
    record_keys,
    stored_entries,
    stored_header,
)
from objkv.ops.export.manifest import ManifestLine
from objkv.ops.runs import Check, Counters, Unit
from objkv.ops.verify_payload import Budget, Checker
from objkv.stores.base import Entry, WriteStore

_KEYS_AT_ONCE: Final = 32
_COPIES: Final = 3
"""Copies of a payload in memory during its export: as stored, its pages, and as exported."""


class Export:
    """The units of work of an export.

    They count ``exported``, ``kept`` and ``gone``, and find ``corrupt`` and ``missing``.
    """

    def __init__(
        self,
        view: BackendsView,
        target: WriteStore,
        add: Callable[[ManifestLine], None],
        *,
        budget: Budget,
        with_tokens: bool,
    ) -> None:
        """``add`` is called from any thread with every payload that is in ``target``."""
        self._view = view
        self._target = target
        self._add = add
        self._budget = budget
        self._with_tokens = with_tokens
        self._checker = Checker(view, budget)

    def documents(self, names: Sequence[str]) -> None:
        """Export the identity documents, which describe the payloads.

        Raises ``PayloadError`` if one is missing.
        """
        for name in names:
            document = identity_document(self._view.bulk, name)
            if document is None:
                raise PayloadError(
                    f"{identity_path(name)} is missing, so its namespace cannot be exported"
                )
            self._target.put(identity_path(name), document)

    def parts(
        self, parts: Sequence[NamespacePart], namespaces: Mapping[str, StoredNamespace]
    ) -> Iterator[Unit]:
        """Yield units that export these parts of the bulk store."""
        for part in parts:
            work = self._part_work(part, namespaces)
            yield Unit(f"export {part.name}", work, again=True, items=part.payloads)

    def keys(self, keys: Sequence[ChunkKey], seal: Seal | None) -> Iterator[Unit]:
        """Yield units that export these payloads, which have records."""
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            some = keys[start : start + _KEYS_AT_ONCE]
            work = self._keys_work(some, seal)
            yield Unit(f"export {start}", work, again=True, items=len(some))

    def _part_work(
        self, part: NamespacePart, namespaces: Mapping[str, StoredNamespace]
    ) -> Callable[[Counters, Check], None]:
        def work(counters: Counters, check: Check) -> None:
            seal = self._view.seal_of(namespaces[part.namespace])
            for key, entry in stored_entries(self._view.bulk, part):
                check()
                if key is not None:
                    self._export(key, entry, seal, counters)

        return work

    def _keys_work(
        self, keys: Sequence[ChunkKey], seal: Seal | None
    ) -> Callable[[Counters, Check], None]:
        def work(counters: Counters, check: Check) -> None:
            for key in keys:
                check()
                entry = self._view.bulk.head(key.path())
                if entry is None:
                    counters.find("missing", key.path(), 0, "has a record, not in the bulk store")
                else:
                    self._export(key, entry, seal, counters)

        return work

    def _export(self, key: ChunkKey, entry: Entry, seal: Seal | None, counters: Counters) -> None:
        try:
            with self._budget.taking(_COPIES * entry.nbytes):
                if self._keep(key, entry, seal, counters):
                    return
                payload = self._view.bulk.get(key.path())
                if payload is None:
                    counters.count("gone")
                    return
                header = self._checker.read(payload, seal)
                _check_claim(header, key)
                plain = plain_payload(header, payload, with_tokens=self._with_tokens)
                self._target.put(key.path(), plain)
                self._target.put_if_absent(shape_path(key.namespace, key.field), b"")
                self._record(header, plain)
                counters.count("exported", len(plain))
        except PayloadError as exc:
            counters.find("corrupt", entry.key, entry.nbytes, str(exc))

    def _keep(self, key: ChunkKey, entry: Entry, seal: Seal | None, counters: Counters) -> bool:
        """Whether an earlier run exported the payload correctly."""
        there = self._target.get(key.path())
        if there is None:
            return False
        source = stored_header(self._view.bulk, entry, seal)
        try:
            header = self._checker.read(there, None)
        except PayloadError:
            return False
        if source is None or not _is_export(header, source, with_tokens=self._with_tokens):
            return False
        self._record(header, memoryview(there))
        counters.count("kept", len(there))
        return True

    def _record(self, header: Header, plain: memoryview) -> None:
        claim = header.claim
        self._add(
            ManifestLine(
                key=claim.key.path(),
                token_start=claim.token_start,
                token_end=claim.token_end,
                parent=claim.parent_hash.hex(),
                nbytes=len(plain),
                sha256=sha256(plain).hexdigest(),
            )
        )


def plain_payload(header: Header, payload: bytes, *, with_tokens: bool) -> memoryview:
    """Return the chunk uncompressed and unsealed.

    Raises ``PayloadError``, also if the encryption key is not configured.
    """
    import numpy as np  # late: commands that only print do not need it

    frames = header.frames
    if header.opened is None and any(codec.endswith(ENCRYPTED) for codec in frames.codecs):
        raise PayloadError("encrypted with a key that is not configured")
    pages = []
    for number, layer in enumerate(frames.layers):
        scratch = np.empty(layer.nbytes, np.uint8).data
        pages.append(frame_pages(header, number, payload, scratch))
    provenance = header.provenance
    if not with_tokens:
        provenance = replace(provenance, tokens=None)
    return encode(header.claim, frames.layers, pages, codec="none", provenance=provenance)


def chain_keys(index: ReadIndex, namespace: str, beginning: str, *, below: bool) -> list[ChunkKey]:
    """Return the payloads of the chunk whose prefix hash starts with ``beginning``, and before it.

    With ``below``, also the payloads of all chunks that continue it. Keeps the records of the
    namespace in memory, about 1 KiB each. Raises ``PayloadError`` unless there is one such chunk.
    """
    records = {r.prefix_hash: r for r in index.scan(namespace) if not is_shapes(r)}
    found = [one for one in records if one.hex().startswith(beginning)]
    if len(found) != 1:
        what = "no chunk starts" if not found else f"{len(found)} chunks start"
        raise PayloadError(f"{what} with {beginning} in {namespace}")
    chain: dict[bytes, Record] = {}
    at = records.get(found[0])
    while at is not None and at.prefix_hash not in chain:
        chain[at.prefix_hash] = at
        at = records.get(at.parent_hash)
    chosen = list(reversed(chain.values()))
    if below:
        chosen += _below(records, found[0])
    return [key for record in chosen for key in record_keys(namespace, record)]


def _below(records: Mapping[bytes, Record], top: bytes) -> list[Record]:
    children: dict[bytes, list[Record]] = {}
    for record in records.values():
        children.setdefault(record.parent_hash, []).append(record)
    found: dict[bytes, Record] = {}
    left = [top]
    while left:
        for record in children.get(left.pop(), ()):
            if record.prefix_hash not in found and record.prefix_hash != top:
                found[record.prefix_hash] = record
                left.append(record.prefix_hash)
    return list(found.values())


def _is_export(there: Header, source: Header, *, with_tokens: bool) -> bool:
    """Whether ``there``, whose bytes are verified, is the export of ``source``."""
    expected = source.provenance if with_tokens else replace(source.provenance, tokens=None)
    if (there.claim, there.frames.layers, there.provenance) != (
        source.claim,
        source.frames.layers,
        expected,
    ):
        return False
    if there.codec != "none" or there.marks != UNSEALED:
        return False
    # Encrypted frames have no raw digest. Their token digest is salted per payload, so only the
    # payload's own export has the same one.
    is_encrypted = any(codec.endswith(ENCRYPTED) for codec in source.frames.codecs)
    return is_encrypted or there.frames.raw_checksums == source.frames.raw_checksums


def _check_claim(header: Header, key: ChunkKey) -> None:
    if header.claim.key != key:
        raise PayloadError(f"claims to be {header.claim.key.path()}")
