"""Seals: signing restricts who can create payloads to holders of a key, encryption also who can
read them.

Without a seal (None) nothing is signed, checked or encrypted. With one, every payload that is not
sealed accordingly is refused. ``docs/format.md`` specifies seals.
"""

import base64
import ctypes
import hashlib
import hmac
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

from objkv.codec.compress import Buffer
from objkv.codec.values import (
    CHUNK_END,
    ENCRYPTED,
    SIGNATURE_AT,
    SIGNATURE_END,
    UNSEALED,
    Claim,
    Frame,
    FramePosition,
    Frames,
    Header,
    Marks,
    Provenance,
    digest,
)
from objkv.errors import KeyMismatch, PayloadError

KEY_BYTES: Final = 32
KEY_ID: Final = "[A-Za-z0-9._-]{1,64}"
SALT_BYTES: Final = 32
_KEY_INFO = b"objkv-encryption-1\n"
_FRAME_INFO = "objkv-frame-1\n"
_NONCE_BYTES = 12
_TAG_HEX = 32
_DOMAIN = b"objkv-signature-1\n"
_DERIVED_INFO = b"objkv-signing-key-1\n"
_BLANK = b"0" * (SIGNATURE_END - SIGNATURE_AT)
_SIGNATURE = re.compile(rf'","signature":"([0-9a-f]{{64}}) ({KEY_ID})"'.encode())
_MARK = re.compile(rf"([0-9a-f]{{64}}) ({KEY_ID})")


@dataclass(frozen=True, slots=True)
class SealKey:
    """A key of one tenant, or of all."""

    id: str
    """Appears in payloads in clear text."""
    tenant: str
    """``*`` means every tenant without a key of its own."""
    secret: bytes = field(repr=False)
    """``KEY_BYTES`` random bytes."""

    def __post_init__(self) -> None:
        assert re.fullmatch(KEY_ID, self.id)
        assert len(self.secret) == KEY_BYTES


class Seal:
    """The keys that sign and encrypt one tenant's payloads. Thread-safe."""

    def __init__(self, signing: Sequence[SealKey] = (), encryption: Sequence[SealKey] = ()) -> None:
        """The first key of each kind seals, and all of them open. Without keys of a kind, payloads
        are not sealed in that way. Raises ImportError if the encryption library is missing."""
        assert signing or encryption
        self._kinds = {"signing": signing, "encryption": encryption}
        # An encrypted payload is signed too: otherwise a forged header would not be detected.
        signing = signing or [_signing_key(key) for key in encryption]
        self._signing = {key.id: key for key in signing}
        self._encryption = {key.id: key for key in encryption}
        assert len(self._signing) == len(signing)
        assert len(self._encryption) == len(encryption)
        self.signer = signing[0]
        self.encrypter = encryption[0] if encryption else None
        if encryption:
            load_aes()

    def sign(self, header: bytearray) -> None:
        """Write the signature into a complete header with zeros for signature and checksum."""
        header[SIGNATURE_AT:SIGNATURE_END] = _signature(self.signer, header)

    def verify(self, header: bytearray) -> None:
        """Raise ``PayloadError`` unless ``header``, with zeros in place of its checksum, is signed
        with a known key. Overwrites the signature with zeros."""
        match = _SIGNATURE.match(header, CHUNK_END)
        if match is None:
            raise PayloadError(
                "the payload is not signed, but this process loads only signed payloads"
            )
        signature, key_id = bytes(match[1]), match[2].decode()
        key = self._signing.get(key_id)
        if key is None:
            raise KeyMismatch(
                f"the payload is signed with key {key_id!r}, which this process does not have"
            )
        header[SIGNATURE_AT:SIGNATURE_END] = _BLANK
        if not hmac.compare_digest(signature, _signature(key, header)):
            raise KeyMismatch(f"the signature of key {key_id!r} does not match")

    def open(self, header: Header) -> Header:
        """Return ``header``, whose text has passed ``verify``, with the means to verify its frames.
        Raises ``PayloadError`` for frames that are not sealed as required."""
        frames, marks = header.frames, header.marks
        encrypted = [codec.endswith(ENCRYPTED) for codec in frames.codecs]
        if self.encrypter is None:
            if any(encrypted):
                raise PayloadError(
                    "the payload is encrypted, but this process has no encryption key"
                )
            if not all(frames.proofs):
                raise PayloadError("the payload is signed, but not all of its frames are")
            return replace(header, is_sealed=True)
        if not all(encrypted):
            raise PayloadError(
                "the payload is not encrypted, but this process loads only encrypted payloads"
            )
        key = self._encryption.get(marks.encrypted_by)
        if key is None:
            raise KeyMismatch(
                f"the payload is encrypted with key {marks.encrypted_by!r}, "
                "which this process does not have"
            )
        cipher = AesFrames(key.secret, bytes.fromhex(marks.salt), header.claim, len(frames))
        cipher.bind(header.provenance.token_digest)
        return replace(header, is_sealed=True, cipher=cipher)

    @property
    def key_ids(self) -> str:
        """The ids of its keys, without secrets; the sealing key of each kind is first."""
        kinds = [f"{kind} {[key.id for key in keys]}" for kind, keys in self._kinds.items() if keys]
        return ", ".join(kinds)


