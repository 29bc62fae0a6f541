"""The tree of prefixes of an inventory: chunks in a row are one node, from one fork to the next.

It is made on disk, level by level, never with a tree in memory. Records are not trusted: a chunk is
a parent only if it ends where its child begins, which rules out loops. A node is named by the
prefix hash of its last chunk, which is what ``show`` and ``pin`` take.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from objkv.ops.inventory.file import Inventory

_CHUNKS = """
CREATE TEMP TABLE chunks (
  id INTEGER PRIMARY KEY, ns INTEGER, hash BLOB, parent BLOB, start INTEGER, ends INTEGER,
  payloads INTEGER, nbytes INTEGER, oldest_s INTEGER, newest_s INTEGER,
  raw_bytes INTEGER, recorded_bytes INTEGER, hot_payloads INTEGER, hot_bytes INTEGER,
  hits INTEGER, touched_s INTEGER, pinned INTEGER, has_record INTEGER,
  up INTEGER, kids INTEGER DEFAULT 0, root INTEGER, run INTEGER)
"""
_FILL = """
INSERT INTO temp.chunks (ns, hash, parent, start, ends, payloads, nbytes, oldest_s, newest_s,
  raw_bytes, recorded_bytes, hot_payloads, hot_bytes, hits, touched_s, pinned,
  has_record)
SELECT p.ns, p.hash, max(r.parent), max(r.start), max(r.ends), count(*), sum(p.size),
  CAST(min(p.at_s) AS INTEGER), CAST(max(p.at_s) AS INTEGER), sum(p.raw_bytes),
  sum(CASE WHEN p.raw_bytes IS NOT NULL THEN p.size END), ifnull(sum(p.hot), 0),
  ifnull(sum(p.hot * p.size), 0),
  max(r.hits), max(r.touched_s), ifnull(max(r.pinned), 0), max(r.hash IS NOT NULL)
FROM (SELECT ns, hash, ifnull(nbytes, recorded) AS size, ifnull(modified_s, created_s) AS at_s,
    CASE WHEN recorded IS NOT NULL THEN raw_bytes END AS raw_bytes,
    CASE WHEN recorded IS NOT NULL THEN hot END AS hot
  FROM main.payloads WHERE {of} IS NOT NULL) p
LEFT JOIN main.chunks r ON r.ns = p.ns AND r.hash = p.hash
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
  root = ifnull((SELECT p.root FROM temp.chunks p WHERE p.id = chunks.up), id),
  run = ifnull((SELECT p.run FROM temp.chunks p WHERE p.id = chunks.up AND p.kids = 1), id)
WHERE start = ?
"""
_NODES = """
CREATE TEMP TABLE nodes (
  id INTEGER PRIMARY KEY, ns INTEGER, up INTEGER, head BLOB, last BLOB, start INTEGER, ends INTEGER,
  first INTEGER, chunks INTEGER, nbytes INTEGER, hits INTEGER, hits_max INTEGER, touched_s INTEGER,
  oldest_s INTEGER, newest_s INTEGER, pinned INTEGER, kids INTEGER DEFAULT 0,
  leaves INTEGER DEFAULT 1, all_ends INTEGER, all_chunks INTEGER, all_nbytes INTEGER,
  all_hits INTEGER, all_hits_max INTEGER, all_touched_s INTEGER, all_newest_s INTEGER)
"""
_FILL_NODES = """
INSERT INTO temp.nodes (id, ns, up, head, last, start, ends, first, chunks, nbytes, hits, hits_max,
  touched_s, oldest_s, newest_s, pinned, all_ends, all_chunks, all_nbytes, all_hits, all_hits_max,
  all_touched_s, all_newest_s)
SELECT g.run, g.ns, (SELECT p.run FROM temp.chunks p WHERE p.id = h.up), h.hash,
  (SELECT l.hash FROM temp.chunks l WHERE l.run = g.run AND l.ends = g.ends),
  g.start, g.ends, g.first, g.chunks, g.nbytes, g.hits, g.hits_max, g.touched_s,
  g.oldest_s, g.newest_s, g.pinned, g.ends, g.chunks, g.nbytes, g.hits, g.hits_max, g.touched_s,
  g.newest_s
