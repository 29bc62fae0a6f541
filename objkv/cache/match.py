"""How many leading chunks of a prompt a reader can use, decided once, from what was found alone.

A full-attention group needs every chunk; a sliding-window group only those that the window still
reaches from the end of the match, and its payloads hold only the blocks a window can reach.
"""

from collections.abc import Callable, Iterable, Sequence

from objkv.index.base import Shards
from objkv.keys.identity import GroupIdentity
from objkv.keys.topology import Shard

Stored = Callable[[Shards, int, GroupIdentity], bool]
"""Whether the shards that were found of a chunk hold all that a reader needs of one group."""


def usable_chunks(
    found: Sequence[Shards | None],
    groups: Sequence[GroupIdentity],
    chunk_tokens: int,
    stored: Stored | None = None,
) -> int:
    """The length, in chunks, of the longest prefix that all groups can be loaded for.

    Args:
        found: one per chunk of the prompt, in order, None where nothing is stored.
        stored: what the reader needs of a group; by default all of its layers and heads.
    """
    stored = stored or covered
    full = [(g, group) for g, group in enumerate(groups) if group.window is None]
    windows = [
        (g, group, window_reach_chunks(group.window, chunk_tokens))
        for g, group in enumerate(groups)
        if group.window is not None
    ]
    usable = 0
    # Per window, how many chunks in a row up to this one it could be served: a prompt may have
    # thousands of chunks, so each is looked at once.
    runs = [0] * len(windows)
    for end, shards in enumerate(found, start=1):
        if shards is None or not all(stored(shards, g, group) for g, group in full):
            break
        runs = [
            run + 1 if stored(shards, g, group) else 0
            for run, (g, group, _) in zip(runs, windows, strict=True)
        ]
        if all(run >= min(end, reach) for run, (_, _, reach) in zip(runs, windows, strict=True)):
            usable = end
    return usable


def covered(shards: Shards, group_id: int, group: GroupIdentity) -> bool:
    """Whether the shards together hold all layers and heads of the group."""
    held = list(shards_of(shards, group_id))
    if Shard(0, len(group.layers), 0, group.heads) in held:
        return True
    return all(
        any(
            s.layer_start <= layer < s.layer_end and s.head_start <= head < s.head_end for s in held
        )
        for layer in range(len(group.layers))
        for head in range(group.heads)
    )


def shards_of(shards: Shards, group_id: int) -> Iterable[Shard]:
    """The shards of one group among these; fields of another form are ignored."""
    for field in shards:
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
