"""JSON as a header's reader wants it: one object, ASCII, no name twice."""

import json
from typing import Any

from objkv.errors import PayloadError


def load_object(text: bytes | bytearray) -> dict[str, Any]:
    """The object that ``text`` is. Raises ``PayloadError`` for anything else."""
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