FROM (SELECT run, ns, min(start) AS start, max(ends) AS ends, min(ends - start) AS first,
    count(*) AS chunks, sum(nbytes) AS nbytes, sum(hits) AS hits, max(hits) AS hits_max,
    max(touched_s) AS touched_s, min(oldest_s) AS oldest_s, max(newest_s) AS newest_s,
    min(pinned) AS pinned
  FROM temp.chunks WHERE run IS NOT NULL GROUP BY run) g JOIN temp.chunks h ON h.id = g.run
"""
_UP = """
UPDATE temp.nodes SET
  (kids, leaves, all_ends, all_chunks, all_nbytes, all_hits, all_hits_max, all_touched_s,
    all_newest_s) = (
    SELECT count(*), max(1, ifnull(sum(c.leaves), 0)), max(nodes.ends, ifnull(max(c.all_ends), 0)),
      nodes.chunks + ifnull(sum(c.all_chunks), 0), nodes.nbytes + ifnull(sum(c.all_nbytes), 0),
      nodes.hits + ifnull(sum(c.all_hits), 0),
      max(nodes.hits_max, ifnull(max(c.all_hits_max), 0)),
      max(nodes.touched_s, ifnull(max(c.all_touched_s), 0)),
      max(nodes.newest_s, ifnull(max(c.all_newest_s), 0))
    FROM temp.nodes c WHERE c.up = nodes.id)
WHERE start = ?
"""
_NEXT_START = "SELECT min(start) FROM temp.chunks WHERE start > ?"
_BEFORE = "SELECT max(start) FROM temp.nodes WHERE start < ?"


def make_tree(inventory: Inventory, of: Literal["nbytes", "recorded"]) -> None:
    """Fill the temporary tables ``chunks`` and ``nodes``: of the payloads in the bucket
    (``nbytes``), or of the records (``recorded``)."""
    inventory.run("DROP TABLE IF EXISTS temp.chunks")
    inventory.run("DROP TABLE IF EXISTS temp.nodes")
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
        _NODES,
        _FILL_NODES,
        "CREATE INDEX temp.nodes_by_up ON nodes (up, all_nbytes)",
        "CREATE INDEX temp.nodes_by_start ON nodes (start)",
    ):
        inventory.run(step)
    _level_by_level(inventory, _UP, _BEFORE, 1 << 60)
    inventory.run("CREATE INDEX temp.nodes_by_size ON nodes (all_nbytes DESC, start)")


def _level_by_level(inventory: Inventory, step: str, following: str, start: int) -> None:
    while (found := inventory.some(following, (start,))[0][0]) is not None:
        start = int(found)
        inventory.run(step, (start,))


@dataclass(frozen=True, slots=True)
class Branch:
    """Chunks in a row, from one fork to the next."""

    first: bytes
    """Prefix hash of its first chunk."""
    last: bytes
    """Prefix hash of its last chunk, at which it forks or ends: the name of the branch."""
    level: int
    """Number of forks above it."""
    is_last: bool
    """Whether it is the last branch of its fork."""
    token_start: int
    """More than 0 at level 0 only if the first chunks are gone; then no reader can use it."""
    token_end: int
    chunks: int
    nbytes: int
    branches: int
    """Number of branches that continue it; 0 if it ends."""
    tree_chunks: int
    """Its own chunks and those of all branches that continue it."""
    tree_bytes: int
    leaves: int
    """Ends of chains below it; 1 if it is an end itself."""
    hits: int
    """Hits of the most used chunk."""
    oldest_s: int
    newest_s: int
    pinned: bool
    """Whether every chunk is pinned."""


@dataclass(frozen=True, slots=True)
class PrefixSummary:
    """One stored chain of chunks, from its first stored chunk to a leaf."""

    leaf: bytes
    """Prefix hash of the last chunk."""
    root: bytes
    """Prefix hash of the first chunk; chains with the same root share their first chunks."""
    token_start: int
    """0 unless the first chunks are gone; then no reader can use the chain."""
    token_end: int
    chunks: int
    nbytes: int
    """Bytes of the whole chain; shared chunks are counted in each chain."""
    oldest_s: int
    newest_s: int
    hits: int
    """Hits of the most used chunk."""
    pinned: bool
    """Whether every chunk is pinned."""


_BRANCHES = """
SELECT id, head AS first, last, start AS token_start, ends AS token_end, chunks, nbytes,
  kids AS branches, all_chunks AS tree_chunks, all_nbytes AS tree_bytes, leaves,
  ifnull(hits_max, 0) AS hits, oldest_s, newest_s, pinned
