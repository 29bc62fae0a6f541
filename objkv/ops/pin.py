"""Pins: prefixes that are protected from expiry and eviction until a date.

Each pin is a document in the bulk store. Pinning writes this document and then updates the index.
Unpinning updates the index and then deletes the document. A command that stops halfway is therefore
still listed, and running it again completes it. After each update of the index, the documents are
read again; if they have changed, the update is repeated, so the last update reflects all documents.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from objkv.cache.pins import UNTIL_S_MAX, Pin, pin_path, read_pin, scan_pins
from objkv.errors import ConfigError, NotStored, PayloadError
from objkv.index.base import PruneIndex, ReadIndex, Record
from objkv.keys.identity import Identity
from objkv.keys.prefix import PromptExtras, prefix_hashes
from objkv.ops.match import look_up
from objkv.stores.base import PruneStore, ReadStore

_CHUNKS_MAX = 90_000
_UPDATES_MAX = 16
"""Index updates for one pin while other pins keep changing."""


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """A prefix that is protected from expiry and eviction, and how much of it is stored."""

    namespace: str
    leaf: str
    """Prefix hash of its last chunk, in hex digits, which identifies the pin."""
    tokens: int
    chunks: int
    until_s: int
    nbytes: int
    """Bytes of the payloads in the index."""
    missing: int
    """Chunks without a record. Readers cannot find the chunks after the first of them."""
    by: str | None = None
    """Who pinned it, by their own statement; null from the Python client."""
    created_s: int = 0
    """When it was pinned."""


@dataclass(frozen=True, slots=True)
class PinList:
    """All pins of some namespaces."""

    pins: tuple[PinnedPrefix, ...]
    problems: tuple[str, ...]
    """Unreadable documents, and why."""


def chain_of(index: ReadIndex, namespace: str, leaf: bytes) -> list[Record]:
    """Return the records from the first chunk of a prompt to ``leaf``, with one lookup for each.
    Raises ``NotStored`` if one is missing."""
    chain: list[Record] = []
    wanted, end = leaf, None
    while True:
        [record] = index.lookup(namespace, [wanted])
        if record is None or not record.shards or end not in (None, record.token_end):
            what = f"the chunk before token {chain[-1].token_start:,}" if chain else leaf.hex()
            raise NotStored(f"{namespace}: {what} has no record")
        chain.append(record)
        if record.token_start == 0:
            return chain[::-1]
        if len(chain) == _CHUNKS_MAX or record.token_end <= record.token_start:
            raise ConfigError(f"{namespace}: the chain of {leaf.hex()} does not end")
        wanted, end = record.parent_hash, record.token_start


def served_prefix(
    index: ReadIndex, identity: Identity, tokens: Sequence[int], extras: PromptExtras
) -> list[Record]:
    """Return the records of the chunks of a prompt that replicas would be served."""
    hashes = prefix_hashes(identity.namespace(), tokens, identity.chunk_tokens, extras)
    records, usable = look_up(index, identity, hashes)
    return [record for record in records[:usable] if record is not None]


@dataclass(frozen=True, slots=True)
class Pinner:
    """Pins and unpins prefixes. ``ttl_s`` is the lifetime of unpinned records."""

    bulk: PruneStore
    index: PruneIndex
    ttl_s: int
    clock: Callable[[], float] = time.time

    def pin(
        self, namespace: str, chain: Sequence[Record], *, until_s: int, by: str | None = None
    ) -> PinnedPrefix:
        """Pin the prefix of these records, first chunk first, until ``until_s``. This replaces an
        earlier pin of the prefix, even a longer one. Chunks shared with other pinned prefixes stay
        pinned until the last of these pins ends."""
        assert chain
        now_s = self.clock()
        if not now_s < until_s < UNTIL_S_MAX:
            raise ConfigError("a pin must end in the future and within 30,000 years")
        chunks = tuple(record.prefix_hash for record in chain)
        pin = Pin(namespace, chunks, chain[-1].token_end, until_s, int(now_s), by)
        self.bulk.put(pin.path(), pin.document())
        missing = self._update(pin, "")
        nbytes = sum(record.nbytes for record in chain)
        return _pinned(pin, nbytes, missing)

    def unpin(self, namespace: str, leaf: bytes) -> PinnedPrefix | None:
        """Remove the pin of the prefix that ends with ``leaf``; return None if there is none. Its
        chunks expire ``ttl_s`` from now, unless other pins keep them. An unreadable document pins
        nothing and is deleted."""
        path = pin_path(namespace, leaf)
        try:
            pin = read_pin(self.bulk, path)
        except PayloadError:
            self.bulk.delete(path)
            return PinnedPrefix(namespace, leaf.hex(), 0, 0, 0, 0, 0)
        if pin is None:
            return None
        self._update(pin, without=path)
        self.bulk.delete(path)
        missing = self._update(pin, "")  # a concurrent update may have included this document
        return _pinned(pin, 0, missing)

    def _update(self, pin: Pin, without: str) -> int:
        """Set the end of each chunk's pin; return how many are gone. ``without``: as ``_until``."""
        until = self._until(pin, without)
        for _ in range(_UPDATES_MAX):
            known = [
                self.index.pin(pin.namespace, chunk, until_s=until_s, ttl_s=self.ttl_s)
                for chunk, until_s in zip(pin.chunks, until, strict=True)
            ]
            before, until = until, self._until(pin, without)
            if until == before:
                break
        return known.count(False)

    def _until(self, pin: Pin, without: str) -> list[int]:
        """Return when each chunk's pin ends, by all documents except ``without``; 0 if unpinned."""
        until = dict.fromkeys(pin.chunks, 0)
        now_s = self.clock()
        for other in scan_pins(self.bulk, pin.namespace):
            if isinstance(other, Pin) and other.path() != without and other.until_s > now_s:
                for chunk in until.keys() & other.chunks:
                    until[chunk] = max(other.until_s, until[chunk])
        return [until[chunk] for chunk in pin.chunks]


