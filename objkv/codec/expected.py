"""The header of a payload whose layers the reader knows already: the common one, without JSON.

A loader knows the layers before the header comes, and nearly every header it meets differs from
the others only in its claim, its provenance and its checksums. One that is byte for byte what
``render`` writes for these layers, uncompressed and without token ids, is taken apart in its fixed
places. Whatever differs in one byte goes to ``header.parse_verified``, which alone says what is
valid; both begin with the header's own checksum.
"""

import re
import struct
from itertools import repeat
from threading import Lock
from typing import Final

from objkv.codec.header import (
    FORMAT_NAME,
    LENGTH_BYTES,
    OPENING,
    parse_verified,
    render,
    verified_text,
)
from objkv.codec.values import (
    WRITER_CHARS_MAX,
    Claim,
    Frame,
    Header,
    LayerSpec,
    Provenance,
    VerifiedText,
)
from objkv.errors import PayloadError
from objkv.keys.chunk import ChunkKey
from objkv.keys.topology import Shard

FORMS_MAX: Final = 16
"""Tuples of layers whose form is kept; a process reads those of its own groups, which are few."""

_INT = rb"(0|[1-9][0-9]{0,18})"
_PLAIN = rb"[ !#-\[\]-~]"
"""Printable ASCII that JSON writes as it is."""
_HEAD = re.compile(
    re.escape(OPENING) + rb'0{32}","format":"' + re.escape(FORMAT_NAME.encode()) + rb'",'
    rb'"key":"(' + _PLAIN + rb'{1,900})","parent":"([0-9a-f]{40})",'
    rb'"token_start":"' + _INT + rb'","token_end":"' + _INT + rb'",'
    rb'"token_digest":"([0-9a-f]{64})",'
    rb'"writer":"(' + _PLAIN + rb"{0,%d}" % WRITER_CHARS_MAX + rb')","created_s":"' + _INT + rb'"'
)  # fmt: skip
_CHECKSUMS = re.compile(r"[0-9a-f]*")
_ANY = "f" * 32
"""Stands for a frame's checksum in a form; nothing else before the tensors looks like it."""
_CLAIM = Claim(ChunkKey("0" * 32, bytes(20), 0, Shard(0, 1, 0, 1)), bytes(20), 0, 1)
_PROVENANCE = Provenance("0" * 64, "", 0)


class _Form:
    """What the headers of uncompressed payloads of ``layers`` have in common."""

    def __init__(self, layers: tuple[LayerSpec, ...]) -> None:
        """Raises ``PayloadError`` for layers that no header, or only another one, can describe."""
        self.layers = layers
        sizes = [layer.nbytes for layer in layers]
        self._sizes = sizes
        self._ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
        starts = [end - size for end, size in zip(self._ends, sizes, strict=True)]
        self._starts = starts
        frames = [
            Frame(layer, "none", start, size, _ANY, _ANY)
            for layer, start, size in zip(layers, starts, sizes, strict=True)
        ]
        rendered = render(_CLAIM, frames, _PROVENANCE)
        text = verified_text(memoryview(rendered))
        told = parse_verified(text)
        # Names that JSON or a dict does not keep apart, and layers beyond the format's bounds.
        if tuple(frame.layer for frame in told.frames) != layers:
            raise PayloadError("layers that a header does not tell apart")
        head = _HEAD.match(text.raw, LENGTH_BYTES)
        assert head is not None
        tail = rendered[head.end() :].rstrip(b" ")
        # The first ones are the checksums: names, which may hold anything, come after all frames.
        self._fixed = tuple(tail.split(_ANY.encode(), len(layers)))
        places = "32s".join(f"{len(piece)}s" for piece in self._fixed)
        self._tail = struct.Struct(f"={places}")

    def read(self, text: VerifiedText) -> Header | None:
        """The header ``text`` is, or None if it is not exactly of this form."""
        raw, total = text.raw, len(text.raw)
        head = _HEAD.match(raw, LENGTH_BYTES)
        if head is None or head.end() + self._tail.size > total:
            return None
        parts = self._tail.unpack_from(raw, head.end())
        if parts[::2] != self._fixed or raw[head.end() + self._tail.size :].strip(b" "):
            return None
        joined = b"".join(parts[1::2]).decode("latin-1")
        if _CHECKSUMS.fullmatch(joined) is None:
            return None
        key, parent, start, end, token_digest, writer, created_s = head.groups()
        token_start, token_end = int(start), int(end)
        if token_start >= token_end:
            return None
        try:
            chunk = ChunkKey.parse(key.decode("ascii"))
        except ValueError:
            return None
        checksums = [joined[at : at + 32] for at in range(0, len(joined), 32)]
        offsets = [total + at for at in self._starts]
        places = (offsets, self._sizes, checksums, checksums)
        return Header(
            claim=Claim(chunk, bytes.fromhex(parent.decode("ascii")), token_start, token_end),
            frames=tuple(map(Frame, self.layers, repeat("none"), *places)),
            data_start=total,
            nbytes=total + self._ends[-1],
            raw_bytes=self._ends[-1],
            checksum=text.checksum,
            provenance=Provenance(
                token_digest.decode("ascii"), writer.decode("ascii"), int(created_s)
            ),
        )


_forms: dict[int, tuple[tuple[LayerSpec, ...], _Form | None]] = {}
"""By the identity of the layers, which it keeps alive: to hash them takes longer than to read a
header. No form for layers that cannot have one."""
_making = Lock()


def parse_expected(payload: memoryview, layers: tuple[LayerSpec, ...]) -> Header:
    """What ``header.parse`` returns or raises for ``payload``; sooner if its layers are ``layers``.

    They are not compared: a valid header of other layers is returned too. ``layers`` should be the
    same object every time, and is kept.
    """
    text = verified_text(payload)
    _, form = _forms.get(id(layers)) or _remember(layers)
    header = form.read(text) if form is not None else None
    return parse_verified(text) if header is None else header


def _remember(layers: tuple[LayerSpec, ...]) -> tuple[tuple[LayerSpec, ...], _Form | None]:
    try:
        form = _Form(layers) if layers else None
    except PayloadError:
        form = None
    with _making:
        if len(_forms) >= FORMS_MAX:
            _forms.clear()
        _forms[id(layers)] = layers, form
    return layers, form
