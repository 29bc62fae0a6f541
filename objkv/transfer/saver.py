"""Saves: gather finished chunks into slabs on the forward thread, do the rest in the background.

What the forward thread does is bounded and local: lease a slab, give copies to the lane. No slab,
or a full queue, is a drop: counted, reported to the scheduler, never waited for. The pages stay in
their slab: there they become the payload, and from there the store sends it.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from time import monotonic, sleep, time

from objkv.cache.chunks import ChunkCache, SaveOutcome
from objkv.codec.payload import Claim, Header, Provenance, encode_in_place, header_room
from objkv.keys.chunk import ChunkKey
from objkv.telemetry import Recorder
from objkv.transfer.background import SavePool
from objkv.transfer.codec_choice import CodecChooser
from objkv.transfer.lanes import Lane, Mark
from objkv.transfer.paging import PagedGroup
from objkv.transfer.plan import SaveMove, SavePlan
from objkv.transfer.slabs import Slab, SlabPool, SlabsExhaustedError


class PayloadEncoder:
    """Makes payloads where their pages lie, in a slab. Safe from many threads, each with slabs of
    its own."""

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
        """Where in its slab the pages of a chunk must begin."""
        layers = self._groups[save.move.group].layers
        return header_room(layers, tokens=len(save.tokens or ()))

    def encode(self, claim: Claim, save: SaveMove, slab: Slab) -> tuple[memoryview, Header]:
        """The payload, a view of ``slab``, which holds the chunk's pages from ``room`` on."""
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
        """A payload was encoded and stored within ``seconds``."""
        if self._chooser is not None:
            self._chooser.saved(seconds)


logger = logging.getLogger(__name__)
_COPIES_S = 1.0
"""So long after its bound closing waits for copies out of the device, which read blocks."""
_LOOK_S = 0.001
_STRANDED: list[Slab] = []
"""Slabs that a hung device may still write into: leased for as long as the process lives, so that
their memory becomes nobody else's."""


@dataclass(frozen=True, slots=True)
class SaveLimits:
    """Bounds of the saver, and what it writes into payloads."""

    threads: int
    queue_max: int
    deadline_s: float
    """A chunk that waited longer is dropped."""
    codec: str
    """An id of the format, or ``auto``."""
    writer: str
    far: bool = True
    """Whether the bulk store is behind a network, so that its speed decides about ``auto``. What a
    directory takes for a put is the disk's; its loads come from memory, faster than any codec."""


@dataclass(slots=True)
class SavedChunk:
    """A chunk that has a slab; ``mark`` says when its pages are in it."""

    request_id: str
    claim: Claim
    move: SaveMove
    slab: Slab
    encoder: PayloadEncoder
    mark: Mark | None = None
    """None until its copies were given to the lane."""
    deadline: float = 0.0

    def encode(self) -> tuple[memoryview, Header]:
        """See ``Save``; waits for the copies."""
        self.wait()
        return self.encoder.encode(self.claim, self.move, self.slab)

    def release(self) -> None:
        """See ``Save``: the slab is given back once no copy is under way to it."""
        self.wait()
        self.slab.release()

    def wait(self) -> None:
        """Until its pages are in its slab."""
        assert self.mark is not None
        self.mark.wait()


