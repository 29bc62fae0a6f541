"""The prefix tree of an audit: the largest roots, and as many nodes as a page can show."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from objkv.ops.audit.figures import namespace_names
from objkv.ops.audit.report import RootAudit, TreeNode
from objkv.ops.audit.spool import AuditSpool

NODES_MAX = 2_000
NAMESPACES_MAX = 500
"""Namespaces in the tree. Smaller ones are only in the tables."""
_LARGEST = """
SELECT n.id, n.up, n.ns, n.kids FROM temp.nodes n
JOIN temp.shown_ns s USING (ns) ORDER BY n.all_nbytes DESC, n.start LIMIT ?
"""
# Columns have the names of fields of ``TreeNode`` and ``RootAudit``; the reader pops the others.
_SHOWN = """
SELECT n.id AS node, n.up, n.ns, h.hash AS head,
  (SELECT l.hash FROM temp.chunks l WHERE l.run = n.id AND l.ends = n.ends) AS last,
  n.start / n.first AS depth, n.start AS token_start, n.ends AS token_end, n.chunks, n.nbytes,
  n.hits, n.hits_max, nullif(n.touched_s, 0) AS last_used_s, n.newest_s, n.leaves,
  n.kids AS children
FROM temp.shown s JOIN temp.nodes n USING (id) JOIN temp.chunks h ON h.id = n.id
ORDER BY n.start, n.all_nbytes DESC, n.id
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
SELECT c.ns, h.hash, h.start AS token_start, max(c.ends) AS token_end_max, count(*) AS chunks,
  sum(c.nbytes) AS nbytes, n.chunks AS shared_chunks, n.ends - n.start AS shared_tokens,
  sum(c.kids > 1) AS branches, sum(c.kids = 0) AS leaves,
  (max(c.ends) - h.start) / (h.ends - h.start) AS depth_max, sum(c.hits) AS hits,
  max(c.hits) AS hits_max, sum(c.hits > 0) AS used_chunks,
  total(c.hits * c.nbytes) / sum(c.nbytes) AS reuse, min(c.oldest_s) AS oldest_s,
  max(c.newest_s) AS newest_s, nullif(max(c.touched_s), 0) AS last_used_s
FROM temp.chunks c JOIN temp.chunks h ON h.id = c.root JOIN temp.nodes n ON n.id = c.root
WHERE c.root IS NOT NULL GROUP BY c.root ORDER BY sum(c.nbytes) DESC, c.root LIMIT ?
"""
_HITS = ("hits", "hits_max", "used_chunks", "reuse")


@dataclass(frozen=True, slots=True)
class Tree:
    """The nodes, and the first chunk of each."""

    nodes: tuple[TreeNode, ...]
    heads: Mapping[int, tuple[str, bytes]]
    """Namespace and hash of each node's first chunk, by node id."""
    namespaces_omitted: int


def read_roots(
    spool: AuditSpool, tenants: Mapping[str, str | None], *, most: int, has_index: bool
) -> tuple[RootAudit, ...]:
    """Return the ``most`` largest roots, largest first. ``tenants``: by namespace."""
    names = namespace_names(spool)
    roots = []
    for row in spool.named(_ROOTS, (most,)):
        name, prefix_hash = names[row.pop("ns")], row.pop("hash")
        if not has_index or row["hits"] is None:
            row |= dict.fromkeys(_HITS)
        tenant = tenants.get(name)
        roots.append(RootAudit(name, tenant, prefix_hash.hex(), **row, label=None))
    return tuple(roots)


def read_tree(spool: AuditSpool) -> Tree:
    """Return at most ``NODES_MAX`` nodes: the largest with everything below them, others folded.

    A node's parent is always among them.
    """
    for table in ("shown", "shown_ns"):
        spool.run(f"DROP TABLE IF EXISTS temp.{table}")
    spool.run("CREATE TEMP TABLE shown_ns (ns INTEGER PRIMARY KEY)")
    spool.run(
        "INSERT INTO temp.shown_ns SELECT ns FROM temp.nodes WHERE up IS NULL"
        " GROUP BY ns ORDER BY sum(all_nbytes) DESC, ns LIMIT ?",
        (NAMESPACES_MAX,),
    )
    left = spool.some("SELECT count(DISTINCT ns) FROM temp.nodes WHERE up IS NULL")[0][0]
    largest = spool.some(_LARGEST, (NODES_MAX,))
    begun = "SELECT ns, count(*) FROM temp.nodes WHERE up IS NULL GROUP BY ns"
    fits = _how_many_fit(largest, Counter(dict(spool.rows(begun))))
    spool.run("CREATE TEMP TABLE shown (id INTEGER PRIMARY KEY)")
    for row in largest[:fits]:
        spool.run("INSERT INTO temp.shown VALUES (?)", (row[0],))
    nodes, heads = _shown_nodes(spool)
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


def _shown_nodes(spool: AuditSpool) -> tuple[tuple[TreeNode, ...], dict[int, tuple[str, bytes]]]:
    names = namespace_names(spool)
    nodes: list[TreeNode] = []
    heads: dict[int, tuple[str, bytes]] = {}
    numbers: dict[int, int] = {}
    for row in spool.named(_SHOWN):
        node, up, ns, head, last = (row.pop(n) for n in ("node", "up", "ns", "head", "last"))
        number = numbers[node] = len(nodes)
        heads[number] = names[ns], head
        parent = None if up is None else numbers[up]
        label = head.hex()[:8]
        nodes.append(
            TreeNode(
                number, parent, "chunks", names[ns], last.hex(), **row, folded=0, label=label,
                text=None,
            )
        )  # fmt: skip
    for row in spool.named(_FOLDED):
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
