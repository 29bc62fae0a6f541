"""Computes how many leading chunks of a prompt a reader can use, from the found shards alone.

The tokens that a model needs from before the end of a match depend on the kind of each of its
groups. A payload holds only the blocks that some possible end needs.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

from objkv.index.base import Record, ShardRecords
from objkv.keys.chunk import parse_field
from objkv.keys.identity import GroupIdentity
from objkv.keys.topology import ALL_TOKENS, Shard, TokenPart

ENTRIES_MAX: Final = 64
"""Of a record that a lookup reads whole; those with more are ignored. Any writer of the index can
add entries, and replicas need one per group and node."""
Stored = Callable[[ShardRecords, int, GroupIdentity], bool]
"""Whether the found shards of a chunk hold everything that a reader needs of one group."""


def usable_chunks(
    found: Sequence[ShardRecords | None],
    groups: Sequence[GroupIdentity],
    chunk_tokens: int,
    stored: Stored | None = None,
    lag_tokens: int = 0,
) -> int:
    """Return the length, in chunks, of the longest prefix that can be loaded for all groups.

    Args:
        found: one per chunk of the prompt, in order; None if nothing is stored.
        stored: by default whether all layers and heads of a group are.
        lag_tokens: how many tokens before the end of the last chunk the prefix ends.
    """
    stored = stored or covered
    whole = [(g, group) for g, group in enumerate(groups) if keeps_all(group)]
    others = [(g, group) for g, group in enumerate(groups) if not keeps_all(group)]
    if not others:  # most models
        return _leading(found, whole, stored)
    usable = 0
    # For each other group, the number of consecutive stored chunks up to this one. A prompt may
    # have thousands of chunks, so each is visited once.
    runs = [0] * len(others)
    for end, shards in enumerate(found, start=1):
        held = shards or {}
        if not all(stored(held, g, group) for g, group in whole):
            break
        runs = [
            run + 1 if stored(held, g, group) else 0
            for run, (g, group) in zip(runs, others, strict=True)
        ]
        tokens = end * chunk_tokens - lag_tokens
        if all(
            end - run <= needed_from(group, tokens) // chunk_tokens
            and (not lag_tokens or ends_within(group, chunk_tokens, tokens))
            for run, (_, group) in zip(runs, others, strict=True)
        ):
            usable = end
    return usable


def _leading(
    found: Sequence[ShardRecords | None],
    groups: Sequence[tuple[int, GroupIdentity]],
    stored: Stored,
) -> int:
    for chunk, shards in enumerate(found):
        held = {} if shards is None else shards  # counting them would take as long as the rest
        for g, group in groups:
            if not stored(held, g, group):
                return chunk
    return len(found)


def keeps_all(group: GroupIdentity) -> bool:
    """Whether each token needs all tokens before it."""
    return group.kind in ("full", "mla")


def needed_from(group: GroupIdentity, end: int) -> int:
    """Return the first token before ``end``, or ``end``, whose KV or state later tokens need.

    Source: vLLM 0.31-0.33, ``get_num_skipped_tokens``, ``v1/core/single_type_kv_cache_manager.py``.
    """
    match group.kind:
        case "sliding_window":
            assert group.window is not None
            return max(0, end - (group.window - 1))
        case "chunked_local":
            assert group.window is not None
            return end // group.window * group.window
        case "mamba":
            return max(0, end - 1)
    return 0


def ends_within(group: GroupIdentity, chunk_tokens: int, end: int) -> bool:
    """Whether payloads hold all KV that is needed to continue at ``end``, inside the last chunk."""
    if keeps_all(group):
        return True
    held_from = chunk_tokens - stored_blocks(group, chunk_tokens) * group.block_size
    first = needed_from(group, end)
    chunks = range(first // chunk_tokens, -(-end // chunk_tokens))
    starts = (max(first, chunk * chunk_tokens) - chunk * chunk_tokens for chunk in chunks)
    return group.kind != "mamba" and all(start >= held_from for start in starts)


def covered(shards: Collection[str], number: int, group: GroupIdentity) -> bool:
    """Whether the payloads of a chunk together hold all layers, heads and tokens of the group."""
    # Nearly always one payload does, and a prompt has thousands of chunks.
    return str(number) in shards or bool(payloads_of(shards, number, group))


def payloads_of(
    fields: Iterable[str],
    number: int,
    group: GroupIdentity,
    reads: Callable[[TokenPart], bool] = lambda tokens: True,
) -> tuple[Shard | None, ...]:
    """Return what those payloads hold that together hold a whole group: the one that has all of it
    (None), or a few that each have other layers, heads or tokens; empty if there are none.
    ``reads``: whether payloads with these tokens are of use."""
    by_tokens: dict[TokenPart, list[Shard]] = {}
    for shard in shards_of(fields, number):
        if not reads(ALL_TOKENS if shard is None else shard.tokens):
            continue
        if shard is None:
            return (None,)
        by_tokens.setdefault(shard.tokens, []).append(shard)
    divisions: dict[tuple[int, int], list[tuple[Shard, ...]]] = {}
    for tokens, shards in sorted(by_tokens.items()):
        if found := _tiles(group, shards):
            divisions.setdefault((tokens.size, tokens.interleave), []).append(found)
    for (size, _), parts in divisions.items():
        if len(parts) == size:
            return tuple(shard for part in parts for shard in part)
    return ()


_Tiles = Mapping[tuple[int, int], tuple[Shard, ...]]
"""What has each span of layers or of heads, ``[start, end)``."""


def _tiles(group: GroupIdentity, shards: Iterable[Shard]) -> tuple[Shard, ...]:
    """Return some of the shards that have every head of every layer of the group once; none if that
    is not possible. They divide the layers, as a replica's do, and each division the heads."""
    rows: dict[tuple[int, int], dict[tuple[int, int], tuple[Shard, ...]]] = {}
    for shard in shards:
        row = rows.setdefault((shard.layer_start, shard.layer_end), {})
        row[shard.head_start, shard.head_end] = (shard,)
    whole = {layers: _chain(group.heads, heads) for layers, heads in rows.items()}
    return _chain(len(group.layers), {layers: some for layers, some in whole.items() if some})


