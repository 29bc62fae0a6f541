"""What of a chunk is not stored, in words: groups, layers and heads."""

from collections.abc import Sequence
from dataclasses import dataclass

from objkv.cache.match import shards_of
from objkv.index.base import ShardRecord
from objkv.keys.identity import GroupIdentity, Identity
from objkv.ops.match import ChunkMatch

_NAMES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Missing:
    """Of one group."""

    group: int
    layers: tuple[str, ...]
    """Of which some head is missing, in forward order."""
    heads: tuple[int, ...]
    """Missing in at least one of them."""
    sentence: str


def describe_missing(identity: Identity, chunk: ChunkMatch) -> list[Missing]:
    """What the groups that are not whole lack."""
    return [_missing(g, identity.groups[g], chunk.payloads) for g in chunk.groups_missing]


def _missing(number: int, group: GroupIdentity, payloads: Sequence[str]) -> Missing:
    empty = ShardRecord(0, 0, "none", False, "", 0)
    held = list(shards_of(dict.fromkeys(payloads, empty), number))
    holes = [
        (layer, head)
        for layer in range(len(group.layers))
        for head in range(group.heads)
        if not any(
            s.layer_start <= layer < s.layer_end and s.head_start <= head < s.head_end for s in held
        )
    ]
    layers = tuple(group.layers[layer] for layer in sorted({layer for layer, _ in holes}))
    heads = tuple(sorted({head for _, head in holes}))
    kind = f"group {number} ({group.kind.replace('_', ' ')})"
    if not held:
        return Missing(number, layers, heads, f"nothing of {kind}")
    which = "all layers" if len(layers) == len(group.layers) else _some(layers)
    whose = "" if len(heads) == group.heads else f", heads {', '.join(map(str, heads))}"
    return Missing(number, layers, heads, f"{kind} lacks {which}{whose}")


def _some(layers: Sequence[str]) -> str:
    if len(layers) <= _NAMES_SHOWN:
        return ", ".join(layers)
    return f"{len(layers)} layers, {layers[0]} to {layers[-1]}"
