"""The tree of prefixes of an inventory, made on disk, level by level.

Records are not trusted: a chunk is a parent only if it ends where its child begins, which rules out
loops.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from objkv.ops.inventory.file import Inventory

T = TypeVar("T")
_CHUNKS = """
CREATE TEMP TABLE chunks (
  id INTEGER PRIMARY KEY, ns INTEGER, hash BLOB, parent BLOB, start INTEGER, ends INTEGER,
  payloads INTEGER, nbytes INTEGER, oldest_s INTEGER, newest_s INTEGER,
  hits INTEGER, touched_s INTEGER, pinned INTEGER, has_record INTEGER,
  up INTEGER, kids INTEGER DEFAULT 0, run INTEGER)
"""
_FILL = """
INSERT INTO temp.chunks (ns, hash, parent, start, ends, payloads, nbytes, oldest_s, newest_s,
  hits, touched_s, pinned, has_record)
SELECT p.ns, p.hash, max(r.parent), max(r.start), max(r.ends), count(*), sum(p.size),
  CAST(min(p.at_s) AS INTEGER), CAST(max(p.at_s) AS INTEGER),
  max(r.hits), max(r.touched_s), max(ifnull(r.pinned, 0), pin.hash IS NOT NULL),
  max(r.hash IS NOT NULL)
FROM (SELECT ns, hash, ifnull(nbytes, recorded) AS size, ifnull(modified_s, created_s) AS at_s
  FROM main.payloads WHERE {of} IS NOT NULL) p
LEFT JOIN main.chunks r ON r.ns = p.ns AND r.hash = p.hash
LEFT JOIN main.pins pin ON pin.ns = p.ns AND pin.hash = p.hash
GROUP BY p.ns, p.hash
"""
_PARENTS = """
UPDATE temp.chunks SET up = (
  SELECT p.id FROM temp.chunks p
  WHERE p.ns = chunks.ns AND p.hash = chunks.parent AND p.ends = chunks.start)
WHERE start > 0
"""
_KIDS = """
UPDATE temp.chunks SET kids = k.n
FROM (SELECT up AS parent_id, count(*) AS n FROM temp.chunks WHERE up IS NOT NULL GROUP BY up) k
WHERE k.parent_id = id
"""
_DOWN = """
UPDATE temp.chunks SET
  run = ifnull((SELECT p.run FROM temp.chunks p WHERE p.id = chunks.up AND p.kids = 1), id)
WHERE start = ?
"""
# Columns have the names of fields of ``Branch``.
_BRANCHES = """
CREATE TEMP TABLE branches (
  id INTEGER PRIMARY KEY, parent INTEGER, ns INTEGER, hash BLOB, first BLOB,
  token_start INTEGER, token_end INTEGER, chunks INTEGER, nbytes INTEGER, hits INTEGER,
  oldest_s INTEGER, newest_s INTEGER, pinned INTEGER,
  branches INTEGER DEFAULT 0, leaves INTEGER DEFAULT 1, tree_chunks INTEGER, tree_bytes INTEGER,
  tree_hits INTEGER, last_used_s INTEGER)
"""
_FILL_BRANCHES = """
INSERT INTO temp.branches (id, parent, ns, hash, first, token_start, token_end, chunks, nbytes,
  hits, oldest_s, newest_s, pinned, tree_chunks, tree_bytes, tree_hits, last_used_s)
SELECT g.run, (SELECT p.run FROM temp.chunks p WHERE p.id = h.up), g.ns,
  (SELECT l.hash FROM temp.chunks l WHERE l.run = g.run AND l.ends = g.ends), h.hash,
  g.start, g.ends, g.chunks, g.nbytes, g.hits_max, g.oldest_s, g.newest_s, g.pinned,
  g.chunks, g.nbytes, g.hits, g.touched_s
