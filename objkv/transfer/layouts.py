"""Layouts of the payloads that a rank can load, whatever the shape of the replica that wrote them.

A payload has its frames in rows: one row per layer, or part of a state, and in each row one frame
per column, which is what one rank of the writer had: some heads, or some tokens. A rank that loads
needs consecutive rows, and of each the columns with its heads and tokens. The blocks may have other
sizes than the rank's. A payload whose frames are not exactly those of its group is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from objkv.codec.payload import read_claimed
from objkv.codec.values import Claim, Header, LayerSpec, check_layers
from objkv.errors import ObjkvError, PayloadError
from objkv.keys.states import part_names
from objkv.keys.topology import Shard, TokenPart, frame_name
from objkv.transfer.lanes import Ints, Lane, PagedLayers, Recast, offsets_of
from objkv.transfer.paging import GroupShape, PagedGroup
from objkv.transfer.plan import Source

_KEPT_MAX = 1024
"""Bound of remembered layouts. A fleet has few shapes, but a bucket may contain anything."""


class ForeignLayoutError(ObjkvError):
    """A payload is right, but its tokens are dealt to ranks in a way that this rank cannot read."""


class _Column:
    """The frames of one column, and where they belong in the rank's pages."""

    def __init__(
        self, group: PagedGroup, share: Shard, filled: range, read: tuple[LayerSpec, ...]
    ) -> None:
        """``share``: what it has. ``filled``: the rank's rows. ``read``: the frames for them."""
        own, shape = group.shape.rank_shard.shard, group.shape
        first, end = max(own.head_start, share.head_start), min(own.head_end, share.head_end)
        taken = (first - share.head_start, end - share.head_start)
        heads = slice(first - own.head_start, end - own.head_start)
        slots, tokens = _selection(own.tokens, share.tokens)
        ours = group.pages.cut(filled)
        is_all = end - first == own.head_end - own.head_start and slots == slice(None)
        self._pages = ours if is_all else PagedLayers([c[:, heads, slots] for c in ours.caches])
        blocks, given_heads, size, _ = read[0].shape
        own_size = self._pages.caches[0].shape[2]
        self._blocks = blocks * size // tokens[1] // own_size
        """Blocks of the rank that a frame fills."""
        frame = blocks, given_heads, 0 if shape.parts else size
        self._recast = Recast(frame, taken, 0, self._blocks, tokens)
        is_whole = taken == (0, given_heads) and tokens == (0, 1)
        self._recasts = not is_whole or size != own_size
        # Otherwise some bytes of each token would be left out.
        given = self._pages.frame_bytes(0, self._recast)
        assert given.tolist() == [layer.nbytes for layer in read]

    def scatter(
        self, lane: Lane, rows: range, memory: memoryview, starts: Ints, ids: Ints, skipped: int
    ) -> None:
        """Write the pages of some of the rows, ``skipped`` blocks of the rank after the first.
        ``starts``: where the rows' frames start in ``memory``, ``[n, rows]``."""
        layers, blocks = self._pages.cut(rows), ids.shape[1]
        if not 0 <= skipped <= self._blocks - blocks:  # pages of the next layer would be read
            raise ValueError(f"blocks {skipped} to {skipped + blocks} of {self._blocks}")
        recast = None
        if self._recasts:
            recast = replace(self._recast, first_block=skipped, blocks=blocks)
        elif skipped:
            starts = starts + skipped * layers.nbytes
        lane.scatter(memory, starts, layers, ids, recast)


