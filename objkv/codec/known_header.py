"""Reads and writes, without JSON, the header of a payload whose claim and layers are known.

A loader knows both in advance, and nearly every header it reads matches them; only provenance and
checksums are new. A header that equals the output of ``render`` byte for byte, uncompressed and
without token ids, is parsed at fixed positions. A header that differs in a single byte goes to
``header.parse_verified``, which alone decides about validity. Both first verify the header's own
checksum. A saver writes the same header repeatedly, at the same positions.
"""

import re
import struct
from collections.abc import Iterable
from itertools import accumulate, chain
from threading import Lock
from typing import Final, Literal

from objkv.codec.header import (
    CLAIM_FORMS,
    FORMAT_NAME,
    PROVENANCE_FORMS,
    bytes_max,
    claim_values,
    finished,
    opened,
    parse_verified,
    provenance_values,
    render,
    verified_text,
)
from objkv.codec.seal import KEY_ID, Seal, seal_metadata
from objkv.codec.sealing import Sealing
from objkv.codec.values import (
    CHECKSUM_END,
    ENCRYPTED,
    LENGTH_BYTES,
    OPENING,
    UNSEALED,
    WRITER_CHARS_MAX,
    Claim,
    Frame,
    Frames,
    Header,
    LayerSpec,
    Marks,
    Provenance,
    VerifiedText,
)
from objkv.errors import PayloadError
from objkv.keys.chunk import ChunkKey
from objkv.keys.topology import Shard

FORMS_MAX: Final = 512
"""Number of layer tuples whose form is kept, about 10 KiB each. A process reads those of its own
few groups, and of shards of other shapes, which can be dozens."""


def _joined(names: Iterable[str], values: Iterable[str]) -> str:
    """Return metadata as JSON text, from the end of one value to the end of the last."""
    return "".join(f'","{name}":"{value}' for name, value in zip(names, values, strict=True))


_BEGINNING = OPENING + b"0" * 32
_CLAIM_TEXT = _joined(("format", *CLAIM_FORMS), (FORMAT_NAME, *["%s"] * len(CLAIM_FORMS)))
_PROVENANCE_TEXT = _joined(PROVENANCE_FORMS, ["%s"] * len(PROVENANCE_FORMS)) + '"'
# A writer's name is printable ASCII that JSON does not escape.
_PLAIN_WRITER = rf"[ !#-\[\]-~]{{0,{WRITER_CHARS_MAX}}}"
_PROVENANCE = re.compile(
    (
        _PROVENANCE_TEXT
        % tuple(
            f"({_PLAIN_WRITER if name == 'writer' else form.pattern})"
            for name, form in PROVENANCE_FORMS.items()
        )
    ).encode()
)
_MARKS = re.compile(
    rf'(?:","signature":"0{{64}} ({KEY_ID}))?'
    rf'(?:","encryption":"([0-9a-f]{{64}}) ({KEY_ID}))?'.encode()
)
_HEX = b"0123456789abcdef"
_ANY = "f" * 32
"""Placeholder of a frame's checksum in a form. It occurs nowhere else between claim and tensors."""
_SOME_CLAIM = Claim(ChunkKey("0" * 32, bytes(20), 0, Shard(0, 1, 0, 1)), bytes(20), 0, 1)

Style = Literal["plain", "signed", "encrypted"]
"""How frames are sealed."""
_SOME_MARKS: dict[Style, Marks] = {
    "plain": UNSEALED,
    "signed": Marks(signed_by="k"),
    "encrypted": Marks("k", "k", "0" * 64),
}
_PROOF_HEX: dict[Style, int] = {"plain": 0, "signed": 64, "encrypted": 32}


