"""Makes chunks of what a walk has seen, finds each one's parent, and joins chains without a branch
to nodes. In temporary tables of SQLite, on disk: level by level, never a tree in memory.

What records say of parents is not to be trusted: a parent ends where its child begins, or it is
none, so that no loop is possible.
"""

from collections.abc import Callable

from objkv.ops.audit_spool import Spool

Check = Callable[[], None]
_CHUNKS = """
CREATE TEMP TABLE chunks (
  id INTEGER PRIMARY KEY, ns INTEGER, hash BLOB, parent BLOB, start INTEGER, ends INTEGER,
  payloads INTEGER, nbytes INTEGER, oldest_s INTEGER, newest_s INTEGER,
  raw_bytes INTEGER, recorded_bytes INTEGER, hot_payloads INTEGER, hot_bytes INTEGER,
  cold_payloads INTEGER, hits INTEGER, touched_s INTEGER, pinned INTEGER, has_record INTEGER,
  up INTEGER, kids INTEGER DEFAULT 0, root INTEGER, run INTEGER)
"""
_FILL = """
INSERT INTO temp.chunks (ns, hash, parent, start, ends, payloads, nbytes, oldest_s, newest_s,
  raw_bytes, recorded_bytes, hot_payloads, hot_bytes, cold_payloads, hits, touched_s, pinned,
  has_record)
SELECT p.ns, p.hash, max(r.parent), max(r.token_start), max(r.token_end), count(*), sum(p.nbytes),
  min(p.modified_s), max(p.modified_s), sum(s.raw_bytes),
  sum(CASE WHEN s.raw_bytes IS NOT NULL THEN p.nbytes END), ifnull(sum(s.hot), 0),
  ifnull(sum(s.hot * p.nbytes), 0), count(*) - ifnull(sum(s.hot), 0),
  max(r.hits), max(r.touched_s), max(r.pinned), max(r.hash IS NOT NULL)
FROM main.payloads p
LEFT JOIN main.shards s USING (ns, hash, field)
LEFT JOIN main.records r ON r.ns = p.ns AND r.hash = p.hash
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
  id INTEGER PRIMARY KEY, ns INTEGER, up INTEGER, start INTEGER, ends INTEGER, first INTEGER,
  chunks INTEGER, nbytes INTEGER, hits INTEGER, hits_max INTEGER, touched_s INTEGER,
  newest_s INTEGER, kids INTEGER DEFAULT 0, leaves INTEGER DEFAULT 1, all_ends INTEGER,
  all_chunks INTEGER, all_nbytes INTEGER, all_hits INTEGER, all_hits_max INTEGER,
  all_touched_s INTEGER, all_newest_s INTEGER)
"""
_FILL_NODES = """
INSERT INTO temp.nodes (id, ns, up, start, ends, first, chunks, nbytes, hits, hits_max, touched_s,
  newest_s, all_ends, all_chunks, all_nbytes, all_hits, all_hits_max, all_touched_s, all_newest_s)
SELECT run, ns, (SELECT p.run FROM temp.chunks h JOIN temp.chunks p ON p.id = h.up
    WHERE h.id = g.run),
  start, ends, first, chunks, nbytes, hits, hits_max, touched_s, newest_s,
  ends, chunks, nbytes, hits, hits_max, touched_s, newest_s
FROM (SELECT run, ns, min(start) AS start, max(ends) AS ends, min(ends - start) AS first,
    count(*) AS chunks, sum(nbytes) AS nbytes, sum(hits) AS hits, max(hits) AS hits_max,
    max(touched_s) AS touched_s, max(newest_s) AS newest_s
  FROM temp.chunks WHERE run IS NOT NULL GROUP BY run) g
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


def make_chunks(spool: Spool, check: Check = lambda: None) -> None:
    """Fill ``chunks`` and ``nodes``; ``check`` is called between steps, and may raise."""
    spool.run("DROP TABLE IF EXISTS temp.chunks")
    spool.run("DROP TABLE IF EXISTS temp.nodes")
    steps = (
        _CHUNKS,
        _FILL,
        "CREATE INDEX temp.by_hash ON chunks (ns, hash)",
        _PARENTS,
        "CREATE INDEX temp.by_up ON chunks (up) WHERE up IS NOT NULL",
        _KIDS,
        "CREATE INDEX temp.by_start ON chunks (start) WHERE start IS NOT NULL",
    )
    for step in steps:
        check()
        spool.run(step)
    _level_by_level(spool, _DOWN, _NEXT_START, -1, check)
    for step in (
        "CREATE INDEX temp.by_run ON chunks (run, ends) WHERE run IS NOT NULL",
        _NODES,
        _FILL_NODES,
        "CREATE INDEX temp.nodes_by_up ON nodes (up)",
        "CREATE INDEX temp.nodes_by_start ON nodes (start)",
    ):
        check()
        spool.run(step)
    _level_by_level(spool, _UP, _BEFORE, 1 << 60, check)
    spool.run("CREATE INDEX temp.nodes_by_size ON nodes (all_nbytes DESC, start)")


def _level_by_level(spool: Spool, step: str, following: str, start: int, check: Check) -> None:
    while True:
        check()
        found = spool.some(following, (start,))[0][0]
        if found is None:
            return
        start = int(found)
        spool.run(step, (start,))