FROM temp.nodes WHERE ns = ? AND up IS ? ORDER BY all_nbytes DESC, head LIMIT ? OFFSET ?
"""
_AT_ONCE = 200


def branches(inventory: Inventory, namespace: str) -> Iterator[Branch]:
    """Yield all branches, each followed by those that continue it, largest first at each level.

    In the memory of a few hundred branches for each level of forks.
    """
    ns = inventory.namespace(namespace)
    left = [_siblings(inventory, ns, None)]
    while left:
        found = next(left[-1], None)
        if found is None:
            left.pop()
            continue
        row, is_last = found
        node, pinned = row.pop("id"), bool(row.pop("pinned"))
        yield Branch(**row, level=len(left) - 1, is_last=is_last, pinned=pinned)
        if row["branches"]:
            left.append(_siblings(inventory, ns, node))


def _siblings(
    inventory: Inventory, ns: int, up: int | None
) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield the nodes that continue ``up``, and whether each is the last one."""
    start, before = 0, None
    while rows := list(inventory.named(_BRANCHES, (ns, up, _AT_ONCE, start))):
        for row in rows:
            if before is not None:
                yield before, False
            before = row
        start += len(rows)
    if before is not None:
        yield before, True


def prefixes(inventory: Inventory, namespace: str) -> Iterator[PrefixSummary]:
    """Yield all chains of chunks, in the order in which ``branches`` yields their last branches."""
    above: list[PrefixSummary] = []
    for branch in branches(inventory, namespace):
        del above[branch.level :]
        chain = _continued(above[-1] if above else None, branch)
        above.append(chain)
        if not branch.branches:
            yield chain


def _continued(above: PrefixSummary | None, branch: Branch) -> PrefixSummary:
    return PrefixSummary(
        leaf=branch.last,
        root=branch.first if above is None else above.root,
        token_start=branch.token_start if above is None else above.token_start,
        token_end=branch.token_end,
        chunks=branch.chunks + (above.chunks if above else 0),
        nbytes=branch.nbytes + (above.nbytes if above else 0),
        oldest_s=min(branch.oldest_s, above.oldest_s if above else branch.oldest_s),
        newest_s=max(branch.newest_s, above.newest_s if above else 0),
        hits=max(branch.hits, above.hits if above else 0),
        pinned=branch.pinned and (above is None or above.pinned),
    )


NODES_MAX = 2_000
NAMESPACES_MAX = 500
"""Namespaces in the tree. Smaller ones are only in the tables."""
_LARGEST = """
SELECT n.id, n.up, n.ns, n.kids FROM temp.nodes n
JOIN temp.shown_ns s USING (ns) ORDER BY n.all_nbytes DESC, n.start LIMIT ?
"""
# Columns have the names of fields of ``TreeNode`` and ``RootAudit``; the reader pops the others.
_SHOWN = """
SELECT n.id AS node, n.up, n.ns, n.head, n.last, n.start / n.first AS depth,
  n.start AS token_start, n.ends AS token_end, n.chunks, n.nbytes, n.hits, n.hits_max,
  nullif(n.touched_s, 0) AS last_used_s, n.newest_s, n.leaves, n.kids AS children
FROM temp.shown s JOIN temp.nodes n USING (id) ORDER BY n.start, n.all_nbytes DESC, n.id
"""
_FOLDED = """
SELECT n.up, n.ns, count(*) AS folded, min(n.start) / min(n.first) AS depth,
  min(n.start) AS token_start, max(n.all_ends) AS token_end, sum(n.all_chunks) AS chunks,
  sum(n.all_nbytes) AS nbytes, sum(n.all_hits) AS hits, max(n.all_hits_max) AS hits_max,
  nullif(max(n.all_touched_s), 0) AS last_used_s, max(n.all_newest_s) AS newest_s,
  sum(n.leaves) AS leaves
FROM temp.nodes n JOIN temp.shown_ns USING (ns)
WHERE n.id NOT IN (SELECT id FROM temp.shown)
  AND (n.up IS NULL OR n.up IN (SELECT id FROM temp.shown))
GROUP BY n.up, n.ns
"""
_ROOTS = """
SELECT c.ns, n.head, n.last, n.start AS token_start, max(c.ends) AS token_end_max,
  count(*) AS chunks, sum(c.nbytes) AS nbytes, n.chunks AS shared_chunks,
  n.ends - n.start AS shared_tokens, sum(c.kids > 1) AS branches, sum(c.kids = 0) AS leaves,
  (max(c.ends) - n.start) / n.first AS depth_max, sum(c.hits) AS hits, max(c.hits) AS hits_max,
  sum(c.hits > 0) AS used_chunks, total(c.hits * c.nbytes) / sum(c.nbytes) AS reuse,
  min(c.oldest_s) AS oldest_s, max(c.newest_s) AS newest_s,
  nullif(max(c.touched_s), 0) AS last_used_s
FROM temp.chunks c JOIN temp.nodes n ON n.id = c.root
WHERE c.root IS NOT NULL GROUP BY c.root ORDER BY sum(c.nbytes) DESC, c.root LIMIT ?
"""
_HITS = ("hits", "hits_max", "used_chunks", "reuse")
NodeKind = Literal["chunks", "other"]


