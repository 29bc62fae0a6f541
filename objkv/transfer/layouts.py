"""Layouts of the payloads that a rank can load: those of its own shard and of other shapes.

Payloads of another TP or PP size contain other heads and layers. Payloads of another block size
divide the same tokens into other blocks. A ``PayloadLayout`` describes the frames that a payload
must have, and maps them to the rank's pages. A payload that differs from its layout is refused.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from math import gcd
from typing import Any

import numpy as np

from objkv.codec.payload import LayerSpec, check_layers
from objkv.keys.states import part_names
from objkv.keys.topology import Part, Shard, TokenPart, cover
from objkv.transfer.lanes import ARRAY_WORDS, BlockRuns, Lane, PagedLayers, Pages, Recast
from objkv.transfer.paging import GroupShape, PagedGroup
from objkv.transfer.plan import ChunkMove, Kind, LoadMove, LoadPlan

_KEPT_MAX = 1024
"""Bound of cached layouts and covers. A fleet has few shapes, but an index may contain anything."""


class PayloadLayout:
    """The frames of one shard's payloads, and where they belong in one rank's pages."""

    def __init__(self, group: PagedGroup, part: Part, block_size: int) -> None:
        own, shape = group.shape.rank_shard.shard, group.shape
        self._group, self._part = group, part
        is_own = part.source == own and block_size == shape.block_size
        self.shard = part.source
        self.layers = group.layers if is_own else _specs(group, part.source, block_size)
        """The frames that a payload must have, in order."""
        each = len(shape.parts) or 1
        taken = part.take.layer_start - own.layer_start, part.take.layer_end - own.layer_start
        self.filled = range(each * taken[0], each * taken[1])
        """The rank's layers that the payload fills. Each part of a state counts as a layer."""
        self.filled_bits = bits_of(self.filled)
        skipped = each * (part.take.layer_start - part.source.layer_start)
        self.frames = range(skipped, skipped + len(self.filled))
        """The frames that contain those layers."""
        first = part.take.head_start - part.source.head_start
        self._heads = (first, first + part.take.head_end - part.take.head_start)
        self._recasts = not is_own
        heads = slice(part.take.head_start - own.head_start, part.take.head_end - own.head_start)
        slots, self._tokens = _selection(own.tokens, part.source.tokens)
        self._resized: dict[int, PayloadLayout] = {}
        ours = group.pages.cut(self.filled)
        read = self.layers[self.frames.start : self.frames.stop]
        words = [np.dtype(ARRAY_WORDS[cache.dtype]) for cache in ours.caches]
        self._forms = [_form(*both) for both in zip(read, words, strict=True)]
        self._is_uniform = all(form == self._forms[0] for form in self._forms)
        self._ends = [0, *accumulate(layer.nbytes for layer in read)]
        self._pages = ours if is_own else PagedLayers([c[:, heads, slots] for c in ours.caches])

    def fills(self, frames: range) -> range:
        """Return the rank's layers that these frames fill. Frames of other ranks' layers fill
        none."""
        skipped, count = self.frames.start, len(self.filled)
        first, end = frames.start - skipped, frames.stop - skipped
        return self.filled[min(max(first, 0), count) : min(max(end, 0), count)]

    def place(self, move: ChunkMove) -> BlockRuns:
        """Return the move's blocks for ``scatter``."""
        return BlockRuns(self._group.blocks(move.block_ids))

    def scatter(
        self, lane: Lane, frames: range, memory: memoryview, move: ChunkMove, placed: BlockRuns
    ) -> None:
        """Write the rank's part of consecutive frames into the move's blocks.

        Args:
            frames: which, all of them in ``self.frames``.
            memory: their raw, verified bytes, one after another. Must stay alive until the lane's
                next mark is done.
            placed: the move's blocks, from ``place``.
        """
        start = frames.start - self.frames.start
        layers = self._pages.cut(range(start, start + len(frames)))
        pages = self._pages_in(memory, start, start + len(frames))
        count, skipped = len(placed.ids), move.first_block * self._group.split
        if not self._recasts and count == len(pages[0]):
            lane.scatter(pages, layers, placed)
            return
        size = 0 if self._group.shape.parts else self._pages.caches[0].shape[2]
        recast = Recast(self._heads, size, skipped, count, self._tokens)
        lane.scatter(pages, layers, placed, recast)

    def _pages_in(self, memory: memoryview, start: int, end: int) -> list[Pages]:
        """Return views of the pages of each of some consecutive frames, counted from the first one
        that is read."""
        begin = self._ends[start]
        if len(memory) != self._ends[end] - begin:  # numpy would ignore bytes beyond the end
            raise ValueError(f"{len(memory)} bytes of {end - start} frames")
        if self._is_uniform:  # one call for all frames takes a third of the time
            shape, word = self._forms[start]
            return list(np.ndarray((end - start, *shape), word, memory))
        return [
            np.ndarray(shape, word, memory, place - begin)
            for (shape, word), place in zip(
                self._forms[start:end], self._ends[start:end], strict=True
            )
        ]

    def reading(self, found: tuple[LayerSpec, ...]) -> "PayloadLayout":
        """Return the layout of a payload whose frames are ``found``: this one, or one of another
        block size. Raises ``PayloadError`` if neither matches."""
        if found is self.layers:
            return self
        size = found[0].shape[2]
        shape = self._group.shape
        tokens = self.layers[0].shape[0] * self.layers[0].shape[2]
        if shape.divisible and size != self.layers[0].shape[2] and tokens % size == 0:
            other = self._resized.get(size) or PayloadLayout(self._group, self._part, size)
            check_layers(found, other.layers)
            # One for all threads, see ``PagedLayers.cut``.
            return self._resized.setdefault(size, other)
        check_layers(found, self.layers)
        return self


