"""The prefix tree of an audit: the largest roots, and so many nodes that a page can show them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from objkv.ops.audit.figures import namespace_names
from objkv.ops.audit.report import RootAudit, TreeNode
from objkv.ops.audit.spool import AuditSpool

NODES_MAX = 2_000
NAMESPACES_MAX = 500
"""Of which the tree shows something; the smaller ones have their figures in tables only."""
_LARGEST = """
SELECT n.id, n.up, n.ns, n.kids FROM temp.nodes n
JOIN temp.shown_ns s USING (ns) ORDER BY n.all_nbytes DESC, n.start LIMIT ?
"""
_SHOWN = """
SELECT n.id, n.up, n.ns, n.start, n.ends, n.first, n.chunks, n.nbytes, n.hits, n.hits_max,
  n.touched_s, n.newest_s, n.leaves, n.kids, h.hash,
  (SELECT l.hash FROM temp.chunks l WHERE l.run = n.id AND l.ends = n.ends)
FROM temp.shown s JOIN temp.nodes n USING (id) JOIN temp.chunks h ON h.id = n.id
ORDER BY n.start, n.all_nbytes DESC, n.id
"""
_FOLDED = """
SELECT n.up, n.ns, count(*), min(n.start), min(n.first), max(n.all_ends), sum(n.all_chunks),
  sum(n.all_nbytes), sum(n.all_hits), max(n.all_hits_max), max(n.all_touched_s),
  max(n.all_newest_s), sum(n.leaves)
FROM temp.nodes n JOIN temp.shown_ns USING (ns)
WHERE n.id NOT IN (SELECT id FROM temp.shown)
  AND (n.up IS NULL OR n.up IN (SELECT id FROM temp.shown))
GROUP BY n.up, n.ns
"""
_ROOTS = """
SELECT c.root, c.ns, h.hash, h.start, max(c.ends), count(*), sum(c.nbytes), n.chunks,
  n.ends - n.start, sum(c.kids > 1), sum(c.kids = 0),
  (max(c.ends) - h.start) / (h.ends - h.start), sum(c.hits), max(c.hits), sum(c.hits > 0),
  total(c.hits * c.nbytes) / sum(c.nbytes), min(c.oldest_s), max(c.newest_s), max(c.touched_s)
FROM temp.chunks c JOIN temp.chunks h ON h.id = c.root JOIN temp.nodes n ON n.id = c.root
WHERE c.root IS NOT NULL GROUP BY c.root ORDER BY sum(c.nbytes) DESC, c.root LIMIT ?
"""


@dataclass(frozen=True, slots=True)
class Tree:
    """The nodes, and which chunk each of them begins with."""

    nodes: tuple[TreeNode, ...]
    heads: Mapping[int, tuple[str, bytes]]
    """By node, the namespace and the hash of its first chunk."""
    namespaces_omitted: int


def read_roots(
    spool: AuditSpool, tenants: Mapping[str, str | None], *, most: int, has_index: bool
) -> tuple[RootAudit, ...]:
    """The largest, largest first. ``tenants``: by namespace."""
    names = namespace_names(spool)
    roots = []
    for row in spool.rows(_ROOTS, (most,)):
        _, ns, prefix_hash, *numbers = row
        start, ends, chunks, nbytes, shared, shared_tokens, branches, leaves, depth = numbers[:9]
        hits, hits_max, used, reuse, oldest_s, newest_s, touched_s = numbers[9:]
        has_hits = has_index and hits is not None
        roots.append(
            RootAudit(
                namespace=names[ns],
                tenant=tenants.get(names[ns]),
                hash=prefix_hash.hex(),
                token_start=start,
                token_end_max=ends,
                chunks=chunks,
                nbytes=nbytes,
                shared_chunks=shared,
                shared_tokens=shared_tokens,
                branches=branches,
                leaves=leaves,
                depth_max=depth,
                hits=hits if has_hits else None,
                hits_max=hits_max if has_hits else None,
                used_chunks=used if has_hits else None,
                reuse=reuse if has_hits else None,
                oldest_s=oldest_s,
                newest_s=newest_s,
                last_used_s=touched_s or None,
                label=None,
            )
        )
    return tuple(roots)


def read_tree(spool: AuditSpool) -> Tree:
    """At most ``NODES_MAX`` nodes: those with most below them, so that a node's parent is always
    among them, and the rest folded."""
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
    """Of these nodes, each ``(id, parent, namespace, children)``, the most for which there is room
    together with what stands for their folded siblings."""
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
    for row in spool.rows(_SHOWN):
        node, up, ns, start, ends, length, *rest = row
        chunks, nbytes, hits, hits_max, touched_s, newest_s, leaves, kids, head, last = rest
        number = numbers[node] = len(nodes)
        heads[number] = (names[ns], head)
        nodes.append(
            TreeNode(
                id=number,
                parent=None if up is None else numbers[up],
                kind="chunks",
                namespace=names[ns],
                hash=last.hex(),
                depth=start // length,
                token_start=start,
                token_end=ends,
                chunks=chunks,
                nbytes=nbytes,
                hits=hits,
                hits_max=hits_max,
                last_used_s=touched_s or None,
                newest_s=newest_s,
                leaves=leaves,
                children=kids,
                folded=0,
                label=head.hex()[:8],
                text=None,
            )
        )
    for up, ns, count, start, length, ends, chunks, nbytes, *rest in spool.rows(_FOLDED):
        hits, hits_max, touched_s, newest_s, leaves = rest
        nodes.append(
            TreeNode(
                id=len(nodes),
                parent=None if up is None else numbers[up],
                kind="other",
                namespace=names[ns],
                hash="",
                depth=start // length,
                token_start=start,
                token_end=ends,
                chunks=chunks,
                nbytes=nbytes,
                hits=hits,
                hits_max=hits_max,
                last_used_s=touched_s or None,
                newest_s=newest_s,
                leaves=leaves,
                children=0,
                folded=count,
                label=f"{count:,} smaller",
                text=None,
            )
        )
    return tuple(nodes), heads