FROM (SELECT run, ns, min(start) AS start, max(ends) AS ends, count(*) AS chunks,
    sum(nbytes) AS nbytes, sum(hits) AS hits, max(hits) AS hits_max, max(touched_s) AS touched_s,
    min(oldest_s) AS oldest_s, max(newest_s) AS newest_s, min(pinned) AS pinned
  FROM temp.chunks WHERE run IS NOT NULL GROUP BY run) g JOIN temp.chunks h ON h.id = g.run
"""
_UP = """
UPDATE temp.branches SET
  (branches, leaves, tree_chunks, tree_bytes, tree_hits, last_used_s) = (
    SELECT count(*), max(1, ifnull(sum(c.leaves), 0)),
      branches.chunks + ifnull(sum(c.tree_chunks), 0),
      branches.nbytes + ifnull(sum(c.tree_bytes), 0),
      branches.tree_hits + ifnull(sum(c.tree_hits), 0),
      max(branches.last_used_s, ifnull(max(c.last_used_s), 0))
    FROM temp.branches c WHERE c.parent = branches.id)
WHERE token_start = ?
"""
_NEXT_START = "SELECT min(start) FROM temp.chunks WHERE start > ?"
_BEFORE = "SELECT max(token_start) FROM temp.branches WHERE token_start < ?"
_FIELDS = """
b.id, b.parent, n.name AS namespace, lower(hex(b.hash)) AS hash, lower(hex(b.first)) AS first,
b.token_start, b.token_end, b.chunks, b.nbytes, b.hits, b.oldest_s, b.newest_s, b.pinned,
b.branches, b.leaves, b.tree_chunks, b.tree_bytes, b.tree_hits,
nullif(b.last_used_s, 0) AS last_used_s
"""
# No branch has more bytes than what it continues, so a parent comes before its children.
_LARGEST = f"""
SELECT {_FIELDS} FROM temp.branches b JOIN main.namespaces n ON n.id = b.ns
ORDER BY b.tree_bytes DESC, b.token_start, b.id LIMIT ?
"""  # noqa: S608  # our own columns
# Deepest first: each branch is followed by those that continue it, the largest first. Without a
# limit SQLite would leave out the order, because what joins this need not keep it.
_CHAINS = """
WITH RECURSIVE chains (id, level, tree_bytes, first, root, token_start, chunks, nbytes, hits,
  oldest_s, newest_s, pinned) AS (
  SELECT b.id, 0, b.tree_bytes, b.first, b.first, b.token_start, b.chunks, b.nbytes, b.hits,
    b.oldest_s, b.newest_s, b.pinned
  FROM temp.branches b JOIN main.namespaces n ON n.id = b.ns
  WHERE n.name = ? AND b.parent IS NULL
  UNION ALL
  SELECT b.id, c.level + 1, b.tree_bytes, b.first, c.root, c.token_start, c.chunks + b.chunks,
    c.nbytes + b.nbytes, max(c.hits, b.hits), min(c.oldest_s, b.oldest_s),
    max(c.newest_s, b.newest_s), min(c.pinned, b.pinned)
  FROM chains c CROSS JOIN temp.branches b ON b.parent = c.id
  ORDER BY 2 DESC, 3 DESC, 4 LIMIT -1)
"""
_TREE = f"""{_CHAINS} SELECT {_FIELDS} FROM chains c CROSS JOIN temp.branches b ON b.id = c.id
CROSS JOIN main.namespaces n ON n.id = b.ns"""  # noqa: S608  # our own columns
_PREFIXES = f"""{_CHAINS}
SELECT n.name AS namespace, lower(hex(b.hash)) AS leaf, lower(hex(c.root)) AS root, c.token_start,
  b.token_end, c.chunks, c.nbytes, c.hits, c.oldest_s, c.newest_s, c.pinned
