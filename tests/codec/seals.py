"""Keys and seals of the tests. The keys are public and must not be used for anything else."""

import json
from dataclasses import replace
from typing import Any

from objkv.codec.header import digest
from objkv.codec.seal import Seal, SealKey

SIGNER = SealKey("sign-1", "*", bytes(range(32)))
ENCRYPTER = SealKey("encrypt-1", "*", bytes(range(32, 64)))

KEYS = {
    "signed": ([SIGNER], []),
    "encrypted": ([], [ENCRYPTER]),
    "signed and encrypted": ([SIGNER], [ENCRYPTER]),
}
"""To sign and to encrypt with."""
SEALS = {kind: Seal(*keys) for kind, keys in KEYS.items()}


def other_seal(kind: str, secret: bytes = b"else" * 8) -> Seal:
    """The same way to seal with keys of the same ids, which are others."""
    return Seal(*([replace(key, secret=secret) for key in keys] for keys in KEYS[kind]))


def reworked(header: dict[str, Any], frames: bytes) -> bytes:
    """Return a payload that can be made without a key: any JSON and any frames, with the right
    length and the right checksum of the header."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-(len(text) + 8) // 4096) * 4096 - 8)
    return rechecked(len(text).to_bytes(8, "little") + text) + frames


def rechecked(header: bytes | bytearray) -> bytes:
    """A whole header with its checksum put right."""
    head = bytearray(header)
    head[37:69] = b"0" * 32
    head[37:69] = digest(head).encode()
    return bytes(head)