class Form:
    """The constant parts of the headers of uncompressed payloads of ``layers``."""

    def __init__(self, layers: tuple[LayerSpec, ...], style: Style = "plain") -> None:
        """Raises ``PayloadError`` if no header can describe the layers, or only a different one."""
        self.layers = layers
        self._style = style
        self.room = bytes_max(layers, 0)
        """Upper bound of the header's length."""
        self.ends = tuple(accumulate((layer.nbytes for layer in layers), initial=0))
        """Start of each layer's pages after the header, then the end of the last."""
        self._codecs = ("none" + ENCRYPTED * (style == "encrypted"),) * len(layers)
        tail, total = self._example()
        # Each is 32 digits, so a SHA-256 takes two. The frames' come first: names, which may
        # contain anything, follow all frames.
        self._holes = 1 + _PROOF_HEX[style] // 32
        self._fixed = tuple(tail.split(_ANY.encode(), self._holes * len(layers)))
        places = "32s".join(f"{len(piece)}s" for piece in self._fixed)
        self._tail = struct.Struct(f"={places}")
        self._template = self._template_of(tail)
        starts = range(0, 32 * self._holes * len(layers), 32 * self._holes)
        self._checksums = [slice(at, at + 32) for at in starts]
        self._proofs = [slice(at + 32, at + 32 * self._holes) for at in starts]
        self._no_proofs = ("",) * len(layers)
        self._placed = self._place(total)

    def _example(self) -> tuple[bytes, int]:
        """Return the output of ``render`` after the provenance, and the length of such a header."""
        marks, proof = _SOME_MARKS[self._style], "f" * _PROOF_HEX[self._style]
        frames = [
            Frame(layer, codec, start, layer.nbytes, _ANY, _ANY, proof)
            for layer, codec, start in zip(self.layers, self._codecs, self.ends, strict=False)
        ]
        rendered = render(_SOME_CLAIM, frames, Provenance("0" * 64, "", 0), marks)
        text = verified_text(memoryview(rendered))
        # JSON or a dict may merge names, and layers may exceed the format's limits.
        if parse_verified(text).frames.layers != self.layers:
            raise PayloadError("layers that a header cannot distinguish")
        opening = _opening(_SOME_CLAIM, marks)
        assert text.raw.startswith(opening, LENGTH_BYTES)
        provenance = _PROVENANCE.match(text.raw, LENGTH_BYTES + len(opening))
        assert provenance is not None
        return rendered[provenance.end() :].rstrip(b" "), len(rendered)

    def _template_of(self, tail: bytes) -> str:
        """Return ``tail`` with ``%s`` for every checksum and proof."""
        proof = "f" * _PROOF_HEX[self._style] or _ANY
        template = tail.decode("ascii").replace("%", "%%")
        # Digits of a SHA-256 first, because they contain those of a checksum.
        for hole in sorted({_ANY, proof}, reverse=True):
            count = (1 + (self._style == "encrypted")) * len(self.layers)
            template = template.replace(hole, "%s", count)
        return template

    def read(self, text: VerifiedText, claim: Claim) -> Header | None:
        """Return the header in ``text``, or None if it does not have exactly this form and this
        claim."""
        raw, total = text.raw, len(text.raw)
        claimed = (_CLAIM_TEXT % claim_values(claim)).encode()
        marks, at = UNSEALED, CHECKSUM_END
        if self._style != "plain":
            marks, at = _read_marks(raw)
            if _style_of(marks) != self._style:
                return None
        if not raw.startswith(claimed, at):
            return None
        written = _PROVENANCE.match(raw, at + len(claimed))
        if written is None:
            return None
        end = written.end() + self._tail.size
        if end > total or raw.count(b" ", end) != total - end:
            return None
        parts = self._tail.unpack_from(raw, written.end())
        joined = b"".join(parts[1::2])
        if parts[::2] != self._fixed or joined.translate(None, _HEX):
            return None
        part = joined.decode("ascii").__getitem__
        checksums = tuple(map(part, self._checksums))
        proofs = self._no_proofs if self._holes == 1 else tuple(map(part, self._proofs))
        token_digest, writer, created_s = written.groups()
        provenance = Provenance(token_digest.decode(), writer.decode(), int(created_s))
        frames = self._frames(total, checksums, proofs)
        return Header(claim, frames, text.checksum, provenance, marks)

    def provenance_text(self, provenance: Provenance) -> bytes | None:
        """Return the provenance as ``render`` writes it; None if it does not fit the form."""
        text = (_PROVENANCE_TEXT % provenance_values(provenance)).encode()
        fits = provenance.tokens is None and _PROVENANCE.fullmatch(text) is not None
        return text if fits else None

    def write(
        self,
        provenance_text: bytes,
        sums: tuple[tuple[str, ...], tuple[str, ...]],
        sealing: Sealing,
    ) -> tuple[bytes, Header]:
        """Return the output of ``render``, and the header it describes.

        Args:
            provenance_text: ``self.provenance_text(sealing.provenance)``.
            sums: checksums and proofs of the frames.
        """
        checksums, proofs = sums
        filled = checksums if self._holes == 1 else tuple(chain(*zip(*sums, strict=True)))
        tail = (self._template % filled).encode("ascii")
        opening = _opening(sealing.claim, sealing.marks)
        header, checksum = finished(opening + provenance_text + tail, sealing.seal)
        return header, sealing.header(self._frames(len(header), checksums, proofs), checksum)

    def _frames(self, total: int, checksums: tuple[str, ...], proofs: tuple[str, ...]) -> Frames:
        placed = self._placed  # read once: other threads read headers of other lengths
        if placed[0] != total:
            placed = self._placed = self._place(total)
        _, starts, ends = placed
        return Frames(self.layers, self._codecs, starts, ends, checksums, checksums, proofs)

    def _place(self, total: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Return ``total``, a header's length, and the starts and ends of the frames after it."""
        ends = tuple(total + end for end in self.ends)
        return total, ends[:-1], ends[1:]


def _opening(claim: Claim, marks: Marks) -> bytes:
    """Return the output of ``render`` up to the provenance, unsigned."""
    sealed = seal_metadata(marks)
    claimed = _joined(sealed, sealed.values()) + _CLAIM_TEXT % claim_values(claim)
    return _BEGINNING + claimed.encode()


def _read_marks(raw: bytearray) -> tuple[Marks, int]:
    """Return the seal's metadata, and its end position."""
    match = _MARKS.match(raw, CHECKSUM_END)
    assert match is not None
    signed_by, salt, encrypted_by = (part.decode() for part in match.groups(b""))
    return Marks(signed_by, encrypted_by, salt), match.end()


def _style_of(marks: Marks) -> Style:
    if marks.encrypted_by:
        return "encrypted"
    return "signed" if marks.signed_by else "plain"


_forms: dict[tuple[int, Style], tuple[tuple[LayerSpec, ...], Form | None]] = {}
"""Keyed by the identity of the layers, which this keeps alive: hashing them takes longer than
reading a header. The form is None for layers that cannot have one."""
_making = Lock()


def parse_known(
    payload: memoryview,
    claim: Claim,
    layers: tuple[LayerSpec, ...],
    seal: Seal | None = None,
) -> Header:
    """Return or raise the same as ``header.parse``. Faster if the header is of ``claim`` and
    ``layers``; these very objects are then in the result.

    They are not compared: a valid header of another claim is returned too. Pass the same ``layers``
    object each time; it is kept.
    """
    text = verified_text(payload, seal)
    style: Style = "plain"
    if seal is not None:
        style = "encrypted" if seal.encrypts else "signed"
    form = (_forms.get((id(layers), style)) or _remember(layers, style))[1]
    header = form.read(text, claim) if form is not None else None
    if header is None:
        header = parse_verified(text)
    return header if seal is None else opened(header, seal)


def form_of(layers: tuple[LayerSpec, ...], marks: Marks = UNSEALED) -> Form | None:
    """Return the form of uncompressed payloads of ``layers`` with the sealing of ``marks``. None if
    no header can describe the layers, or only a different one. Pass the same ``layers`` object each
    time; it is kept."""
    style = _style_of(marks)
    return (_forms.get((id(layers), style)) or _remember(layers, style))[1]


def _remember(
    layers: tuple[LayerSpec, ...], style: Style
) -> tuple[tuple[LayerSpec, ...], Form | None]:
    try:
        form = Form(layers, style) if layers else None
    except PayloadError:
        form = None
    with _making:
        while len(_forms) >= FORMS_MAX:
            del _forms[next(iter(_forms))]
        _forms[id(layers), style] = layers, form
    return layers, form