FROM chains c CROSS JOIN temp.branches b ON b.id = c.id
CROSS JOIN main.namespaces n ON n.id = b.ns WHERE b.branches = 0
"""  # noqa: S608  # our own columns
BRANCHES_MAX: Final = 2_000
"""Branches in an audit."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Chunks in a row, from one fork to the next. Hashes are in hex."""

    id: int
    parent: int | None
    """The branch that it continues; None for the beginning of a prefix."""
    namespace: str
    hash: str
    """Prefix hash of its last chunk, at which it forks or ends: its name, as for ``pin``."""
    first: str
    token_start: int
    """Above 0 without a parent, the first chunks are gone, and no reader can use it."""
    token_end: int
    chunks: int
    nbytes: int
    hits: int | None
    """Hits of its most used chunk: at least this many prompts passed through it."""
    oldest_s: int
    newest_s: int
    pinned: bool
    """Whether every chunk is pinned."""
    branches: int
    """Number of branches that continue it; 0 if it ends."""
    leaves: int
    """Ends of chains below it; 1 if it is an end itself."""
    tree_chunks: int
    """This and the following: of its own chunks and those of all branches that continue it."""
    tree_bytes: int
    tree_hits: int | None
    last_used_s: int | None


@dataclass(frozen=True, slots=True)
class PrefixSummary:
    """One stored chain of chunks, from its first stored chunk to a leaf. Hashes are in hex."""

    namespace: str
    leaf: str
    root: str
    """Prefix hash of the first chunk; chains with the same root share their first chunks."""
    token_start: int
    """0 unless the first chunks are gone; then no reader can use the chain."""
    token_end: int
    chunks: int
    nbytes: int
    """Bytes of the whole chain; shared chunks are counted in each chain."""
    hits: int | None
    """Hits of the most used chunk; None if the index counts none."""
    oldest_s: int
    newest_s: int
    pinned: bool
    """Whether every chunk is pinned."""


def make_tree(inventory: Inventory, of: Literal["nbytes", "recorded"]) -> None:
    """Make the tables ``chunks`` and ``branches`` of payloads (``nbytes``), or of records."""
    for step in (
        _CHUNKS,
        _FILL.format(of=of),
        "CREATE INDEX temp.by_hash ON chunks (ns, hash)",
        _PARENTS,
        "CREATE INDEX temp.by_up ON chunks (up) WHERE up IS NOT NULL",
        _KIDS,
        "CREATE INDEX temp.by_start ON chunks (start) WHERE start IS NOT NULL",
    ):
        inventory.run(step)
    _level_by_level(inventory, _DOWN, _NEXT_START, -1)
    for step in (
        "CREATE INDEX temp.by_run ON chunks (run, ends) WHERE run IS NOT NULL",
        _BRANCHES,
        _FILL_BRANCHES,
        "CREATE INDEX temp.branches_by_parent ON branches (parent)",
        "CREATE INDEX temp.branches_by_start ON branches (token_start)",
    ):
        inventory.run(step)
    _level_by_level(inventory, _UP, _BEFORE, 1 << 60)


def _level_by_level(inventory: Inventory, step: str, following: str, start: int) -> None:
    while (found := inventory.run(following, (start,))[0][0]) is not None:
        start = int(found)
        inventory.run(step, (start,))


def largest_branches(inventory: Inventory) -> tuple[Branch, ...]:
    """Return the ``BRANCHES_MAX`` largest branches, largest first with all that continues them. A
    branch's parent is always among them, and comes before it."""
    return tuple(_made(Branch, inventory.named(_LARGEST, (BRANCHES_MAX,))))


def branches(inventory: Inventory, namespace: str) -> Iterator[Branch]:
    """Yield all branches, each followed by those that continue it, the largest first."""
    return _made(Branch, inventory.named(_TREE, (namespace,)))


def prefixes(inventory: Inventory, namespace: str) -> Iterator[PrefixSummary]:
    """Yield all chains of chunks, in the order in which ``branches`` yields their last branches."""
    return _made(PrefixSummary, inventory.named(_PREFIXES, (namespace,)))


def _made(kind: type[T], rows: Iterator[dict[str, Any]]) -> Iterator[T]:
    return (kind(**(row | {"pinned": bool(row["pinned"])})) for row in rows)
