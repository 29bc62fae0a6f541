"""The header of a payload whose claim and layers are known already: read and written without JSON.

A loader knows both before the header comes, and nearly every header it meets is of them, and new
only in its provenance and its checksums. One that is byte for byte what ``render`` writes,
uncompressed and without token ids, is taken apart in its fixed places. Whatever differs in one byte
goes to ``header.parse_verified``, which alone says what is valid; both begin with the header's own
checksum. A saver writes the same header over and over, in the same places.
"""

import re
import struct
from itertools import accumulate
from threading import Lock
from typing import Final

from objkv.codec.header import (
    FORMAT_NAME,
    LENGTH_BYTES,
    OPENING,
    bytes_max,
    parse_verified,
    render,
    sealed,
    verified_text,
)
from objkv.codec.values import (
    WRITER_CHARS_MAX,
    Claim,
    Frame,
    Frames,
    Header,
    LayerSpec,
    Provenance,
    VerifiedText,
)
from objkv.errors import PayloadError
from objkv.keys.chunk import ChunkKey
from objkv.keys.topology import Shard

FORMS_MAX: Final = 512
"""Tuples of layers whose form is kept, about 10 KiB each; a process reads those of its own groups,
which are few, and of shards of other shapes, which may be dozens."""

_OPENING = (
    OPENING.decode() + "0" * 32 + f'","format":"{FORMAT_NAME}","key":"%s","parent":"%s",'
    '"token_start":"%d","token_end":"%d","token_digest":"'
)
_PROVENANCE = re.compile(
    # A writer is printable ASCII that JSON writes as it is.
    rb'([0-9a-f]{64})","writer":"([ !#-\[\]-~]{0,%d})","created_s":"(0|[1-9][0-9]{0,18})"'
    % WRITER_CHARS_MAX
)
_PROVENANCE_TEXT = '%s","writer":"%s","created_s":"%d"'
_HEX = b"0123456789abcdef"
_ANY = "f" * 32
"""Stands for a frame's checksum in a form; nothing else before the tensors looks like it."""
_SOME_CLAIM = Claim(ChunkKey("0" * 32, bytes(20), 0, Shard(0, 1, 0, 1)), bytes(20), 0, 1)