class PayloadLayout:
    """The frames of some payloads, and which of them belong where in one rank's pages."""

    def __init__(
        self, group: PagedGroup, shard: Shard | None, found: tuple[LayerSpec, ...], data_start: int
    ) -> None:
        """``shard``: what the payloads have of the group, None for all. ``found``: their frames,
        from ``data_start`` on. Raises ``PayloadError`` if those are not such payloads'."""
        self._group = group
        shape, held = group.shape, shard or group.shape.whole
        model_layers = shape.model_layers or shape.layers
        names = part_names(model_layers[held.layer_start : held.layer_end], len(shape.parts))
        columns, rest = divmod(len(found), len(names))
        if rest or not columns:
            raise PayloadError(f"{len(found)} frames for {len(names)} layers")
        shares = _shares(columns, found[0].shape[1], held)
        check_layers(found, _specs(group, names, shares, found[0].shape[2]))
        own, layers = shape.rank_shard.shard, _common_layers(shape, held)
        tokens = own.tokens.sources(shares[0].tokens)
        places = [
            place
            for place, share in enumerate(shares)
            if share.tokens in tokens and share.overlaps(own)
        ]
        read = [shares[place] for place in places]
        if not layers or not read or not all(_is_dealt(group, share) for share in read):
            raise ForeignLayoutError(f"payloads in {', '.join(map(str, shares))}, read as {own}")
        self.columns = columns
        """Frames in each row."""
        self.rows = _rows(shape, layers, held)
        """The rows that this rank needs."""
        self.filled = _rows(shape, layers, own)
        """The rank's rows that they fill."""
        self._first, self._last = places[0], places[-1]
        sizes = np.array([layer.nbytes for layer in found], np.int64)
        self.nbytes = data_start + int(sizes.sum())
        starts, sizes = (x.reshape(-1, columns) for x in (data_start + offsets_of(sizes), sizes))
        self.starts = starts[:, self._first]
        """Where what is read of each row starts in a payload, ``[rows]``: consecutive frames."""
        self.sizes = starts[:, self._last] + sizes[:, self._last] - self.starts
        """Bytes of each span."""
        rows = slice(self.rows.start, self.rows.stop)
        frames = [found[place::columns][rows] for place in places]
        self._columns = [
            (_Column(group, share, self.filled, of_column), starts[:, place] - self.starts)
            for share, place, of_column in zip(read, places, frames, strict=True)
        ]
        """Those that are read, and where the frames of each start in the spans."""

    def frames(self, rows: range) -> list[int]:
        """Return the numbers of the frames that are read of these rows."""
        columns = range(self._first, self._last + 1)
        return [row * self.columns + column for row in rows for column in columns]

    def scatter(
        self, lane: Lane, rows: range, memory: memoryview, starts: Ints, ids: Ints, first_block: int
    ) -> None:
        """Write the rank's part of some rows of ``n`` payloads into blocks.

        Raises IndexError for a block that does not exist, or a span outside ``memory``, and
        ValueError for more blocks than a payload has. For the other arguments see ``Lane.scatter``.

        Args:
            rows: which, all of them in ``self.rows``.
            memory: has their raw, verified bytes.
            starts: ``[n, rows]``: where the spans of the rows start in it, see ``self.starts``.
            first_block: the payloads' block that the first of ``ids`` receives.
        """
        first = rows.start - self.rows.start
        ours = range(first, first + len(rows))
        ids, skipped = self._group.blocks(ids), first_block * self._group.split
        for column, offsets in self._columns:
            at = starts + offsets[rows.start : rows.stop]
            column.scatter(lane, ours, memory, at, ids, skipped)


class SourceShape(NamedTuple):
    """What the payloads of a source are to one rank."""

    filled: range
    """The rank's rows that they fill; none if it needs none of them."""
    nbytes: int
    """About how many bytes one has: right for all whose layers are alike."""


class PayloadLayouts:
    """The layouts of the payloads that one rank reads. Thread-safe."""

    def __init__(self, groups: Mapping[int, PagedGroup]) -> None:
        self._groups = groups
        self.of = lru_cache(_KEPT_MAX)(self._shape)
        self._layout = lru_cache(_KEPT_MAX)(PayloadLayout)

    def _shape(self, source: Source) -> SourceShape:
        """Return the shape of payloads of a source."""
        group = self._groups.get(source.group)
        if group is None:
            return SourceShape(range(0), 0)
        held, own = source.shard or group.shape.whole, group.shape.rank_shard.shard
        layers = (held.layer_end - held.layer_start) / (own.layer_end - own.layer_start)
        nbytes = sum(layer.nbytes for layer in group.layers)
        common = _common_layers(group.shape, held)
        filled = _rows(group.shape, common, own) if common else common
        return SourceShape(filled, int(nbytes * layers * _ranks(group, held)))

    def read(self, payload: memoryview, claim: Claim) -> tuple[Header, PayloadLayout]:
        """Return the header of an uncompressed payload, and its layout. Raises ``PayloadError`` if
        the payload is not what the claim says, and ``ForeignLayoutError``."""
        group, nbytes = self._groups[claim.key.group], len(payload)
        header = read_claimed(payload, claim, group.layers)
        if header.nbytes != nbytes or header.codec != "none":
            raise PayloadError(f"{nbytes} bytes in the arena, not {header.nbytes}")
        frames = header.frames.layers
        return header, self._layout(group, claim.key.shard, frames, header.data_start)


def row_bytes_max(group: PagedGroup) -> int:
    """Return the size of the largest row of any payload of the group."""
    return max(int(layer.nbytes * _ranks(group, group.shape.whole)) for layer in group.layers)


