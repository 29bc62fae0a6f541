"""Pins, written down in the bulk store: which chunks are to be kept, and until when.

One document per pinned prefix, ``<namespace>/pins/<hash of its last chunk>.json``, which names all
chunks up to it. It stands there before the index is told, and longer: whoever rebuilds an index, or
deletes payloads, reads these documents first.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from objkv.errors import PayloadError, StoreDenied
from objkv.keys.prefix import PREFIX_HASH_BYTES
from objkv.stores.base import ReadStore

FORMAT = 1
UNTIL_S_MAX = 1 << 40
DOCUMENT_BYTES_MAX = 4 << 20
"""Of a chain of 90,000 chunks; what is longer was not written by objkv."""
_COMMAS_MAX = 100_000
"""In a document of so many bytes; what has more is not taken apart."""
_PINS_MAX = 100_000
_CHUNKS_MAX = 1 << 22
"""Of all pins of a namespace together: 10^9 tokens in chunks of 256."""
_HASH = re.compile(f"[0-9a-f]{{{2 * PREFIX_HASH_BYTES}}}")


@dataclass(frozen=True, slots=True)
class Pin:
    """One pinned prefix."""

    namespace: str
    chunks: tuple[bytes, ...]
    """Prefix hashes of all its chunks, the first one first."""
    tokens: int
    until_s: int
    """Seconds since the epoch."""
    created_s: int

    def __post_init__(self) -> None:
        assert self.chunks
        assert 0 < self.until_s < UNTIL_S_MAX

    @property
    def leaf(self) -> bytes:
        """The hash of its last chunk, which names it."""
        return self.chunks[-1]

    def path(self) -> str:
        """Where its document lies."""
        return pin_path(self.namespace, self.leaf)

    def document(self) -> bytes:
        """What its document says."""
        values = {
            "format": FORMAT,
            "namespace": self.namespace,
            "chunks": [prefix_hash.hex() for prefix_hash in self.chunks],
            "tokens": self.tokens,
            "until_s": self.until_s,
            "created_s": self.created_s,
        }
        return json.dumps(values, separators=(",", ":")).encode("ascii")


def pins_folder(namespace: str) -> str:
    """What all pins of a namespace begin with."""
    return f"{namespace}/pins/"


def pin_path(namespace: str, leaf: bytes) -> str:
    """Where the document of the prefix lies that ends with ``leaf``."""
    return f"{pins_folder(namespace)}{leaf.hex()}.json"


def parse_pin(document: bytes, path: str) -> Pin:
    """The pin that ``document`` spells, which lies at ``path``. Raises ``PayloadError`` for
    anything that ``Pin.document`` does not write, or does not write there."""
    try:
        # Lists in lists take fifty times their own size.
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
        pin = Pin(values["namespace"], chunks, **numbers)
        if pin.path() != path:
            raise ValueError
    # The document is somebody else's: whatever the values' own checks say of it is its fault.
    except (AssertionError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as exc:
        raise PayloadError(f"{path}: not a pin of objkv") from exc
    return pin


def read_pin(bulk: ReadStore, path: str) -> Pin | None:
    """The pin at ``path``, None if there is none. Raises ``PayloadError``."""
    entry = bulk.head(path)
    if entry is None:
        return None
    if entry.nbytes > DOCUMENT_BYTES_MAX:
        raise PayloadError(f"{path}: not a pin of objkv: {entry.nbytes} bytes")
    document = bulk.get_range(path, 0, DOCUMENT_BYTES_MAX)
    return None if document is None else parse_pin(document, path)


def scan_pins(bulk: ReadStore, namespace: str) -> Iterator[Pin | PayloadError]:
    """All pins of a namespace, ended ones too; an error for each document that cannot be read."""
    for entry in bulk.scan(pins_folder(namespace)):
        try:
            pin = read_pin(bulk, entry.key)
        except PayloadError as exc:
            yield exc
            continue
        if pin is not None:
            yield pin


def read_pins(bulk: ReadStore, namespace: str) -> dict[bytes, int]:
    """Until when each pinned chunk is, by its prefix hash; also those whose time is over.

    Documents that cannot be read pin nothing: ``objkv pin --list`` names them. Raises
    ``StoreDenied`` for more than anybody pins: to leave some out would have them deleted.
    """
    until: dict[bytes, int] = {}
    chunks = 0
    for count, pin in enumerate(scan_pins(bulk, namespace), 1):
        chunks += len(pin.chunks) if isinstance(pin, Pin) else 0
        if count > _PINS_MAX or chunks > _CHUNKS_MAX:
            raise StoreDenied(
                f"{pins_folder(namespace)}: more than {_PINS_MAX} pins or {_CHUNKS_MAX} chunks in "
                "them: objkv pin --list shows them; remove those that nobody needs"
            )
        if isinstance(pin, Pin):
            for prefix_hash in pin.chunks:
                until[prefix_hash] = max(pin.until_s, until.get(prefix_hash, 0))
    return until
