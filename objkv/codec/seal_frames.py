"""Encrypted frames: AES-256-GCM with one derived key per payload.

Deriving keys lets a tenant's key encrypt any amount of data: each payload has a random salt, and
under its key every frame has one nonce, its number. Memory that the model reads receives no
decrypted bytes before their tag is verified.
"""

import hmac
import threading
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

from objkv.codec.compress import Buffer
from objkv.codec.values import Claim, FramePlace, LayerSpec
from objkv.errors import KeyMismatch, PayloadError

SALT_BYTES: Final = 32
_KEY_INFO = b"objkv-encryption-1\n"
_FRAME_INFO = "objkv-frame-1\n"
_NONCE_BYTES = 12
_TAG_HEX = 32
_KEPT_BYTES_MAX = 8 << 20
"""Memory that a thread keeps for decrypting compressed frames; larger frames get their own."""


class AesFrames:
    """Encrypts and decrypts the frames of one payload with its own key. Thread-safe."""

    def __init__(self, secret: bytes, salt: bytes, claim: Claim, frames: int) -> None:
        """Args:
        secret: the tenant's key.
        salt: ``SALT_BYTES``, random, from the payload's header.
        frames: the payload's number of frames.
        """
        path = claim.key.path()
        assert len(salt) == SALT_BYTES
        keys = hkdf(secret, salt, _KEY_INFO + path.encode(), 64)
        self._aes = load_aes().algorithms.AES(keys[:32])
        self._blind = keys[32:]
        self._frames = frames
        self._claim = (
            f"{_FRAME_INFO}{path}\n{claim.parent_hash.hex()}\n"
            f"{claim.token_start} {claim.token_end}\n"
        )

    def __repr__(self) -> str:
        return f"<AesFrames {self._frames} frames>"

    def bind(self, token_digest: str) -> None:
        """Bind the cipher to the header's token digest, which belongs to the claim. Call it before
        any frame."""
        self._claim += f"{token_digest}\n"

    def encrypt(self, place: FramePlace, source: Buffer, target: memoryview) -> str:
        """Encrypt ``source`` into ``target``, which has the same length. Return the tag, 32 hex
        digits. The two may be the same memory, but must not overlap otherwise."""
        lib = load_aes()
        context = lib.Cipher(self._aes, lib.modes.GCM(_nonce(place.number))).encryptor()
        context.authenticate_additional_data(self._about(place))
        context.update_into(source, target)
        context.finalize()
        tag: str = context.tag.hex()
        return tag

    def decrypt(self, place: FramePlace, stored: memoryview, out: memoryview, tag: str) -> None:
        """Decrypt ``stored`` into ``out``, which has the same length and does not overlap. Raises
        ``PayloadError`` unless it was encrypted for this claim and place; ``out`` is then
        undefined."""
        lib = load_aes()
        if len(tag) != _TAG_HEX:  # a shorter tag would be easier to guess
            raise PayloadError(f"layer {place.layer.name!r}: the frame's tag is missing")
        mode = lib.modes.GCM(_nonce(place.number), bytes.fromhex(tag))
        context = lib.Cipher(self._aes, mode).decryptor()
        context.authenticate_additional_data(self._about(place))
        context.update_into(stored, out)
        try:
            context.finalize()
        except lib.InvalidTag:
            raise KeyMismatch(
                f"layer {place.layer.name!r} was not encrypted for this claim and position, "
                "or with another key"
            ) from None

    def blinded(self, number: int, checksum: str) -> str:
        """Return the form of a decoded page's ``checksum`` that a header may reveal; 32 hex digits
        each."""
        message = number.to_bytes(8, "little") + bytes.fromhex(checksum)
        return hmac.digest(self._blind, message, "sha256")[:16].hex()

    def blinded_tokens(self, token_digest: str) -> str:
        """Return the token digest in the form that a header may reveal, 64 hex digits each. Guessed
        tokens cannot be compared with it."""
        return hmac.digest(self._blind, bytes.fromhex(token_digest), "sha256").hex()

    def _about(self, place: FramePlace) -> bytes:
        """Return a frame's identity and content type, which are authenticated along with its
        bytes."""
        layer = place.layer
        text = (
            f"{self._claim}{place.number} {self._frames}\n"
            f"{place.codec} {layer.dtype} {_shape(layer)}\n{layer.scales or ''}\n{layer.name}"
        )
        return text.encode("utf-8", "surrogatepass")


class _Kept(threading.local):
    memory = memoryview(b"")


_kept = _Kept()


def compressed_memory(nbytes: int) -> memoryview:
    """Return memory of this thread for one frame between decryption and decoding, valid until the
    next call."""
    import numpy as np  # imported late: commands that only print do not need it

    if nbytes > _KEPT_BYTES_MAX:
        return np.empty(nbytes, np.uint8).data
    if _kept.memory.nbytes < nbytes:
        _kept.memory = np.empty(nbytes, np.uint8).data
    return _kept.memory[:nbytes]


@cache
def load_aes() -> Any:
    """Return the library's names. Imported only if there is an encryption key; raises
    ImportError."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    return SimpleNamespace(Cipher=Cipher, algorithms=algorithms, modes=modes, InvalidTag=InvalidTag)


def hkdf(secret: bytes, salt: bytes, info: bytes, nbytes: int) -> bytes:
    """Return key material by HKDF-SHA256 (RFC 5869)."""
    base = hmac.digest(salt, secret, "sha256")
    out = last = b""
    for count in range(1, -(-nbytes // 32) + 1):
        last = hmac.digest(base, last + info + bytes([count]), "sha256")
        out += last
    return out[:nbytes]


def _nonce(number: int) -> bytes:
    return number.to_bytes(_NONCE_BYTES, "little")


def _shape(layer: LayerSpec) -> str:
    return "x".join(map(str, layer.shape))
