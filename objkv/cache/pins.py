"""Pins in the bulk store: documents that list which chunks to keep, and until when.

Each pinned prefix has one document, ``<namespace>/pins/<hash of its last chunk>.json``. It is
written before the index is updated and outlives that: rebuilds and deletions read it first.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from objkv.errors import PayloadError, StoreDenied
from objkv.keys.prefix import PREFIX_HASH_BYTES
from objkv.stores.base import ReadStore

FORMAT = 1
UNTIL_S_MAX = 1 << 40
DOCUMENT_BYTES_MAX = 4 << 20
"""Size for a chain of 90,000 chunks; objkv writes no longer one."""
AUTHOR_CHARS_MAX = 100
_COMMAS_MAX = 100_000
"""A document with more is not parsed."""
_PINS_MAX = 100_000
_CHUNKS_MAX = 1 << 22
"""Chunks in all pins of a namespace together: 10^9 tokens in chunks of 256."""
_HASH = re.compile(f"[0-9a-f]{{{2 * PREFIX_HASH_BYTES}}}")


@dataclass(frozen=True, slots=True)
class Pin:
    """One pinned prefix."""

    namespace: str
    chunks: tuple[bytes, ...]
    """Prefix hashes of all its chunks, in order."""
    tokens: int
    until_s: int
    """Seconds since the epoch."""
    created_s: int
    by: str | None = None
    """Who pinned it, by their own statement; None in documents of older versions."""

    def __post_init__(self) -> None:
        assert self.chunks
        assert self.by is None or is_author(self.by)
        assert 0 < self.until_s < UNTIL_S_MAX

    @property
    def leaf(self) -> bytes:
        """The hash of its last chunk, which names the document."""
        return self.chunks[-1]

    def path(self) -> str:
        return pin_path(self.namespace, self.leaf)

    def document(self) -> bytes:
        values = {"format": FORMAT, **asdict(self), "chunks": [one.hex() for one in self.chunks]}
        if self.by is None:
            del values["by"]
        return json.dumps(values, separators=(",", ":")).encode("ascii")


def is_author(text: str) -> bool:
    """Whether a pin may name ``text`` as its author: without brackets, which are counted."""
    return 0 < len(text) <= AUTHOR_CHARS_MAX and text.isprintable() and not set(text) & set("[]{}")


def pins_folder(namespace: str) -> str:
    return f"{namespace}/pins/"


def pin_path(namespace: str, leaf: bytes) -> str:
    return f"{pins_folder(namespace)}{leaf.hex()}.json"


def parse_pin(document: bytes, path: str) -> Pin:
    """Return the pin. Raises ``PayloadError`` unless ``Pin.document`` writes this at ``path``."""
    try:
        # Nested lists take fifty times their own size in memory.
        if document.count(b"[") + document.count(b"{") > 2 or document.count(b",") > _COMMAS_MAX:
            raise ValueError
        values = json.loads(document)
        written = values["chunks"]
        if values["format"] != FORMAT or not all(_HASH.fullmatch(chunk) for chunk in written):
            raise ValueError
        numbers = {name: values[name] for name in ("tokens", "until_s", "created_s")}
        if not all(type(number) is int for number in numbers.values()):
            raise ValueError
        chunks = tuple(bytes.fromhex(chunk) for chunk in written)
        by = values.get("by")
        by = by if isinstance(by, str) and is_author(by) else None
        pin = Pin(values["namespace"], chunks, **numbers, by=by)
        if pin.path() != path:
            raise ValueError
    # The document is untrusted, so any failed check of its values is its fault.
    except (AssertionError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as exc:
        raise PayloadError(
            f"{path} is not a pin of objkv: pin the prefix again, or objkv unpin deletes it"
        ) from exc
    return pin


def read_pin(bulk: ReadStore, path: str) -> Pin | None:
    """Return the pin at ``path``, or None if it does not exist. Raises ``PayloadError``."""
    document = bulk.get(path, 0, DOCUMENT_BYTES_MAX + 1)
    if document is not None and len(document) > DOCUMENT_BYTES_MAX:
        raise PayloadError(f"{path} is not a pin of objkv: it is longer than any")
    return None if document is None else parse_pin(document, path)


def scan_pins(bulk: ReadStore, namespace: str) -> Iterator[Pin | PayloadError]:
    """Yield all pins of a namespace, also ended ones, and an error for each unreadable document."""
    for entry in bulk.scan(pins_folder(namespace)):
        try:
            pin = read_pin(bulk, entry.key)
        except PayloadError as exc:
            yield exc
            continue
        if pin is not None:
            yield pin


def read_pins(bulk: ReadStore, namespace: str) -> dict[bytes, int]:
    """Return the end time of each chunk's pin by prefix hash, also of ended pins. Unreadable
    documents pin nothing; ``objkv pin --list`` reports them. Raises ``StoreDenied`` above the
    limits, because a partial result would let pinned chunks be deleted."""
    until: dict[bytes, int] = {}
    chunks = 0
    for count, pin in enumerate(scan_pins(bulk, namespace), 1):
        chunks += len(pin.chunks) if isinstance(pin, Pin) else 0
        if count > _PINS_MAX or chunks > _CHUNKS_MAX:
            raise StoreDenied(
                f"{pins_folder(namespace)} has more than {_PINS_MAX} pins or {_CHUNKS_MAX} "
                "chunks: list them with `objkv pin --list` and remove unneeded ones"
            )
        if isinstance(pin, Pin):
            for prefix_hash in pin.chunks:
                until[prefix_hash] = max(pin.until_s, until.get(prefix_hash, 0))
    return until