@dataclass(frozen=True, slots=True)
class RootAudit:
    """The first branch of a prefix and all chunks that continue it."""

    namespace: str
    tenant: str | None
    hash: str
    """Prefix hash of the last chunk that all prompts below share, hex: the name of the branch, as
    ``ls --tree`` has it."""
    first: str
    """Prefix hash of the first stored chunk, hex."""
    token_start: int
    """0, or more if the first chunks are gone; then no reader can use the rest."""
    token_end_max: int
    """Token at which the longest chain ends."""
    chunks: int
    nbytes: int
    shared_chunks: int
    """Chunks from the root to the first branch, which all prompts below share."""
    shared_tokens: int
    """Tokens of these chunks."""
    branches: int
    """Chunks with more than one stored continuation."""
    leaves: int
    """Ends of chains; at least this many different prompts were saved."""
    depth_max: int
    """Chunks of the longest chain."""
    hits: int | None
    """Hits of all chunks."""
    hits_max: int | None
    """Hits of the most used chunk."""
    used_chunks: int | None
    """Chunks that were hit at least once."""
    reuse: float | None
    """Bytes loaded by hits per byte stored; 1 means that each byte was loaded once on average."""
    oldest_s: int | None
    newest_s: int | None
    last_used_s: int | None
    label: str | None
    """First words of its text, if texts were requested and token ids are stored."""


@dataclass(frozen=True, slots=True)
class TreeNode:
    """Successive chunks without a branch between them, or small siblings folded into one node.

    A node's numbers exclude its children, except that a folded node covers everything below it.
    """

    id: int
    """Unique; a parent's id is lower than its children's."""
    parent: int | None
    """None for the root of a tree."""
    kind: NodeKind
    """``other`` for smaller siblings and everything below them, folded into one node."""
    namespace: str
    hash: str
    """Prefix hash of the node's last chunk, hex; empty for ``other``."""
    depth: int
    """Chunks before the node in its chain; for ``other``, chunks before its folded nodes."""
    token_start: int
    token_end: int
    """End of the node's tokens; for ``other``, the end of the longest folded chain."""
    chunks: int
    nbytes: int
    hits: int | None
    """Hits of all its chunks."""
    hits_max: int | None
    """Hits of its most used chunk: at least this many prompts passed through the node."""
    last_used_s: int | None
    newest_s: int | None
    leaves: int
    """Ends of chains at the node and below it."""
    children: int
    """Continuations, shown or folded; 0 for a leaf and for ``other``."""
    folded: int
    """Number of siblings that an ``other`` node replaces; else 0."""
    label: str | None
    """A short name for people."""
    text: str | None
    """First words of its text, redacted unless requested; None if unavailable."""


@dataclass(frozen=True, slots=True)
class Tree:
    """The nodes, and the first chunk of each."""

    nodes: tuple[TreeNode, ...]
    heads: Mapping[int, tuple[str, bytes]]
    """Namespace and hash of each node's first chunk, by node id."""
    namespaces_omitted: int


