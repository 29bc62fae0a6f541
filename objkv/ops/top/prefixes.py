"""The hottest prefixes in the index, read with a limit to keep the load on the index low."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from objkv.index.base import ReadIndex, Record

RECORDS_MAX: Final = 50_000
"""Records read at once over all namespaces: about 20 MB, and some seconds of one Redis
connection."""
SHOWN_MAX: Final = 50
_SHARED = 0.5
"""A prefix extends to the next chunk while that chunk has this share of the first chunk's hits."""


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """The first chunk of a prefix, and the length that most of its hits share."""

    namespace: str
    root: bytes
    """Prefix hash of the first chunk."""
    hits: int
    """Hits of the first chunk since its record was created; every use of a later chunk is also a
    hit of the first."""
    hits_per_s: float | None
    """Hits per second since the previous reading; None at the first."""
    shared_tokens: int
    """Tokens from the start that at least half of the hits share."""
    tokens: int
    """Stored tokens of the whole tree, each chunk counted once."""
    nbytes: int
    touched_s: int
    """Seconds since the epoch of the last hit of the first chunk; 0 if never."""


@dataclass(frozen=True, slots=True)
class PrefixLook:
    """One reading of the index."""

    at_s: float
    prefixes: tuple[HotPrefix, ...]
    """Sorted by hits, highest first."""
    records: int
    """The number of chunks read."""
    whole: bool
    """Whether all records were read. If not, hotter prefixes may exist."""


@dataclass(frozen=True, slots=True)
class _Node:
    parent: bytes
    token_end: int
    tokens: int
    hits: int
    nbytes: int
    touched_s: int


def look(
    index: ReadIndex, at_s: float, before: PrefixLook | None, *, records_max: int = RECORDS_MAX
) -> PrefixLook:
    """Read at most ``records_max`` records. ``before`` is the previous reading, for rates. Raises
    ``StoreError``."""
    found: list[HotPrefix] = []
    left, whole, chunks = records_max, True, 0
    old = {(p.namespace, p.root): p for p in before.prefixes} if before else {}
    names = index.namespaces()
    for number, namespace in enumerate(names):
        nodes, seen = _nodes(islice(index.scan(namespace), left + 1), left)
        found += _hot(namespace, nodes)
        chunks += len(nodes)
        is_over, left = seen > left, max(0, left - seen)
        if is_over or (left == 0 and number + 1 < len(names)):
            whole = False
            break
    found.sort(key=lambda prefix: (-prefix.hits, prefix.root))
    shown = [_with_rate(prefix, old, before, at_s) for prefix in found[:SHOWN_MAX]]
    return PrefixLook(at_s, tuple(shown), chunks, whole)


def _nodes(records: Iterable[Record], most: int) -> tuple[dict[bytes, _Node], int]:
    nodes: dict[bytes, _Node] = {}
    seen = 0
    for record in records:
        seen += 1
        if seen > most:
            break
        if not record.shards:
            continue
        nodes[record.prefix_hash] = _Node(
            record.parent_hash,
            record.token_end,
            record.token_end - record.token_start,
            record.hits,
            record.nbytes,
            record.touched_s,
        )
    return nodes, seen


def _hot(namespace: str, nodes: dict[bytes, _Node]) -> list[HotPrefix]:
    children: dict[bytes, list[bytes]] = {}
    roots = []
    for prefix_hash, node in nodes.items():
        if node.token_end == node.tokens:
            roots.append(prefix_hash)
        else:
            children.setdefault(node.parent, []).append(prefix_hash)
    return [_prefix(namespace, root, nodes, children) for root in roots]


def _prefix(
    namespace: str, root: bytes, nodes: dict[bytes, _Node], children: dict[bytes, list[bytes]]
) -> HotPrefix:
    first = nodes[root]
    tokens = nbytes = 0
    waiting, seen = [root], {root}
    while waiting:
        node = waiting.pop()
        tokens, nbytes = tokens + nodes[node].tokens, nbytes + nodes[node].nbytes
        below = [child for child in children.get(node, ()) if child not in seen]
        seen.update(below)  # a record with a wrong parent must not cause a loop
        waiting += below
    end, here = first.token_end, root
    while followers := children.get(here):
        best = max(followers, key=lambda child: nodes[child].hits)
        if nodes[best].hits < max(1, first.hits * _SHARED) or nodes[best].token_end <= end:
            break
        here, end = best, nodes[best].token_end
    return HotPrefix(namespace, root, first.hits, None, end, tokens, nbytes, first.touched_s)


def _with_rate(
    prefix: HotPrefix,
    old: dict[tuple[str, bytes], HotPrefix],
    before: PrefixLook | None,
    at_s: float,
) -> HotPrefix:
    earlier = old.get((prefix.namespace, prefix.root))
    if before is None or earlier is None or at_s <= before.at_s:
        return prefix
    rate = max(0, prefix.hits - earlier.hits) / (at_s - before.at_s)
    return replace(prefix, hits_per_s=rate)
