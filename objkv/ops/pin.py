"""Pins: prefixes that survive time to live and eviction until a day that somebody chose.

Pinning writes the document in the bulk store first and tells the index then; unpinning tells the
index first and removes the document last. So what breaks off halfway is still listed, and saying it
again completes it. Whoever has told the index reads the documents again: if others have changed
them meanwhile, it is told once more, so that who tells it last tells what all documents say.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from objkv.cache.pins import UNTIL_S_MAX, Pin, pin_path, read_pin, scan_pins
from objkv.cache.pins import read_pins as read_pins
from objkv.errors import ConfigError, PayloadError
from objkv.index.base import PruneIndex, ReadIndex, Record
from objkv.stores.base import PruneStore, ReadStore

_CHUNKS_MAX = 90_000
_TELLINGS_MAX = 16
"""Of one pin, while others change theirs all the time."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """One pinned prefix, and what became of it."""

    namespace: str
    leaf: bytes
    tokens: int
    chunks: int
    until_s: int
    nbytes: int
    """Of the payloads that the index knows."""
    missing: int
    """Chunks that the index does not know: nobody finds what comes after the first of them."""


@dataclass(frozen=True, slots=True)
class PinList:
    """All pins of some namespaces."""

    pins: tuple[Pinned, ...]
    problems: tuple[str, ...]
    """Documents that cannot be read, and why."""


def chain_of(index: ReadIndex, namespace: str, leaf: bytes) -> list[Record]:
    """The records from the first chunk of a prompt to ``leaf``. One lookup for each.

    Raises ``ConfigError`` where one of them is not stored.
    """
    chain: list[Record] = []
    wanted, end = leaf, None
    while True:
        [record] = index.lookup(namespace, [wanted])
        if record is None or not record.shards or end not in (None, record.token_end):
            what = "what comes before it" if chain else leaf.hex()
            where = f" (tokens before {chain[-1].token_start:,})" if chain else ""
            raise ConfigError(
                f"{namespace}: {what} is not stored{where}: objkv ls {namespace[:8]} lists the "
                "prefixes that can be pinned, by their leaf"
            )
        chain.append(record)
        if record.token_start == 0:
            return chain[::-1]
        if len(chain) == _CHUNKS_MAX or record.token_end <= record.token_start:
            raise ConfigError(f"{namespace}: the chain of {leaf.hex()} does not end")
        wanted, end = record.parent_hash, record.token_start


@dataclass(frozen=True, slots=True)
class Pinner:
    """Pins and unpins. ``ttl_s`` is the life of records that nothing pins."""

    bulk: PruneStore
    index: PruneIndex
    ttl_s: int
    clock: Callable[[], float] = time.time

    def pin(self, namespace: str, chain: Sequence[Record], *, until_s: int) -> Pinned:
        """Pin the prefix that these records are, the first chunk first, until ``until_s``, also if
        it was pinned for longer.

        What it shares with other pinned prefixes stays pinned for as long as any of them says.
        """
        assert chain
        now_s = self.clock()
        if not now_s < until_s < UNTIL_S_MAX:
            raise ConfigError("a pin must end in the future, and within 30,000 years")
        chunks = tuple(record.prefix_hash for record in chain)
        pin = Pin(namespace, chunks, chain[-1].token_end, until_s, int(now_s))
        self.bulk.put(pin.path(), pin.document())
        missing = self._tell(pin, "")
        nbytes = sum(record.nbytes for record in chain)
        return Pinned(namespace, pin.leaf, pin.tokens, len(chunks), until_s, nbytes, missing)

    def unpin(self, namespace: str, leaf: bytes) -> Pinned | None:
        """End the pin of the prefix that ends with ``leaf``; None if there is none.

        Its chunks live for ``ttl_s`` from now, or as long as other pins say. A document that
        cannot be read, which pins nothing, is removed.
        """
        path = pin_path(namespace, leaf)
        try:
            pin = read_pin(self.bulk, path)
        except PayloadError:
            self.bulk.delete(path)
            return Pinned(namespace, leaf, 0, 0, 0, 0, 0)
        if pin is None:
            return None
        self._tell(pin, but=path)
        self.bulk.delete(path)
        missing = self._tell(pin, "")  # others may have told what this document said
        return Pinned(namespace, leaf, pin.tokens, len(pin.chunks), pin.until_s, 0, missing)

    def _tell(self, pin: Pin, but: str) -> int:
        """Tell the index until when each of its chunks is pinned, by all documents ``but`` one; how
        many of them it does not know."""
        until = self._until(pin, but)
        for _ in range(_TELLINGS_MAX):
            known = [
                self.index.pin(pin.namespace, chunk, until_s=until_s, ttl_s=self.ttl_s)
                for chunk, until_s in zip(pin.chunks, until, strict=True)
            ]
            told, until = until, self._until(pin, but)
            if until == told:
                break
        return known.count(False)

    def _until(self, pin: Pin, but: str) -> list[int]:
        """Until when each of its chunks is pinned, by all documents ``but`` one; 0 if it is not."""
        until = dict.fromkeys(pin.chunks, 0)
        now_s = self.clock()
        for other in scan_pins(self.bulk, pin.namespace):
            if isinstance(other, Pin) and other.path() != but and other.until_s > now_s:
                for chunk in until.keys() & other.chunks:
                    until[chunk] = max(other.until_s, until[chunk])
        return [until[chunk] for chunk in pin.chunks]


def list_pins(
    bulk: ReadStore, index: ReadIndex, namespaces: Sequence[str], *, now_s: float
) -> PinList:
    """The pins of these namespaces that have not ended, the next to end first."""
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
    """Remove the documents of pins that ended ``grace_s`` ago; how many. For sweeps.

    Each is read again right before: somebody may have made the pin longer.
    """
    ended = [
        pin.path()
        for pin in scan_pins(bulk, namespace)
        if isinstance(pin, Pin) and _is_over(pin, now_s - grace_s)
    ]
    removed = 0
    for path in ended:
        try:
            pin = read_pin(bulk, path)
        except PayloadError:
            continue
        if pin is not None and _is_over(pin, now_s - grace_s):
            removed += bulk.delete(path)
    return removed


def _is_over(pin: Pin, at_s: float) -> bool:
    return pin.until_s <= at_s


def _described(index: ReadIndex, pin: Pin) -> Pinned:
    records = index.lookup(pin.namespace, pin.chunks)
    nbytes = sum(record.nbytes for record in records if record is not None)
    return Pinned(
        pin.namespace, pin.leaf, pin.tokens, len(pin.chunks), pin.until_s, nbytes,
        records.count(None),
    )  # fmt: skip
