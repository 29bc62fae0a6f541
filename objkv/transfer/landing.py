"""Landing: a payload is verified and written into its blocks while it is still arriving.

Each frame as soon as its last byte is there, when it is still in the processor's cache. Nothing is
written that was not verified: the header with its claim and layers first, then each frame.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from objkv.codec.payload import (
    Claim,
    Header,
    frame_pages,
    header_bytes_needed,
    read_claimed,
)
from objkv.codec.seal import Seal
from objkv.errors import PayloadError, TransferError
from objkv.transfer.job import LoadJob
from objkv.transfer.lanes import Lane
from objkv.transfer.sources import Source
from objkv.transfer.spans import FetchSpan

_LENGTH_BYTES = 8
_BURST_BYTES = 1 << 20
"""Pages written between ``enter`` and ``leave``: whoever closes the job waits for no more, and
many small frames share the cost of the two."""


class UnwantedError(TransferError):
    """Nobody needs the bytes any more: the job was closed, or an earlier chunk failed."""


@dataclass(frozen=True, slots=True)
class Strip:
    """Where one span's pages go, and through which memory."""

    job: LoadJob
    index: int
    """Which move of the job's plan."""
    source: Source
    """The payload, as it most probably is."""
    lane: Lane
    payload: memoryview
    """Each byte of the payload has its place here, wherever its span begins."""
    lease_scratch: Callable[[], memoryview]
    """Memory to decode the span's frames into, all side by side; leased for as long as
    ``payload``. Raises ``TransferError``."""
    seal: Seal | None = None
    """What payloads must be sealed with."""


class Landing:
    """One span of one move. Belongs to one thread."""

    def __init__(self, strip: Strip, span: FetchSpan, header: Header | None = None) -> None:
        self._strip = strip
        self._span = span
        self.header = header
        """None until it was verified; the first span brings it."""
        self.layer = span.first
        """The first that is not in its blocks yet."""
        self._scratch: memoryview | None = None
        self._scratch_at = 0
        move = strip.job.plan.moves[strip.index].move
        self._first_block = move.first_block
        self._block_ids = move.block_ids
        self._placed: Any = None
        self._source = strip.source
        if header is not None:
            self._source = strip.source.reading(header.frames.layers)

    def open(self, nbytes: int, claim: Claim) -> None:
        """The payload's first ``nbytes`` are there: take the header if that is enough.

        Raises ``PayloadError`` if it is not the one of ``claim``, or holds other layers.
        """
        if self.header is not None or nbytes < _LENGTH_BYTES:
            return
        payload, room = self._strip.payload, self._span.nbytes
        header_bytes = header_bytes_needed(payload[:_LENGTH_BYTES])
        if header_bytes > room:
            raise PayloadError(f"a header of {header_bytes} bytes, at most {room} can be")
        if nbytes < header_bytes:
            return
        header = read_claimed(
            payload[:header_bytes], claim, self._source.layers, seal=self._strip.seal
        )
        self._source = self._source.reading(header.frames.layers)
        if header.nbytes > len(payload):
            raise PayloadError(f"{header.nbytes} bytes, at most {len(payload)} can be")
        self.header = header

    def arrived(self, nbytes: int) -> None:
        """The span's first ``nbytes`` are there: write what is complete of it.

        Raises ``PayloadError`` for a frame that is not what the header says, ``UnwantedError`` if
        the job may write no more.
        """
        if self.header is None:
            return
        until = self._span.start + nbytes
        while self._is_complete(until):
            self._write_burst(until)

    def check_end(self, nbytes: int) -> None:
        """The span's bytes have all come, ``nbytes`` of them, one more having been asked for of
        the last span: raise ``PayloadError`` unless that is what the header says."""
        if nbytes != self._span.nbytes:
            raise PayloadError(
                f"{nbytes} bytes from {self._span.start} on, where {self._span.nbytes} are due"
            )
        assert self.layer == self._span.end

    def _is_complete(self, until: int) -> bool:
        if self.layer == self._span.end:
            return False
        assert self.header is not None
        return self.header.frames.ends[self.layer] <= until

    def _write_burst(self, until: int) -> None:
        job, index, lane = self._strip.job, self._strip.index, self._strip.lane
        if not job.enter(index):
            raise UnwantedError("nobody waits for it any more")
        first, mark = self.layer, None
        try:
            if self._placed is None:
                self._placed = lane.place(self._block_ids)
            written = 0
            while written < _BURST_BYTES and self._is_complete(until):
                written += self._write_frame(self._placed)
        finally:
            try:
                mark = lane.mark()  # also on a fault: something may have been given to the lane
            finally:  # whoever closes the job waits for this
                job.leave(index, self._source.fills(range(first, self.layer)), lane, mark)

    def _write_frame(self, placed: Any) -> int:
        """The bytes that were written; none of a layer that is other ranks'."""
        assert self.header is not None
        strip, source, frame = self._strip, self._source, self.layer
        nbytes = 0
        if source.fills(range(frame, frame + 1)):
            nbytes = source.layer_bytes[frame]
            room = None
            if self.header.frames.codecs[frame] != "none":
                if self._scratch is None:
                    self._scratch = strip.lease_scratch()
                room = self._scratch[self._scratch_at : self._scratch_at + nbytes]
                self._scratch_at += nbytes
            pages = frame_pages(self.header, frame, strip.payload, room)
            source.scatter(strip.lane, frame, pages, self._first_block, placed)
        self.layer += 1  # last: what raised was not written
        return nbytes