class PayloadLayouts:
    """The layouts of one rank, by part. Thread-safe, except for ``spread``."""

    def __init__(self, groups: Mapping[int, PagedGroup]) -> None:
        self._groups = groups
        self._own = {
            g: PayloadLayout(group, Part(own, own), group.shape.block_size)
            for g, group in groups.items()
            for own in [group.shape.rank_shard.shard]
        }
        self._own_fields = {g: f"{g}.{layout.shard}" for g, layout in self._own.items()}
        # Two threads may make one each. Both are right, and who copies by one keeps it.
        self._other = lru_cache(_KEPT_MAX)(self._make)
        self._cover = lru_cache(_KEPT_MAX)(self._find_cover)

    def of(self, load: LoadMove) -> PayloadLayout:
        """Return the layout of the payload that a move reads."""
        group = load.move.group
        return self._own[group] if load.part is None else self._other(group, load.part)

    def _make(self, group: int, part: Part) -> PayloadLayout:
        paged = self._groups[group]
        tokens = _payload_tokens(paged, part.source)
        return PayloadLayout(paged, part, gcd(tokens, paged.shape.block_size))

    def filled(self, plan: LoadPlan) -> list[int]:
        """Return the rank's layers that each move of a plan that was spread fills, as bits."""
        moves = plan.moves
        if moves.has_parts:
            return [self.of(load).filled_bits for load in moves]
        if len(moves) and len(moves.kinds) == 1:  # nearly always, on the forward thread
            return [self._own[moves.kinds[0].group].filled_bits] * len(moves)
        return [self._own[group].filled_bits for group in moves.groups]

    def spread(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan for this rank: one move per payload that it reads, and no move for a
        group without a layer on this rank."""
        fields = self._own_fields
        if all(fields.get(kind.group) in kind.fields for kind in plan.moves.kinds):
            return plan  # the rank's own shards are stored, as they almost always are
        return replace(plan, moves=plan.moves.spread(self._parts))

    def _parts(self, kind: Kind) -> tuple[Part | None, ...]:
        """Return the parts that the rank reads of each chunk with these stored shards."""
        group = kind.group
        if group not in self._own:
            return ()
        return self._cover(group, frozenset(kind.fields))

    def _find_cover(self, group: int, held: frozenset[str]) -> tuple[Part | None, ...]:
        own, whole = self._own[group].shard, _whole(self._groups[group])
        shape, found = self._groups[group].shape, list[Shard]()
        for field in held:
            number, _, text = field.partition(".")
            if number != str(group):
                continue
            try:
                shard = Shard.parse(text)
            except ValueError:
                continue
            is_within = shard.layer_end <= whole.layer_end and shard.head_end <= whole.head_end
            if is_within and (shard.tokens == own.tokens or _is_dealt(shape, shard.tokens)):
                found.append(shard)
        parts = cover(own, found)
        if parts is None or parts == (Part(own, own),):
            return (None,)  # without a cover, loading the rank's own shard fails as a ghost
        return parts


def frame_bytes_max(group: PagedGroup) -> int:
    """Return the size of the largest frame of any payload of the group, of any shape."""
    whole = _specs(group, _whole(group), group.shape.block_size)
    return max(layer.nbytes for layer in (*group.layers, *whole))


def bits_of(layers: range) -> int:
    """Return layers as bits of a number."""
    return (1 << layers.stop) - (1 << layers.start)


def _form(layer: LayerSpec, word: np.dtype[Any]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape of a frame's pages in words, and the type of a word."""
    *shape, content = layer.shape
    words, rest = divmod(content * layer.item_bytes, word.itemsize)
    assert not rest  # otherwise some bytes of each token would be left out
    return (*shape, words), word


def _selection(own: TokenPart, source: TokenPart) -> tuple[slice, tuple[int, int]]:
    """Return which slots of the rank's blocks a payload fills, and which tokens of the payload are
    taken: the first, and the distance to the next ones."""
    if source.size > own.size:
        step = source.size // own.size
        return slice((source.rank - own.rank) // own.size, None, step), (0, 1)
    step = own.size // source.size
    return slice(None), ((own.rank - source.rank) // source.size, step)


def _is_dealt(shape: GroupShape, source: TokenPart) -> bool:
    """Whether tokens of another division fill the same slots of every block of the rank."""
    ranks = max(1, source.size // shape.rank_shard.shard.tokens.size)
    return shape.divisible and shape.block_size % ranks == 0


def _payload_tokens(group: PagedGroup, shard: Shard) -> int:
    """Return how many tokens a payload of any shard of the group has."""
    shape = group.shape
    own = shape.rank_shard.shard.tokens
    return shape.blocks * shape.block_size * own.size // shard.tokens.size


def _whole(group: PagedGroup) -> Shard:
    own, shape = group.shape.rank_shard.shard, group.shape
    return Shard(0, len(shape.model_layers) or own.layer_end, 0, shape.heads or own.head_end)


def _specs(group: PagedGroup, shard: Shard, block_size: int) -> tuple[LayerSpec, ...]:
    """Return the layer specs that a payload of another shard must have, derived from this rank's
    first layer, because all layers of a group are alike."""
    shape, like = group.shape, group.layers[0]
    names = (shape.model_layers or shape.layers)[shard.layer_start : shard.layer_end]
    heads = shard.head_end - shard.head_start
    blocks = _payload_tokens(group, shard) // block_size
    if shape.parts:
        forms = [(blocks, heads, part.rows, part.nbytes) for part in shape.parts] * len(names)
        framed = zip(part_names(names, len(shape.parts)), forms, strict=True)
        return tuple(LayerSpec(name, like.dtype, form) for name, form in framed)
    pages = (blocks, heads, block_size, like.shape[3])
    # This rank does not know the scales of other ranks' layers, and reads nothing of those layers.
    scales = {layer.name: layer.scales for layer in group.layers}
    unknown = None if like.scales else ""
    return tuple(LayerSpec(name, like.dtype, pages, scales.get(name, unknown)) for name in names)
