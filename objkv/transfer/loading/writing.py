"""Writes verified frames of one payload into the blocks of one move, inside its job's fence."""

from collections.abc import Sequence
from typing import Any

from objkv.codec.payload import Claim
from objkv.errors import TransferError
from objkv.keys.chunk import ChunkKey
from objkv.transfer.lanes import Lane, Mark
from objkv.transfer.loading.job import LoadJob
from objkv.transfer.plan import LoadMove
from objkv.transfer.sources import PayloadLayout


class UnwantedError(TransferError):
    """The bytes are no longer needed: the job was closed, or an earlier chunk failed."""


class CopyUnknownError(TransferError):
    """The device failed, and nothing shows until when it reads the frames."""


class BlockWriter:
    """Belongs to one thread. Frames must stay alive and unchanged until ``mark`` is done."""

    mark: Mark | None = None
    """A mark after all copies so far; None if there are none."""
    _placed: Any = None

    def __init__(self, job: LoadJob, index: int, load: LoadMove, lane: Lane) -> None:
        """``load``: move ``index`` of the job's plan."""
        self._job, self._index, self._load, self._lane = job, index, load, lane

    def write(self, source: PayloadLayout, span: range, frames: Sequence[memoryview]) -> None:
        """Submit frames to the lane.

        Raises ``UnwantedError`` if the job allows no more writes, and ``CopyUnknownError`` if the
        memory of the frames may never be reused.

        Args:
            source: the layout of the payload.
            span: all frames of the payload that were verified since the last call.
            frames: the raw bytes of those that are in ``source.frames``.
        """
        job, index, lane = self._job, self._index, self._lane
        if not job.enter(index):
            raise UnwantedError("the load was given up")
        mark, layers = None, range(0)
        try:
            if frames:
                if self._placed is None:
                    if job.after is not None:
                        lane.follow(job.after)
                    self._placed = source.place(lane, self._load.move)
                begin = max(span.start, source.frames.start)
                source.scatter(lane, begin, frames, self._load.move, self._placed)
            layers = source.fills(span)
        finally:
            try:
                if frames:
                    self.mark = mark = lane.mark()  # also after a fault: work may be submitted
            except Exception as exc:
                raise CopyUnknownError(f"the device failed: {exc}") from exc
            finally:  # closing the job waits for this call
                job.leave(index, layers, lane, mark)


def claim_of(namespace: str, load: LoadMove, source: PayloadLayout) -> Claim:
    """Return the claim of the payload that this rank must read for a move."""
    move = load.move
    key = ChunkKey(namespace, move.prefix_hash, move.group, source.shard)
    return Claim(key, move.parent_hash, move.token_start, move.token_end)