class Sealing:
    """Seals a new payload of ``claim`` with ``frames`` frames in place, or without ``seal`` leaves
    it unsealed. Not thread-safe. Allocates no memory of a frame's size."""

    def __init__(
        self, claim: Claim, provenance: Provenance, frames: int, seal: Seal | None
    ) -> None:
        self.claim, self.seal = claim, seal
        self.marks = UNSEALED
        self.provenance = provenance
        """As it appears in the header."""
        self._cipher: AesFrames | None = None
        if seal is None:
            return
        self.marks = Marks(seal.signer.id)
        if seal.encrypter is None:
            return
        assert provenance.tokens is None, "token ids are the prompt: they stay secret"
        salt = os.urandom(SALT_BYTES)
        cipher = self._cipher = AesFrames(seal.encrypter.secret, salt, claim, frames)
        blinded = replace(provenance, token_digest=cipher.blinded_tokens(provenance.token_digest))
        cipher.bind(blinded.token_digest)
        self.provenance = blinded
        self.marks = Marks(seal.signer.id, seal.encrypter.id, salt.hex())

    def store(
        self, position: FramePosition, content: Buffer, raw_checksum: str | None, room: memoryview
    ) -> Frame:
        """Write a frame into ``room``, which is as long as ``content`` and may overlap it. Return
        it, with offset 0. ``raw_checksum``: of the pages; None if they are ``content``."""
        cipher = self._cipher
        if cipher is None:
            checksum, proof = digest(content), "" if self.seal is None else proof_of(content)
            _move(content, room)
        else:
            position = position._replace(codec=position.codec + ENCRYPTED)
            if raw_checksum is None:
                _move(content, room)
                content = room
            else:
                raw_checksum = cipher.blinded(position.number, raw_checksum)
            proof = cipher.encrypt(position, content, room)
            checksum = digest(room)
        sums = checksum, raw_checksum or checksum, proof
        return Frame(position.layer, position.codec, 0, len(room), *sums)

    def header(self, frames: Frames, checksum: str) -> Header:
        """Return the header of the payload, as a reader with the seal would parse it."""
        values = self.claim, frames, checksum, self.provenance, self.marks
        return Header(*values, is_sealed=self.seal is not None, cipher=self._cipher)


def _move(source: Buffer, target: memoryview) -> None:
    """Copy bytes that may overlap, without the GIL."""
    import numpy as np  # imported late: commands that only print do not need it

    content, place = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)
    if content.ctypes.data != place.ctypes.data:
        ctypes.memmove(place.ctypes.data, content.ctypes.data, content.nbytes)


def proof_of(stored: Buffer) -> str:
    """Return what a signature covers of an unencrypted frame: its SHA-256, 64 hex digits."""
    return hashlib.sha256(stored).hexdigest()


def seal_metadata(marks: Marks) -> dict[str, str]:
    """Return the seal's metadata, which follows the chunk; not yet signed."""
    metadata = {}
    if marks.signed_by:
        metadata["signature"] = f"{_BLANK.decode()} {marks.signed_by}"
    if marks.encrypted_by:
        metadata["encryption"] = f"{marks.salt} {marks.encrypted_by}"
    return metadata


def read_marks(metadata: dict[str, str]) -> Marks:
    """Return the marks in metadata. Raises ``PayloadError`` if they are malformed."""
    _, signed_by = _mark(metadata, "signature")
    salt, encrypted_by = _mark(metadata, "encryption")
    return Marks(signed_by, encrypted_by, salt) if signed_by or encrypted_by else UNSEALED


def _mark(metadata: dict[str, str], name: str) -> tuple[str, str]:
    text = metadata.get(name)
    if text is None:
        return "", ""
    match = _MARK.fullmatch(text)
    if match is None:
        raise PayloadError(f"metadata {name!r} is malformed")
    return match[1], match[2]


def _signing_key(key: SealKey) -> SealKey:
    """Return the signing key that is derived if only an encryption ``key`` is given."""
    return replace(key, secret=hkdf(key.secret, bytes(KEY_BYTES), _DERIVED_INFO, KEY_BYTES))


def _signature(key: SealKey, header: bytearray) -> bytes:
    return hmac.digest(key.secret, _DOMAIN + header, "sha256").hex().encode()


# Encrypted frames: AES-256-GCM with one derived key per payload, so that a tenant's key can encrypt
# any amount of data: each payload has a random salt, and under its key every frame has one nonce,
# its number. Memory that the model reads receives no decrypted bytes before their tag is verified.


