"""Keys and seals of the tests. The keys are public and must not be used for anything else."""

from dataclasses import replace

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
