"""One payload on its way to being sealed: what its header says of that, and what its frames become.

Frames are sealed where they lie: nothing here takes memory as long as a frame.
"""

import ctypes
from collections.abc import Sequence

import numpy as np

from objkv.codec.compress import Buffer
from objkv.codec.header import digest
from objkv.codec.seal import Seal, proof_of
from objkv.codec.values import (
    ENCRYPTED,
    UNSEALED,
    Claim,
    Frame,
    LayerSpec,
    Marks,
    Opened,
    Place,
    Provenance,
)


class Sealing:
    """Of one new payload of ``claim`` and so many frames. Belongs to one thread."""

    def __init__(
        self, claim: Claim, provenance: Provenance, frames: int, seal: Seal | None
    ) -> None:
        self.seal = seal
        self.marks: Marks = UNSEALED
        self.provenance = provenance
        """As the header tells it."""
        self.opened: Opened | None = None
        if seal is not None:
            self.marks, self.provenance, self.opened = seal.begin(claim, provenance, frames)

    def store(
        self, place: Place, content: Buffer, raw_checksum: str | None, room: memoryview
    ) -> Frame:
        """Write a frame into ``room``, as long as ``content``, which may overlap it; the frame, at
        offset 0.

        Args:
            place: with the codec that ``content`` is in.
            raw_checksum: of the decoded pages; None where ``content`` are the pages.
        """
        cipher = None if self.opened is None else self.opened.cipher
        if cipher is None:
            checksum, proof = digest(content), "" if self.opened is None else proof_of(content)
            _move(content, room)
        else:
            place = place._replace(codec=place.codec + ENCRYPTED)
            if raw_checksum is None:
                _move(content, room)
                content = room
            else:
                raw_checksum = cipher.blinded(place.number, raw_checksum)
            proof = cipher.encrypt(place, content, room)
            checksum = digest(room)
        sums = checksum, raw_checksum or checksum, proof
        return Frame(place.layer, place.codec, 0, len(room), *sums)

    def store_pages(
        self, layers: Sequence[LayerSpec], pages: Sequence[memoryview]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Frames that are the layers' pages, where they lie: their checksums and their proofs."""
        if self.opened is None:
            return tuple([digest(raw) for raw in pages]), ("",) * len(layers)
        frames = [
            self.store(Place(number, "none", layer), raw, None, raw)
            for number, (layer, raw) in enumerate(zip(layers, pages, strict=True))
        ]
        return tuple([frame.checksum for frame in frames]), tuple([f.proof for f in frames])


def _move(source: Buffer, target: memoryview) -> None:
    """Copy bytes that may overlap, without the GIL."""
    content, place = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)
    if content.ctypes.data != place.ctypes.data:
        ctypes.memmove(place.ctypes.data, content.ctypes.data, content.nbytes)
