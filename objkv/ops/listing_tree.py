"""The prefixes of a namespace as a tree: what they share is one branch, where they part it forks.

Holds every record of the namespace in memory, about 1 KiB each.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from objkv.index.base import ReadIndex, Record
from objkv.index.shapes import is_shapes


@dataclass(frozen=True, slots=True)
class Branch:
    """Chunks in a row, from one fork to the next."""

    first: bytes
    """Prefix hash of its first chunk."""
    last: bytes
    """Prefix hash of its last chunk; where it forks or ends."""
    level: int
    """Forks above it."""
    is_last: bool
    """Whether no other branch of the same fork follows it."""
    token_start: int
    """Of a branch of level 0 more than 0 only if the beginning is gone: nobody can use it then."""
    token_end: int
    chunks: int
    nbytes: int
    branches: int
    """Into how many it forks; 0 if it ends."""
    tree_chunks: int
    """Its own, and those of all that continue it."""
    tree_bytes: int
    leaves: int
    """Ends below it; 1 if it is one itself."""
    hits: int
    """Of the chunk that was hit most."""
    newest_s: int
    pinned: bool
    """Whether every chunk is pinned."""


@dataclass(slots=True)
class _Run:
    records: list[Record]
    children: list["_Run"]
    tree_chunks: int = 0
    tree_bytes: int = 0
    leaves: int = 0


def list_tree(index: ReadIndex, namespace: str) -> list[Branch]:
    """All branches, each followed by those that continue it; the largest first everywhere."""
    roots, children = _linked(index.scan(namespace))
    runs = [_run(root, children) for root in roots]
    for run in runs:
        _add_up(run)
    return list(_told(runs))


def _linked(
    scanned: Iterable[Record],
) -> tuple[list[Record], defaultdict[bytes, list[Record]]]:
    """The records that continue none, and those that continue each."""
    records = {r.prefix_hash: r for r in scanned if r.shards and not is_shapes(r)}
    roots: list[Record] = []
    children: defaultdict[bytes, list[Record]] = defaultdict(list)
    for record in records.values():
        parent = records.get(record.parent_hash)
        # A child starts where its parent ends, and is longer: a record that lies makes no loop.
        is_child = parent is not None and parent.token_end == record.token_start
        if is_child and record.token_end > record.token_start:
            children[record.parent_hash].append(record)
        else:
            roots.append(record)
    return roots, children


def _run(first: Record, children: defaultdict[bytes, list[Record]]) -> _Run:
    """The branches that begin with ``first``; without recursion, as prompts may have thousands of
    forks below each other."""
    top = _Run([first], [])
    left = [top]
    while left:
        run = left.pop()
        while len(following := children[run.records[-1].prefix_hash]) == 1:
            run.records.append(following[0])
        run.children = [_Run([record], []) for record in following]
        left += run.children
    return top


def _add_up(top: _Run) -> None:
    every, left = [], [top]
    while left:
        every.append(run := left.pop())
        left += run.children
    for run in reversed(every):  # children before their parents
        run.tree_chunks = len(run.records) + sum(child.tree_chunks for child in run.children)
        own = sum(record.nbytes for record in run.records)
        run.tree_bytes = own + sum(child.tree_bytes for child in run.children)
        run.leaves = sum(child.leaves for child in run.children) or 1
        run.children.sort(key=_largest_first)


def _largest_first(run: _Run) -> tuple[int, bytes]:
    return -run.tree_bytes, run.records[0].prefix_hash


def _told(runs: list[_Run]) -> Iterator[Branch]:
    left = [(run, 0, not place) for place, run in enumerate(sorted(runs, key=_largest_first)[::-1])]
    while left:
        run, level, is_last = left.pop()
        yield _branch(run, level, is_last)
        backwards = run.children[::-1]
        left += [(child, level + 1, not place) for place, child in enumerate(backwards)]


def _branch(run: _Run, level: int, is_last: bool) -> Branch:
    records = run.records
    return Branch(
        first=records[0].prefix_hash,
        last=records[-1].prefix_hash,
        level=level,
        is_last=is_last,
        token_start=records[0].token_start,
        token_end=records[-1].token_end,
        chunks=len(records),
        nbytes=sum(record.nbytes for record in records),
        branches=len(run.children),
        tree_chunks=run.tree_chunks,
        tree_bytes=run.tree_bytes,
        leaves=run.leaves,
        hits=max(record.hits for record in records),
        newest_s=max(shard.created_s for r in records for shard in r.shards.values()),
        pinned=all(record.pinned for record in records),
    )