def list_pins(
    bulk: ReadStore, index: ReadIndex, namespaces: Sequence[str], *, now_s: float
) -> PinList:
    """Return the active pins of these namespaces, the next to end first."""
    pins, problems = [], []
    for namespace in namespaces:
        for pin in scan_pins(bulk, namespace):
            if isinstance(pin, PayloadError):
                problems.append(str(pin))
            elif pin.until_s > now_s:
                pins.append(_described(index, pin))
    pins.sort(key=lambda pin: (pin.until_s, pin.namespace, pin.leaf))
    return PinList(tuple(pins), tuple(problems))


def remove_ended_pins(
    bulk: PruneStore, namespace: str, *, now_s: float, grace_s: float = 0.0
) -> int:
    """Delete the documents of pins that ended ``grace_s`` ago, and return their number. For sweeps.
    Each document is read again right before, because the pin may have been extended."""
    ended_s, removed = now_s - grace_s, 0
    pins = (pin for pin in scan_pins(bulk, namespace) if isinstance(pin, Pin))
    for path in [pin.path() for pin in pins if pin.until_s <= ended_s]:
        with suppress(PayloadError):
            now = read_pin(bulk, path)
            if now is not None and now.until_s <= ended_s:
                removed += bulk.delete(path)
    return removed


def _described(index: ReadIndex, pin: Pin) -> PinnedPrefix:
    records = index.lookup(pin.namespace, pin.chunks)
    nbytes = sum(record.nbytes for record in records if record is not None)
    return _pinned(pin, nbytes, records.count(None))


def _pinned(pin: Pin, nbytes: int, missing: int) -> PinnedPrefix:
    return PinnedPrefix(
        pin.namespace, pin.leaf.hex(), pin.tokens, len(pin.chunks), pin.until_s, nbytes, missing,
        pin.by, pin.created_s,
    )  # fmt: skip
