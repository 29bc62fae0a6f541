"""Seals the frames of one new payload in place, and collects its header's values.

Nothing here allocates memory of a frame's size.
"""

import ctypes
from collections.abc import Sequence

from objkv.codec.compress import Buffer
from objkv.codec.header import digest
from objkv.codec.seal import Seal, proof_of
from objkv.codec.values import (
    ENCRYPTED,
    UNSEALED,
    Claim,
    Frame,
    FramePlace,
    Frames,
    Header,
    LayerSpec,
    Marks,
    Opened,
    Provenance,
)


class Sealing:
    """Seals one new payload of ``claim`` with ``frames`` frames, or leaves it unsealed without
    ``seal``. Not thread-safe."""

    def __init__(
        self, claim: Claim, provenance: Provenance, frames: int, seal: Seal | None
    ) -> None:
        self.claim = claim
        self.seal = seal
        self.marks: Marks = UNSEALED
        self.provenance = provenance
        """As it appears in the header."""
        self.opened: Opened | None = None
        if seal is not None:
            self.marks, self.provenance, self.opened = seal.begin(claim, provenance, frames)

    def store(
        self, place: FramePlace, content: Buffer, raw_checksum: str | None, room: memoryview
    ) -> Frame:
        """Write a frame into ``room``, which is as long as ``content`` and may overlap it. Return
        the frame, with offset 0.

        Args:
            place: includes the codec of ``content``.
            raw_checksum: checksum of the decoded pages; None if ``content`` is the pages.
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
        """Seal the layers' pages in place as frames. Return their checksums and their proofs."""
        if self.opened is None:
            return tuple([digest(raw) for raw in pages]), ("",) * len(layers)
        frames = [
            self.store(FramePlace(number, "none", layer), raw, None, raw)
            for number, (layer, raw) in enumerate(zip(layers, pages, strict=True))
        ]
        return tuple([frame.checksum for frame in frames]), tuple([f.proof for f in frames])

    def header(self, frames: Frames, checksum: str) -> Header:
        """Return the header of the payload, as a reader with the seal would parse it."""
        return Header(self.claim, frames, checksum, self.provenance, self.marks, self.opened)


def _move(source: Buffer, target: memoryview) -> None:
    """Copy bytes that may overlap, without the GIL."""
    import numpy as np  # imported late: commands that only print do not need it

    content, place = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)
    if content.ctypes.data != place.ctypes.data:
        ctypes.memmove(place.ctypes.data, content.ctypes.data, content.nbytes)
