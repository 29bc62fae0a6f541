"""JSON as a header's reader wants it: one object, ASCII, no name twice."""

import json
from typing import Any, Final

from objkv.errors import PayloadError

PARTS_MAX: Final = 1 << 17
"""Of values in one document: each may take 200 bytes of memory, whatever its length is. A layer has
twelve, so that over 10,000 layers fit."""


def check_parts(text: bytes | bytearray) -> None:
    """Raise ``PayloadError`` if ``text`` may have more than ``PARTS_MAX`` values."""
    parts = text.count(b",") + text.count(b"[") + text.count(b"{")
    if parts > PARTS_MAX:
        raise PayloadError(f"a header of {parts} parts; at most {PARTS_MAX} are allowed")


def load_object(text: bytes | bytearray) -> dict[str, Any]:
    """The object that ``text`` is. Raises ``PayloadError`` for anything else."""
    check_parts(text)
    try:
        document = json.loads(text.decode("ascii"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as exc:
        raise PayloadError(f"the header is not JSON: {exc}") from exc
    if not isinstance(document, dict):
        raise PayloadError("the header is not a JSON object")
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name occurs twice")
    return out
