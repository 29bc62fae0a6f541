"""Documents of keys: what a key file holds, and what a key command prints.

Errors name a line or an entry and what is wrong with it, never anything that is written there.
"""

import base64
import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

from objkv.codec.seal import KEY_BYTES, KEY_ID, SealKey

KEYS_BYTES_MAX: Final = 1 << 20
"""Of a document."""
EVERY_TENANT: Final = "*"

_TENANT = re.compile(r"\*|[A-Za-z0-9._-]{1,64}")
_FIELDS = ("id", "tenant", "key")
_DISTINCT_MIN = 8
"""Different bytes that a random key has at least, but for one in 10^36."""


def parse_keys(text: str) -> list[SealKey]:
    """The keys of a document, in its order: lines of id, tenant and key, separated by blanks, with
    ``#`` before comments; or a JSON array of objects with these three names.

    Raises ValueError.
    """
    entries = _json_entries(text) if text.lstrip().startswith(("[", "{")) else _lines(text)
    keys = []
    for where, (key_id, tenant, secret) in entries:
        if re.fullmatch(KEY_ID, key_id) is None:
            raise ValueError(f"{where}: the id must be 1 to 64 letters, digits and ._-")
        if _TENANT.fullmatch(tenant) is None:
            raise ValueError(f"{where}: the tenant must be a tenant's name, or *")
        keys.append(SealKey(key_id, tenant, _secret(where, secret)))
    if not keys:
        raise ValueError("no key in it")
    if len({(key.id, key.tenant) for key in keys}) < len(keys):
        raise ValueError("two keys of one tenant have the same id")
    return keys


def keys_of(keys: Sequence[SealKey], tenant: str) -> list[SealKey]:
    """The keys that a tenant's payloads are sealed with, the first one, and opened with: its own,
    or those of everybody if it has none. Never both: what every tenant can sign proves nothing."""
    own = [key for key in keys if key.tenant == tenant]
    return own or [key for key in keys if key.tenant == EVERY_TENANT]


_Entries = Iterable[tuple[str, tuple[str, str, str]]]


def _lines(text: str) -> _Entries:
    for number, line in enumerate(text.splitlines(), 1):
        parts = line.partition("#")[0].split()
        if not parts:
            continue
        if len(parts) != len(_FIELDS):
            raise ValueError(f"line {number}: {len(parts)} words where id, tenant and key are due")
        yield f"line {number}", (parts[0], parts[1], parts[2])


def _json_entries(text: str) -> _Entries:
    document: Any = None
    with suppress(ValueError, RecursionError):  # which hold the document
        document = json.loads(text)
    if document is None:
        raise ValueError("it looks like JSON, and is none")
    if not isinstance(document, list):
        raise ValueError("JSON must be an array of keys")
    for number, entry in enumerate(document, 1):
        if not isinstance(entry, dict) or entry.keys() != set(_FIELDS):
            raise ValueError(f"entry {number}: not an object of id, tenant and key")
        values = [entry[name] for name in _FIELDS]
        if not all(isinstance(value, str) for value in values):
            raise ValueError(f"entry {number}: id, tenant and key must be text")
        yield f"entry {number}", (values[0], values[1], values[2])


def _secret(where: str, text: str) -> bytes:
    secret = b""
    with suppress(ValueError):
        if len(text) == 2 * KEY_BYTES:
            secret = bytes.fromhex(text)
        else:
            plain = text.rstrip("=").replace("-", "+").replace("_", "/")
            secret = base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    if len(secret) != KEY_BYTES:
        raise ValueError(f"{where}: the key must be {KEY_BYTES} bytes as hex or base64")
    if len(set(secret)) < _DISTINCT_MIN:
        raise ValueError(f"{where}: the key is not random: make one with `openssl rand -hex 32`")
    return secret
