"""How many leading chunks of a prompt a reader can use, decided once, from records alone.

A full-attention group needs every chunk; a sliding-window group only those that the window still
reaches from the end of the match, and its payloads hold only the blocks a window can reach.
"""

from collections.abc import Callable, Iterable, Sequence

from objkv.index.base import Record
from objkv.keys.identity import GroupIdentity
from objkv.keys.topology import Shard

Stored = Callable[[Record, int, GroupIdentity], bool]
"""Whether a record holds all that a reader needs of one group."""


def usable_chunks(
    records: Sequence[Record | None],
    groups: Sequence[GroupIdentity],
    chunk_tokens: int,
    stored: Stored | None = None,
) -> int:
    """The length, in chunks, of the longest prefix that all groups can be loaded for.

    Args:
        records: one per chunk of the prompt, in order, None where nothing is stored.
        stored: what the reader needs of a group; by default all of its layers and heads.
    """
    stored = stored or covered
    windowed = [(g, group) for g, group in enumerate(groups) if group.window is not None]
    full = [(g, group) for g, group in enumerate(groups) if group.window is None]
    leading = 0
    for record in records:
        if record is None or not all(stored(record, g, group) for g, group in full):
            break
        leading += 1
    return next(
        (
            n
            for n in range(leading, 0, -1)
            if _windows_stored(records, n, windowed, stored, chunk_tokens)
        ),
        0,
    )


def covered(record: Record, group_id: int, group: GroupIdentity) -> bool:
    """Whether the record's shards together hold all layers and heads of the group."""
    shards = list(shards_of(record, group_id))
    return all(
        any(
            s.layer_start <= layer < s.layer_end and s.head_start <= head < s.head_end
            for s in shards
        )
        for layer in range(len(group.layers))
        for head in range(group.heads)
    )


def shards_of(record: Record, group_id: int) -> Iterable[Shard]:
    """The shards of one group that the record names; fields of another form are ignored."""
    for field in record.shards:
        group, _, text = field.partition(".")
        if group != str(group_id):
            continue
        try:
            yield Shard.parse(text)
        except ValueError:
            continue


def window_reach_chunks(window: int, chunk_tokens: int) -> int:
    """Chunks before the end of a match that a window sees (its own token counts as one)."""
    return -(-(window - 1) // chunk_tokens)


def stored_blocks(group: GroupIdentity, chunk_tokens: int) -> int:
    """Blocks of one chunk that a payload of the group holds: all, or the last ones that a window
    ending at the chunk's end can reach."""
    blocks = chunk_tokens // group.block_size
    if group.window is None:
        return blocks
    return min(blocks, -(-group.window // group.block_size))


def _windows_stored(
    records: Sequence[Record | None],
    n: int,
    windowed: Sequence[tuple[int, GroupIdentity]],
    stored: Stored,
    chunk_tokens: int,
) -> bool:
    for g, group in windowed:
        assert group.window is not None
        first = max(0, n - window_reach_chunks(group.window, chunk_tokens))
        for record in records[first:n]:
            if record is None or not stored(record, g, group):
                return False
    return True