class Saver:
    """Executes save plans. ``gather``, ``fence``, ``left_device`` and ``forget`` belong to the
    forward thread."""

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
        self._last_mark: Mark | None = None
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

        Returns (request id, chunk) of those dropped. The blocks must not change until
        ``left_device`` says so for their request, or ``fence`` was called.
        """
        self._lane.follow_compute()
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
                if is_full:  # no drop, which would be planned again for the next step
                    self._recorder.count("save_over_quota")
                elif self._pool.is_shedding:  # nor here: the store would be asked at each step
                    self._recorder.count("saves_shed")
                elif not self._cache.begin_save(key):
                    self._recorder.count("save_repeats")
                elif room > 0 and (chunk := self._take(plan, save, key)) is not None:
                    taken.setdefault(key.group, []).append(chunk)
                    room -= 1
                else:
                    dropped.add(self._drop(plan.request_id, save, key))
        for number, chunks in taken.items():
            at_once = self._groups[number].gather_chunks_max
            for start in range(0, len(chunks), at_once):
                dropped |= self._gather(chunks[start : start + at_once])
        return dropped

    def fence(self) -> None:
        """Make computing wait for all gathers so far: blocks may change hands after this call."""
        if self._last_mark is not None:
            self._last_mark.hold_compute()

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
        """``left_device`` is not called for the request again; what was gathered is still saved."""
        self._marks.pop(request_id, None)

    def drain(self, deadline_s: float) -> bool:
        """Wait until all saves are through, at most so long; True if they are."""
        return self._pool.drain(deadline_s)

    def close(self, drain_deadline_s: float) -> None:
        """Drain within the bound, then stop; what is left is dropped. No block is read any more
        afterwards, unless the device still has copies under way a second after the bound: their
        slabs are never given back. One whose put does not end stays with its thread until then; no
        other is leased."""
        end, give_up = self._clock() + drain_deadline_s, self._give_up
        if not self._copies_end(end + _COPIES_S):
            logger.error("the device does not end the copies of saves, shutting down without them")
            give_up = self._strand
        left_s = max(0.0, end - self._clock())
        self._pool.close(left_s, give_up)

    def __repr__(self) -> str:
        return f"<Saver {self._pool}>"

    def _copies_end(self, until_s: float) -> bool:
        """Blocks and slabs may be unmapped next: no copy may come late. Asked rather than waited
        for, since CUDA knows no wait that has a bound."""
        mark = self._last_mark
        while mark is not None and not mark.done():
            if self._clock() >= until_s:
                return False
            sleep(_LOOK_S)
        return True

    def _take(self, plan: SavePlan, save: SaveMove, key: ChunkKey) -> SavedChunk | None:
        move = save.move
        assert move.first_block == 0
        assert len(move.block_ids) == self._groups[key.group].shape.blocks
        if self._pool.is_closed:
            return None
        try:
            slab = self._slabs.lease()
        except SlabsExhaustedError:
            return None
        claim = Claim(key, move.parent_hash, move.token_start, move.token_end)
        return SavedChunk(plan.request_id, claim, save, slab, self._encoder)

    def _gather(self, chunks: list[SavedChunk]) -> set[tuple[str, int]]:
        """Give the copies of some chunks of one group to the lane; those dropped."""
        group = self._groups[chunks[0].claim.key.group]
        block_ids = [c.move.move.block_ids for c in chunks]
        try:
            pages = [c.slab.tensor[self._encoder.room(c.move) :] for c in chunks]
            group.gather_many(self._lane, block_ids, pages)
            mark = self._lane.mark()
        except Exception:  # e.g. no room for staging: a drop, as without a slab
            logger.exception("chunks not taken out requests=%s", {c.request_id for c in chunks})
            self._lane.mark().wait()  # copies already given must not land in a slab of others
            return self._give_up(chunks)
        if not mark.done():
            self._last_mark = mark
            self._marks |= {c.request_id: mark for c in chunks}
        for chunk in chunks:
            chunk.mark, chunk.deadline = mark, self._clock() + self._limits.deadline_s
        if self._pool.put(chunks):
            return set()
        mark.wait()  # without a bound: what computes next on this thread waits for the device too
        return self._give_up(chunks)

    def _give_up(self, chunks: Iterable[SavedChunk]) -> set[tuple[str, int]]:
        dropped = set()
        for c in chunks:
            c.slab.release()
            dropped.add(self._drop(c.request_id, c.move, c.claim.key))
        return dropped

    def _strand(self, chunks: Iterable[SavedChunk]) -> set[tuple[str, int]]:
        stranded = list(chunks)
        _STRANDED.extend(c.slab for c in stranded)
        return {self._drop(c.request_id, c.move, c.claim.key) for c in stranded}

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
