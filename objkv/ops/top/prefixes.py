"""The hottest prefixes, by the index: bounded, so that a look does not become the load."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from objkv.index.base import ReadIndex, Record
from objkv.index.shapes import is_shapes

RECORDS_MAX: Final = 50_000
"""Read at each look, of all namespaces together: about 20 MB, and some seconds of one Redis
connection."""
SHOWN_MAX: Final = 50
_SHARED = 0.5
"""A prefix goes on as long as so much of its first chunk's hits go on."""


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """One first chunk, and how far most of its hits go on alike."""

    namespace: str
    root: bytes
    """Prefix hash of the first chunk."""
    hits: int
    """Of the first chunk, since its record was made: every use of anything below counts there."""
    hits_per_s: float | None
    """Since the last look; None at the first."""
    shared_tokens: int
    """From the start to where fewer than half of the hits go on."""
    tokens: int
    """Stored below it, each chunk once."""
    nbytes: int
    touched_s: int
    """Seconds since the epoch of the last hit of the first chunk; 0 if never."""


@dataclass(frozen=True, slots=True)
class PrefixLook:
    """One look."""

    at_s: float
    prefixes: tuple[HotPrefix, ...]
    """Most hits first."""
    records: int
    """Chunks that were found."""
    whole: bool
    """Whether these were all: if not, there may be hotter ones."""


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
    """Read at most ``records_max`` records. ``before`` is the last look, for rates. Raises
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
        if not record.shards or is_shapes(record):
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
        seen.update(below)  # a record that lies about its parent makes no loop
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