def _chain(end: int, tiles: _Tiles) -> tuple[Shard, ...]:
    """Return as few shards as possible whose spans follow one another from 0 to ``end``."""
    best: dict[int, tuple[Shard, ...]] = {0: ()}
    for start, stop in sorted(tiles):
        if start in best:
            longer = best[start] + tiles[start, stop]
            if stop not in best or len(longer) < len(best[stop]):
                best[stop] = longer
    return best.get(end, ())


def shards_to_read(record: Record | None, groups: int) -> ShardRecords | None:
    """Return the shards that lookups find: all or, of more than ``ENTRIES_MAX``, those with all of
    one of the ``groups``. None if there are none."""
    if record is None:
        return None
    if len(record.shards) <= ENTRIES_MAX:
        return record.shards
    wholes = map(str, range(groups))
    return {name: record.shards[name] for name in wholes if name in record.shards} or None


def shards_of(fields: Iterable[str], number: int) -> Iterable[Shard | None]:
    """Yield what the payloads of one group hold, None for all. Ignores fields of another form."""
    for field in fields:
        try:
            group, shard = parse_field(field)
        except ValueError:
            continue
        if group == number:
            yield shard


def stored_blocks(group: GroupIdentity, chunk_tokens: int) -> int:
    """Return how many blocks of one chunk a payload holds: the last ones, which a match that ends
    with this or a later chunk can need. 0: the group has no payloads."""
    blocks = chunk_tokens // group.block_size
    match group.kind:
        case "sliding_window":
            assert group.window is not None
            return min(blocks, -(-group.window // group.block_size))
        case "chunked_local":
            assert group.window is not None
            return blocks if chunk_tokens % group.window else 0
        case "mamba":
            return 1
    return blocks