class Form:
    """What the headers of uncompressed payloads of ``layers`` have in common."""

    def __init__(self, layers: tuple[LayerSpec, ...]) -> None:
        """Raises ``PayloadError`` for layers that no header, or only another one, can describe."""
        self.layers = layers
        sizes = [layer.nbytes for layer in layers]
        ends = [0, *accumulate(sizes)]
        frames = [
            Frame(layer, "none", start, size, _ANY, _ANY)
            for layer, start, size in zip(layers, ends, sizes, strict=False)
        ]
        rendered = render(_SOME_CLAIM, frames, Provenance("0" * 64, "", 0))
        text = verified_text(memoryview(rendered))
        # Names that JSON or a dict does not keep apart, and layers beyond the format's bounds.
        if parse_verified(text).frames.layers != layers:
            raise PayloadError("layers that a header does not tell apart")
        opening = _opening(_SOME_CLAIM)
        provenance = _PROVENANCE.match(text.raw, LENGTH_BYTES + len(opening))
        assert text.raw.startswith(opening, LENGTH_BYTES)
        assert provenance is not None
        tail = rendered[provenance.end() :].rstrip(b" ")
        # The first ones are the checksums: names, which may hold anything, come after all frames.
        self._fixed = tuple(tail.split(_ANY.encode(), len(layers)))
        places = "32s".join(f"{len(piece)}s" for piece in self._fixed)
        self._tail = struct.Struct(f"={places}")
        self._codecs = ("none",) * len(layers)
        self.room = bytes_max(layers, 0)
        """Upper bound of such a header."""
        self._checksums = [slice(at, at + 32) for at in range(0, 32 * len(layers), 32)]
        self.ends = tuple(ends)
        """Where each layer's pages begin after the header, and where the last one's end."""
        self._placed = self._place(len(rendered))

    def read(self, text: VerifiedText, claim: Claim) -> Header | None:
        """The header ``text`` is, or None if it is not exactly of this form, or of another
        claim."""
        raw, total, opening = text.raw, len(text.raw), _opening(claim)
        if not raw.startswith(opening, LENGTH_BYTES):
            return None
        told = _PROVENANCE.match(raw, LENGTH_BYTES + len(opening))
        if told is None:
            return None
        end = told.end() + self._tail.size
        if end > total or raw.count(b" ", end) != total - end:
            return None
        parts = self._tail.unpack_from(raw, told.end())
        joined = b"".join(parts[1::2])
        if parts[::2] != self._fixed or joined.translate(None, _HEX):
            return None
        checksums = tuple(map(joined.decode("ascii").__getitem__, self._checksums))
        token_digest, writer, created_s = told.groups()
        provenance = Provenance(
            token_digest.decode("ascii"), writer.decode("ascii"), int(created_s)
        )
        return self._header(total, claim, checksums, provenance, text.checksum)

    def write(
        self, claim: Claim, checksums: tuple[str, ...], provenance: Provenance
    ) -> tuple[bytes, Header] | None:
        """What ``render`` writes, and the header it is; None if it does not fit the form."""
        told = _PROVENANCE_TEXT % (
            provenance.token_digest,
            provenance.writer,
            provenance.created_s,
        )
        text = told.encode()
        if provenance.tokens is not None or _PROVENANCE.fullmatch(text) is None:
            return None
        parts = [_opening(claim), text, self._fixed[0]]
        for checksum, piece in zip(checksums, self._fixed[1:], strict=True):
            parts += checksum.encode(), piece
        header, checksum = sealed(b"".join(parts))
        return header, self._header(len(header), claim, checksums, provenance, checksum)

    def _header(
        self,
        total: int,
        claim: Claim,
        checksums: tuple[str, ...],
        provenance: Provenance,
        checksum: str,
    ) -> Header:
        placed = self._placed  # read once: other threads read headers of other lengths
        if placed[0] != total:
            placed = self._placed = self._place(total)
        _, starts, ends = placed
        return Header(
            claim=claim,
            frames=Frames(self.layers, self._codecs, starts, ends, checksums, checksums),
            data_start=total,
            nbytes=ends[-1],
            raw_bytes=self.ends[-1],
            checksum=checksum,
            provenance=provenance,
        )

    def _place(self, total: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Of a header of ``total`` bytes: it, and where frames begin and end after it."""
        ends = tuple(total + end for end in self.ends)
        return total, ends[:-1], ends[1:]


def _opening(claim: Claim) -> bytes:
    """What ``render`` writes for the claim, up to the provenance."""
    key, parent = claim.key.path(), claim.parent_hash.hex()
    return (_OPENING % (key, parent, claim.token_start, claim.token_end)).encode()


_forms: dict[int, tuple[tuple[LayerSpec, ...], Form | None]] = {}
"""By the identity of the layers, which it keeps alive: to hash them takes longer than to read a
header. No form for layers that cannot have one."""
_making = Lock()


def parse_expected(payload: memoryview, claim: Claim, layers: tuple[LayerSpec, ...]) -> Header:
    """What ``header.parse`` returns or raises for ``payload``; sooner if it is that of ``claim``
    and ``layers``, which are then the very objects it has.

    They are not compared: a valid header of others is returned too. ``layers`` should be the same
    object every time, and is kept.
    """
    text = verified_text(payload)
    form = form_of(layers)
    header = form.read(text, claim) if form is not None else None
    return parse_verified(text) if header is None else header


def form_of(layers: tuple[LayerSpec, ...]) -> Form | None:
    """The form of uncompressed payloads of ``layers``, which should be the same object every time,
    and is kept. None for layers that no header can describe, or only another one."""
    return (_forms.get(id(layers)) or _remember(layers))[1]


def _remember(layers: tuple[LayerSpec, ...]) -> tuple[tuple[LayerSpec, ...], Form | None]:
    try:
        form = Form(layers) if layers else None
    except PayloadError:
        form = None
    with _making:
        while len(_forms) >= FORMS_MAX:
            del _forms[next(iter(_forms))]
        _forms[id(layers)] = layers, form
    return layers, form