def _ranks(group: PagedGroup, held: Shard) -> float:
    """Return how many times the heads and tokens of this rank a payload has."""
    own = group.shape.rank_shard.shard
    heads = (held.head_end - held.head_start) / (own.head_end - own.head_start)
    return heads * own.tokens.size / held.tokens.size


def _shares(columns: int, heads: int, held: Shard) -> list[Shard]:
    """Return what the columns of a payload have, each ``heads`` of them. Raises ``PayloadError``
    unless they can be all heads and tokens that it holds, each once."""
    total = held.head_end - held.head_start
    parts, rest = divmod(columns * heads, total)
    if rest or total % heads or not parts or parts > 1 < held.tokens.size:
        raise PayloadError(f"{columns} frames of {heads} heads in each row, of {held}")
    tokens = [held.tokens] if parts == 1 else [TokenPart(rank, parts) for rank in range(parts)]
    layers = held.layer_start, held.layer_end
    starts = range(held.head_start, held.head_end, heads)
    return [Shard(*layers, start, start + heads, part) for start in starts for part in tokens]


def _common_layers(shape: GroupShape, held: Shard) -> range:
    """Return the layers that a payload has for the rank, in whole or in part. If it cannot read how
    the tokens are dealt, it still needs them, so that loading fails."""
    own = shape.rank_shard.shard
    sources = own.tokens.sources(held.tokens)
    if not own.overlaps(held) or (sources and held.tokens not in sources):
        return range(0)
    return range(max(own.layer_start, held.layer_start), min(own.layer_end, held.layer_end))


def _rows(shape: GroupShape, layers: range, shard: Shard) -> range:
    """Return the rows of some layers among those of a shard."""
    first = shard.layer_start
    return range(shape.rows * (layers.start - first), shape.rows * (layers.stop - first))


def _selection(own: TokenPart, source: TokenPart) -> tuple[slice, tuple[int, int]]:
    """Return which slots of the rank's blocks a payload fills, and which tokens of it are taken:
    the first, and the distance to the next ones."""
    if source.size > own.size:
        step = source.size // own.size
        return slice((source.rank - own.rank) // own.size, None, step), (0, 1)
    step = own.size // source.size
    return slice(None), ((own.rank - source.rank) // source.size, step)


def _is_dealt(group: PagedGroup, share: Shard) -> bool:
    """Whether the tokens of a column fill the same slots of every block of the rank."""
    shape, tokens = group.shape, share.tokens
    if tokens == shape.rank_shard.shard.tokens:
        return True
    ranks = max(1, tokens.size // shape.rank_shard.shard.tokens.size)
    return shape.divisible and shape.block_size % ranks == 0


def _tokens_of(group: PagedGroup, share: Shard) -> int:
    """Return how many tokens a frame of a share has. Raises ``PayloadError`` if none can."""
    shape = group.shape
    own = shape.rank_shard.shard.tokens
    tokens, rest = divmod(shape.blocks * shape.block_size * own.size, share.tokens.size)
    if rest or not tokens:
        raise PayloadError(f"tokens divided among {share.tokens.size} ranks")
    return tokens


def _specs(
    group: PagedGroup, names: Sequence[str], shares: Sequence[Shard], block_size: int
) -> tuple[LayerSpec, ...]:
    """Return the frames that a payload must have, derived from this rank's first layer, because all
    layers of a group are alike. Raises ``PayloadError`` if there can be no such frames.
    ``block_size``: what the payload has, if the rank can read it."""
    shape, like = group.shape, group.layers[0]
    # This rank does not know the scales of other ranks' layers, and reads nothing of those layers.
    own_names = part_names(shape.layers, len(shape.parts))
    scales = {name: layer.scales for name, layer in zip(own_names, group.layers, strict=True)}
    unknown = None if like.scales else ""

    def spec(row: int, share: Shard) -> LayerSpec:
        heads, tokens = share.head_end - share.head_start, _tokens_of(group, share)
        if shape.parts:
            part = shape.parts[row % len(shape.parts)]
            form = (shape.blocks, heads, part.rows, part.nbytes)
        else:
            size = like.shape[2]
            if shape.divisible and tokens % block_size == 0:
                size = block_size
            if tokens < size:
                raise PayloadError(f"frames of {tokens} tokens, but blocks of {size}")
            form = (tokens // size, heads, size, like.shape[3])
        name = frame_name(names[row], share) if len(shares) > 1 else names[row]
        return LayerSpec(name, like.dtype, form, scales.get(names[row], unknown))

    return tuple(spec(row, share) for row in range(len(names)) for share in shares)
