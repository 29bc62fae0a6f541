"""Joins the parts of a payload that several ranks of a replica wrote.

Each rank writes a payload of its own frames, which claims to be the whole one. A frame keeps its
bytes, and its rank alone determines its place in the whole: the frames of one layer stand side by
side, in the order of the ranks. ``docs/format.md`` specifies the order.
"""

from typing import NamedTuple

from objkv.codec.header import ALIGNMENT, HEADER_BYTES_MAX, checksum_of, render
from objkv.codec.values import RAW_BYTES_MAX, Frame, Frames, Header, digest
from objkv.errors import PayloadError

FRAMES_MAX = 1 << 16
"""Most frames of a payload that is joined. A header has room for fewer."""
_GROWTH_BYTES = 64
"""How much longer the text of a frame may be in the whole payload than in a part: numbers and names
with more digits."""


class Move(NamedTuple):
    """Where a frame of a part is, and where it belongs in the whole payload."""

    source: int
    target: int
    nbytes: int


class PartPosition(NamedTuple):
    """Where a part's frames belong in the whole: frame ``i`` is its frame ``first + i * step``."""

    parts: int
    frames: int
    """How many frames all parts have together."""
    first: int
    step: int
    """How many parts have a frame of the same layer, all of one size."""
    skipped: int
    """Bytes of all frames of the layers before the part's first one."""
    nbytes: int
    """Bytes of all frames of all parts."""

    def check(self) -> None:
        """Raise ``PayloadError`` for numbers that no payload has."""
        if not (
            1 < self.parts <= self.frames <= FRAMES_MAX
            and 0 < self.step <= self.parts
            and 0 <= self.first < self.frames
            and 0 <= self.skipped < self.nbytes <= RAW_BYTES_MAX
        ):
            raise PayloadError(f"a part with an impossible place: {self}")


class Join:
    """A payload that is being joined, in the caller's memory. One call at a time."""

    def __init__(self, header: Header, position: PartPosition) -> None:
        """``header``: of the part that came first. Raises ``PayloadError``."""
        position.check()
        self.claim = header.claim
        self._provenance = header.provenance
        self._position = position._replace(first=0, skipped=0)
        # As many frames as the part has, times the parts, need about as much header as it needed.
        times = -(-position.frames // len(header.frames))
        room = header.data_start * times + _GROWTH_BYTES * position.frames
        self.room = min(HEADER_BYTES_MAX, -(-room // ALIGNMENT) * ALIGNMENT)
        """Length of the header. The frames follow."""
        self.nbytes = self.room + position.nbytes
        self._frames: dict[int, Frame] = {}
        self._added = 0

    def add(self, header: Header, position: PartPosition) -> list[Move]:
        """Accept a part, whose frames are not in their places yet. Return where each belongs.
        Raises ``PayloadError`` unless it is a part of this payload that is still missing."""
        if header.claim != self.claim or position._replace(first=0, skipped=0) != self._position:
            raise PayloadError(f"a part of another payload: {header.claim}, {position}")
        ours = self._provenance.token_digest, self._provenance.tokens
        if (header.provenance.token_digest, header.provenance.tokens) != ours:
            raise PayloadError(f"a part of other tokens: {header.claim}")
        if any(codec != "none" for codec in header.frames.codecs) or any(header.marks):
            raise PayloadError("a part that is compressed or sealed")
        at, moves, frames = position.skipped, list[Move](), dict[int, Frame]()
        column = position.first % position.step
        for n, frame in enumerate(header.frames):
            number, start = position.first + n * position.step, at + column * frame.nbytes
            at += position.step * frame.nbytes
            if number >= position.frames or at > position.nbytes or number in self._frames:
                raise PayloadError(f"a part that came before, or is too long: {position}")
            moves.append(Move(frame.offset, self.room + start, frame.nbytes))
            frames[number] = frame._replace(offset=start)
        self._frames |= frames
        self._added += 1
        return moves

    @property
    def is_complete(self) -> bool:
        """Whether all parts were accepted."""
        return self._added == self._position.parts

    def finish(self, memory: memoryview) -> Header:
        """Write the header of a complete payload in front of its frames, and return it. Raises
        ``PayloadError`` unless the frames follow one another without a gap."""
        at, frames = 0, list[Frame]()
        for number in range(self._position.frames):
            frame = self._frames.get(number)
            if frame is None or frame.offset != at:
                raise PayloadError(f"parts that leave frame {number} out, or overlap there")
            frames.append(frame)
            at += frame.nbytes
        names = {frame.layer.name for frame in frames}
        if at != self._position.nbytes or len(names) != len(frames):
            raise PayloadError("parts of another size, or with the same frame")
        text = render(self.claim, frames, self._provenance, room=self.room)
        memory[: self.room] = text
        placed = Frames.of(frame._replace(offset=self.room + frame.offset) for frame in frames)
        return Header(self.claim, placed, checksum_of(text), self._provenance)


def check_moved(header: Header, moves: list[Move], memory: memoryview) -> None:
    """Raise ``PayloadError`` unless the frames of a part are where they were to be copied to."""
    for n, (_, target, nbytes) in enumerate(moves):
        if digest(memory[target : target + nbytes]) != header.frames.checksums[n]:
            raise PayloadError(f"the checksum of {header.frames.layers[n].name!r} does not match")