class AesFrames:
    """Encrypts and decrypts the frames of one payload with its own key. Thread-safe."""

    def __init__(self, secret: bytes, salt: bytes, claim: Claim, frames: int) -> None:
        """``secret``: the tenant's key. ``salt``: the header's. ``frames``: how many there are."""
        path = claim.key.path()
        assert len(salt) == SALT_BYTES
        keys = hkdf(secret, salt, _KEY_INFO + path.encode(), 64)
        self._aes = load_aes().algorithms.AES(keys[:32])
        self._blind, self._frames = keys[32:], frames
        self._claim = (
            f"{_FRAME_INFO}{path}\n{claim.parent_hash.hex()}\n"
            f"{claim.token_start} {claim.token_end}\n"
        )

    def bind(self, token_digest: str) -> None:
        """Bind the cipher to the header's token digest. Call it before any frame."""
        self._claim += f"{token_digest}\n"

    def encrypt(self, position: FramePosition, source: Buffer, target: memoryview) -> str:
        """Encrypt ``source`` into ``target``, which has the same length. Return the tag, 32 hex
        digits. The two may be the same memory, but must not overlap otherwise."""
        lib = load_aes()
        context = lib.Cipher(self._aes, lib.modes.GCM(_nonce(position.number))).encryptor()
        context.authenticate_additional_data(self._about(position))
        context.update_into(source, target)
        context.finalize()
        tag: str = context.tag.hex()
        return tag

    def decrypt(
        self, position: FramePosition, stored: memoryview, out: memoryview, tag: str
    ) -> None:
        """Decrypt ``stored`` into ``out``, which has the same length and does not overlap. Raises
        ``PayloadError``, with ``out`` undefined, unless it was encrypted for this claim and
        place."""
        lib = load_aes()
        if len(tag) != _TAG_HEX:  # a shorter tag would be easier to guess
            raise PayloadError(f"layer {position.layer.name!r}: the frame's tag is missing")
        mode = lib.modes.GCM(_nonce(position.number), bytes.fromhex(tag))
        context = lib.Cipher(self._aes, mode).decryptor()
        context.authenticate_additional_data(self._about(position))
        context.update_into(stored, out)
        try:
            context.finalize()
        except lib.InvalidTag:
            raise KeyMismatch(
                f"layer {position.layer.name!r} was not encrypted for this claim and position, "
                "or with another key"
            ) from None

    def blinded(self, number: int, checksum: str) -> str:
        """Return the form of a decoded page's ``checksum`` that a header may reveal."""
        message = number.to_bytes(8, "little") + bytes.fromhex(checksum)
        return hmac.digest(self._blind, message, "sha256")[:16].hex()

    def blinded_tokens(self, token_digest: str) -> str:
        """Return the token digest as headers show it: no guess can be compared with it."""
        return hmac.digest(self._blind, bytes.fromhex(token_digest), "sha256").hex()

    def _about(self, position: FramePosition) -> bytes:
        """Return what is authenticated along with a frame's bytes."""
        layer = position.layer
        text = (
            f"{self._claim}{position.number} {self._frames}\n{position.codec} {layer.dtype} "
            f"{layer.shape_text}\n{layer.scales or ''}\n{layer.name}"
        )
        return text.encode("utf-8", "surrogatepass")


@cache
def load_aes() -> Any:
    """Return the library's names. Imported only if there is an encryption key; raises
    ImportError."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return SimpleNamespace(
        Cipher=Cipher,
        algorithms=algorithms,
        modes=modes,
        InvalidTag=InvalidTag,
        HKDF=HKDF,
        SHA256=SHA256,
    )


def hkdf(secret: bytes, salt: bytes, info: bytes, nbytes: int) -> bytes:
    """Return key material by HKDF-SHA256 (RFC 5869)."""
    lib = load_aes()
    derived: bytes = lib.HKDF(lib.SHA256(), nbytes, salt, info).derive(secret)
    return derived


def _nonce(number: int) -> bytes:
    return number.to_bytes(_NONCE_BYTES, "little")


# Key documents: the content of a key file, or the output of a key command. Errors name a line and
# its fault, never its content.
KEYS_BYTES_MAX: Final = 1 << 20
EVERY_TENANT: Final = "*"
_TENANT = re.compile(r"\*|[A-Za-z0-9._-]{1,64}")
_DISTINCT_MIN = 8
"""Minimum number of different bytes in a random key; it has fewer once in 10^36."""


def parse_keys(text: str) -> list[SealKey]:
    """Return the keys of a document, in order. It has lines of id, tenant and key, separated by
    blanks, with ``#`` before comments. Raises ValueError."""
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        where, words = f"line {number}", line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 3:
            raise ValueError(f"{where} has {len(words)} words, expected id, tenant and key")
        key_id, tenant, secret = words
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
    """Return the keys of a tenant: its own, or the common ones if it has none. The first one seals,
    all open. Never both kinds: a signature that every tenant can make proves nothing."""
    own = [key for key in keys if key.tenant == tenant]
    return own or [key for key in keys if key.tenant == EVERY_TENANT]


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