def read_roots(
    inventory: Inventory, tenants: Mapping[str, str | None], *, most: int, has_index: bool
) -> tuple[RootAudit, ...]:
    """Return the ``most`` largest roots, largest first. ``tenants``: by namespace."""
    names = inventory.names()
    roots = []
    for row in inventory.named(_ROOTS, (most,)):
        name, head, last = names[row.pop("ns")], row.pop("head"), row.pop("last")
        if not has_index or row["hits"] is None:
            row |= dict.fromkeys(_HITS)
        tenant = tenants.get(name)
        roots.append(RootAudit(name, tenant, last.hex(), head.hex(), **row, label=None))
    return tuple(roots)


def read_tree(inventory: Inventory) -> Tree:
    """Return at most ``NODES_MAX`` nodes: the largest with everything below them, others folded.

    A node's parent is always among them.
    """
    for table in ("shown", "shown_ns"):
        inventory.run(f"DROP TABLE IF EXISTS temp.{table}")
    inventory.run("CREATE TEMP TABLE shown_ns (ns INTEGER PRIMARY KEY)")
    inventory.run(
        "INSERT INTO temp.shown_ns SELECT ns FROM temp.nodes WHERE up IS NULL"
        " GROUP BY ns ORDER BY sum(all_nbytes) DESC, ns LIMIT ?",
        (NAMESPACES_MAX,),
    )
    left = inventory.some("SELECT count(DISTINCT ns) FROM temp.nodes WHERE up IS NULL")[0][0]
    largest = inventory.some(_LARGEST, (NODES_MAX,))
    begun = "SELECT ns, count(*) FROM temp.nodes WHERE up IS NULL GROUP BY ns"
    fits = _how_many_fit(largest, Counter(dict(inventory.rows(begun))))
    inventory.run("CREATE TEMP TABLE shown (id INTEGER PRIMARY KEY)")
    for row in largest[:fits]:
        inventory.run("INSERT INTO temp.shown VALUES (?)", (row[0],))
    nodes, heads = _shown_nodes(inventory)
    return Tree(nodes, heads, max(0, left - NAMESPACES_MAX))


def _how_many_fit(largest: list[tuple[Any, ...]], roots: Counter[int]) -> int:
    """Return how many of these nodes fit together with the nodes for their folded siblings.

    ``largest``: ``(id, parent, namespace, children)``.
    """
    hidden: Counter[tuple[str, int]] = Counter(
        {("roots", ns): count for ns, count in roots.most_common(NAMESPACES_MAX)}
    )
    others, best = len(hidden), 0
    for count, (node, up, ns, kids) in enumerate(largest, 1):
        above = ("roots", ns) if up is None else ("kids", up)
        hidden[above] -= 1
        others -= hidden[above] == 0
        hidden["kids", node] = kids
        others += kids > 0
        if count + others <= NODES_MAX:
            best = count
    return best


def _shown_nodes(
    inventory: Inventory,
) -> tuple[tuple[TreeNode, ...], dict[int, tuple[str, bytes]]]:
    names = inventory.names()
    nodes: list[TreeNode] = []
    heads: dict[int, tuple[str, bytes]] = {}
    numbers: dict[int, int] = {}
    for row in inventory.named(_SHOWN):
        node, up, ns, head, last = (row.pop(n) for n in ("node", "up", "ns", "head", "last"))
        number = numbers[node] = len(nodes)
        heads[number] = names[ns], head
        parent = None if up is None else numbers[up]
        label = last.hex()[:8]
        nodes.append(
            TreeNode(
                number, parent, "chunks", names[ns], last.hex(), **row, folded=0, label=label,
                text=None,
            )
        )  # fmt: skip
    for row in inventory.named(_FOLDED):
        up, ns = row.pop("up"), row.pop("ns")
        parent = None if up is None else numbers[up]
        label = f"{row['folded']:,} smaller"
        nodes.append(
            TreeNode(
                len(nodes), parent, "other", names[ns], "", **row, children=0, label=label,
                text=None,
            )
        )  # fmt: skip
    return tuple(nodes), heads
