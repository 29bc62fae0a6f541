"""Saves: the forward thread gathers finished chunks into slabs, other threads encode and store
them.

The forward thread's work is bounded and local: it leases a slab and submits copies to the lane.
Without a free slab or room in the queue the chunk is dropped: counted and reported to the
scheduler, without waiting. The payload is encoded in place in the slab and sent from there.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from time import monotonic, sleep, time

from objkv.cache.chunks import ChunkCache, SaveOutcome
from objkv.codec.payload import Claim, Header, Provenance, encode_in_place, header_room
from objkv.errors import TransferError
from objkv.keys.chunk import ChunkKey
from objkv.telemetry import Recorder
from objkv.transfer.background import SavePool
from objkv.transfer.codec_choice import CodecChooser
from objkv.transfer.lanes import Lane, Mark
from objkv.transfer.paging import PagedGroup
from objkv.transfer.plan import SaveMove, SavePlan
from objkv.transfer.slabs import Slab, SlabPool, SlabsExhaustedError


class PayloadEncoder:
    """Encodes payloads in place, in the slab that has their pages. Thread-safe, if each thread uses
    its own slabs."""

    def __init__(
        self, groups: Mapping[int, PagedGroup], cache: ChunkCache, limits: "SaveLimits"
    ) -> None:
        self._groups = groups
        self._codec = limits.codec if limits.codec != "auto" or limits.far else "none"
        self._writer = limits.writer
        self._seal = cache.seal
        chooses = self._codec == "auto"
        self._chooser = CodecChooser(lambda: cache.link.bytes_per_s) if chooses else None

    def room(self, save: SaveMove) -> int:
        """Return the offset in the slab at which the pages of a chunk must begin."""
        layers = self._groups[save.move.group].layers
        return header_room(layers, tokens=len(save.tokens or ()))

    def encode(self, claim: Claim, save: SaveMove, slab: Slab) -> tuple[memoryview, Header]:
        """Encode the chunk whose pages are in ``slab`` from ``room`` on. The payload is a view of
        the slab."""
        group = self._groups[claim.key.group]
        codec = self._codec
        if self._chooser is not None:
            room = self.room(save)
            pages = slab.view[room : room + group.raw_bytes]
            codec = self._chooser.choose(claim.key.group, group.layers, pages)
        provenance = Provenance(
            token_digest=save.token_digest,
            writer=self._writer,
            created_s=int(time()),
            tokens=save.tokens,
        )
        return encode_in_place(
            claim,
            group.layers,
            slab.view,
            codec=codec,
            provenance=provenance,
            seal=self._seal,
        )

    def saved(self, seconds: float) -> None:
        """Record that a payload was encoded and stored in ``seconds``."""
        if self._chooser is not None:
            self._chooser.saved(seconds)


logger = logging.getLogger(__name__)
_COPIES_S = 1.0
"""How long ``close`` waits, after its bound, for copies from the device, which read blocks."""
_LOOK_S = 0.001
_STRANDED: list[SlabPool] = []
"""Pools with slabs that a hung device may still write into. They are kept until the process ends,
so that their memory is never reused."""


@dataclass(frozen=True, slots=True)
class SaveLimits:
    """Bounds of the saver, and the codec and writer of its payloads."""

    threads: int
    queue_max: int
    deadline_s: float
    """A chunk that waited longer is dropped."""
    codec: str
    """A codec of the payload format, or ``auto``."""
    writer: str
    far: bool = True
    """Whether the bulk store is behind a network. If not, ``auto`` compresses nothing: loads from a
    directory mostly come from memory, faster than any codec decodes."""


@dataclass(slots=True)
class SavedChunk:
    """A chunk with a slab. Its pages are in the slab once ``mark`` is done."""

    request_id: str
    claim: Claim
    move: SaveMove
    slab: Slab
    encoder: PayloadEncoder
    mark: Mark | None = None
    """None until the copies were submitted to the lane."""
    deadline: float = 0.0
    clock: Callable[[], float] = monotonic

    def encode(self) -> tuple[memoryview, Header]:
        """See ``Save``. Waits for the copies."""
        self.wait()
        return self.encoder.encode(self.claim, self.move, self.slab)

    def release(self) -> None:
        """See ``Save``. The pool keeps the slab until the copies have ended."""
        assert self.mark is not None
        self.slab.release_after(self.mark)

    def wait(self) -> None:
        """Block until the chunk's pages are in its slab. Raises ``TransferError`` at the chunk's
        deadline. Polls, because a device that hangs never returns from a wait."""
        assert self.mark is not None
        while not self.mark.done():
            if self.clock() >= self.deadline:
                raise TransferError("the device has not copied the chunk in time")
            sleep(_LOOK_S)


class Saver:
    """Executes save plans. Only the forward thread calls ``gather``, ``fence``, ``left_device`` and
    ``forget``."""

    def __init__(
        self,
        cache: ChunkCache,
        groups: Mapping[int, PagedGroup],
        slabs: SlabPool,
        *,
        lane: Lane,
        limits: SaveLimits,
        recorder: Recorder,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._cache, self._groups, self._slabs, self._lane = cache, groups, slabs, lane
        self._limits, self._recorder, self._clock = limits, recorder, clock
        self._encoder = PayloadEncoder(groups, cache, limits)
        self._marks: dict[str, Mark] = {}
        """Mark of the last gather of each request, until it is done or forgotten."""
        self._latest: Mark | None = None
        """Mark of the last gather, until it is done."""
        self._pool: SavePool[SavedChunk] = SavePool(
            "saves",
            limits.threads,
            cache,
            recorder,
            late=lambda chunk: self._count_drop(chunk.claim.key),
            saved=self._saved,
            begin=lane.adopt_thread,
            clock=clock,
        )

    def gather(self, plans: tuple[SavePlan, ...]) -> set[tuple[str, int]]:
        """Copy the chunks of this step's plans out of their blocks, after the forward pass.

        Returns (request id, chunk) of each dropped chunk. The blocks must not change until
        ``left_device`` returns True for their request, or ``fence`` was called. Without anything to
        copy, nothing is submitted to the device.
        """
        dropped: set[tuple[str, int]] = set()
        taken: dict[int, list[SavedChunk]] = {}
        room = self._limits.queue_max - self._pool.waiting
        is_full = not self._cache.has_room()
        for plan in plans:
            for save in plan.moves:
                group = self._groups.get(save.move.group)
                if group is None or not group.shape.rank_shard.writes(save.move.prefix_hash):
                    continue
                key = _key(plan, save, group)
                if is_full:  # not a drop, which the scheduler would plan again for the next step
                    self._recorder.count("save_over_quota")
                elif self._pool.is_shedding:  # not a drop either, for the same reason
                    self._recorder.count("saves_shed")
                elif not self._cache.begin_save(key):
                    self._recorder.count("save_repeats")
                elif room > 0 and (chunk := self._take(plan, save, key)) is not None:
                    taken.setdefault(key.group, []).append(chunk)
                    room -= 1
                else:
                    dropped.add(self._drop(plan.request_id, save, key))
        if taken:
            self._lane.follow(self._lane.mark_compute())
        for chunks in taken.values():
            dropped |= self._gather(chunks)
        return dropped

    def fence(self, request_ids: Collection[str] | None = None) -> None:
        """Make computing wait until the chunks gathered for these requests have left their blocks,
        which may then be reused. None: all chunks."""
        mark = self._latest
        if request_ids is not None:
            marks = [self._marks[name] for name in request_ids if name in self._marks]
            mark = max(marks, key=lambda one: one.number, default=None)
        if mark is not None and not mark.done():
            mark.hold_compute()

    def left_device(self, request_id: str) -> bool:
        """Whether every chunk gathered for the request has left its blocks."""
        mark = self._marks.get(request_id)
        if mark is None:
            return True
        if not mark.done():
            return False
        del self._marks[request_id]
        return True

    def forget(self, request_id: str) -> None:
        """Forget the request's mark; ``left_device`` is not called for it again. Gathered chunks
        are still saved."""
        self._marks.pop(request_id, None)

    def drain(self, deadline_s: float) -> bool:
        """Wait for all saves, for at most ``deadline_s``. Returns whether all have ended."""
        return self._pool.drain(deadline_s)

    def close(self, drain_deadline_s: float) -> None:
        """Drain within the bound, then stop. Remaining chunks are dropped.

        No block is read afterwards, unless the device still copies a second after the bound. The
        slabs of those copies are never returned. If a put hangs, its thread keeps its slab until
        the put ends.
        """
        end = self._clock() + drain_deadline_s
        if not self._copies_end(end + _COPIES_S):
            logger.error("copies of saves did not finish on the device, shutting down without them")
            _STRANDED.append(self._slabs)
        left_s = max(0.0, end - self._clock())
        self._pool.close(left_s, self._give_up)

    def __repr__(self) -> str:
        return f"<Saver {self._pool}>"

    def _copies_end(self, until: float) -> bool:
        """Poll until all copies are done. Returns False if the time ``until`` comes first.

        Blocks and slabs may be unmapped next, so no copy may run later. CUDA has no wait with a
        timeout, so this polls.
        """
        while self._latest is not None and not self._latest.done():
            if self._clock() >= until:
                return False
            sleep(_LOOK_S)
        self._latest = None
        return True

    def _take(self, plan: SavePlan, save: SaveMove, key: ChunkKey) -> SavedChunk | None:
        move = save.move
        assert move.first_block == 0
        group = self._groups[key.group]
        assert len(move.block_ids) * group.split == group.shape.blocks
        if self._pool.is_closed:
            return None
        try:
            slab = self._slabs.lease()
        except SlabsExhaustedError:
            return None
        claim = Claim(key, move.parent_hash, move.token_start, move.token_end)
        return SavedChunk(plan.request_id, claim, save, slab, self._encoder, clock=self._clock)

    def _gather(self, chunks: list[SavedChunk]) -> set[tuple[str, int]]:
        """Submit the copies of chunks of one group to the lane. Returns the dropped ones."""
        group = self._groups[chunks[0].claim.key.group]
        block_ids = [c.move.move.block_ids for c in chunks]
        try:
            pages = [c.slab.tensor[self._encoder.room(c.move) :] for c in chunks]
            group.gather(self._lane, block_ids, pages)
            mark = self._lane.mark()
        except Exception:  # such as no memory for staging: a drop, as without a slab
            logger.exception("chunks not gathered requests=%s", {c.request_id for c in chunks})
            return self._lose(chunks)
        self._record(chunks, mark)
        if self._pool.put(chunks):
            return set()
        return self._give_up(chunks)

    def _lose(self, chunks: list[SavedChunk]) -> set[tuple[str, int]]:
        """Give up chunks of which some copies may have been submitted."""
        try:
            self._record(chunks, self._lane.mark())
        except Exception:  # nobody knows when those copies end: these slabs stay leased
            logger.exception("slabs lost count=%d", len(chunks))
            return {self._drop(c.request_id, c.move, c.claim.key) for c in chunks}
        return self._give_up(chunks)

    def _record(self, chunks: Iterable[SavedChunk], mark: Mark) -> None:
        """Record the mark after the copies of these chunks, and forget marks that are done."""
        deadline = self._clock() + self._limits.deadline_s
        for chunk in chunks:
            chunk.mark, chunk.deadline = mark, deadline
        self._marks = {name: one for name, one in self._marks.items() if not one.done()}
        if not mark.done():
            self._latest = mark
            self._marks |= {c.request_id: mark for c in chunks}

    def _give_up(self, chunks: Iterable[SavedChunk]) -> set[tuple[str, int]]:
        dropped = set()
        for c in chunks:
            c.release()
            dropped.add(self._drop(c.request_id, c.move, c.claim.key))
        return dropped

    def _drop(self, request_id: str, save: SaveMove, key: ChunkKey) -> tuple[str, int]:
        self._cache.end_save(key)
        self._count_drop(key)
        return request_id, save.move.chunk

    def _saved(self, header: Header, seconds: float, outcome: SaveOutcome) -> None:
        self._encoder.saved(seconds)
        if outcome is SaveOutcome.SAVED:
            self._recorder.count(f"save_codec_{header.codec.partition('+')[0]}")

    def _count_drop(self, key: ChunkKey) -> None:
        self._recorder.count("save_drops")
        self._recorder.count("save_drop_bytes", self._groups[key.group].raw_bytes)


def _key(plan: SavePlan, save: SaveMove, group: PagedGroup) -> ChunkKey:
    move = save.move
    return ChunkKey(plan.namespace, move.prefix_hash, move.group, group.shape.rank_shard.shard)
