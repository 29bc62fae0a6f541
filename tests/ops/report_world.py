"""A report of the size that a page must bear: 500 namespaces, 2,000 boxes in the tree."""

import random
from dataclasses import replace

from objkv.ops.audit.report import (
    AgeBucket,
    AgesAudit,
    AuditReport,
    DepthAudit,
    GrowthAudit,
    GrowthDay,
    NamespaceAudit,
    RootAudit,
    TenantAudit,
    TreeNode,
)
from tests.ops.audit_sample import MADE_S, sample_report

_MIB = 1 << 20
_DAY_S = 86_400
MODELS = ("acme/chat-70b", "acme/chat-8b", "acme/code-32b", "acme/embed-1b")
TENANTS = ("search", "support", "batch", "research")
TEXTS = (
    "You are the support assistant of ACME. Answer in the user's language …",
    "Review the following pull request. Repository: …",
    "Contract 2026-118, all pages. Question: …",
)


def large_report(*, namespaces: int = 500, nodes: int = 2_000, seed: int = 7) -> AuditReport:
    """Deterministic; the sample with everything that can be many replaced."""
    chance = random.Random(seed)
    names = [f"{chance.getrandbits(128):032x}" for _ in range(namespaces)]
    tree = _tree(chance, names[: max(1, namespaces // 60)], nodes)
    spaces = tuple(_namespace(chance, number, name) for number, name in enumerate(names))
    small = sample_report()
    return replace(
        small,
        totals=replace(
            small.totals,
            namespaces=namespaces,
            tenants=len(TENANTS),
            chunks=sum(one.chunks for one in spaces),
            nbytes=sum(one.nbytes for one in spaces),
        ),
        namespaces=spaces,
        tenants=tuple(_tenant(name, spaces) for name in TENANTS),
        tree=tree,
        roots=tuple(_root(node) for node in tree if node.parent is None),
        depths=tuple(_depth(names[0], depth) for depth in range(40)),
        growth=_growth(chance),
        ages=_ages(),
        problems=(),
    )


def _namespace(chance: random.Random, number: int, name: str) -> NamespaceAudit:
    known = sample_report().namespaces[0]
    chunks = max(1, int(40_000 / (number + 1)))
    nbytes = chunks * chance.randint(1, 4) * _MIB
    used = int(chunks * chance.random())
    return replace(
        known,
        namespace=name,
        model=MODELS[number % len(MODELS)],
        tenant=TENANTS[number % len(TENANTS)],
        chunks=chunks,
        payloads=2 * chunks,
        tokens=256 * chunks,
        roots=max(1, chunks // 90),
        nbytes=nbytes,
        hits=used * chance.randint(1, 60),
        used_chunks=used,
        unused_bytes=nbytes * (chunks - used) // chunks,
        ghosts=0,
        orphans=0,
        corrupt=0,
        strangers=0,
        expired=0,
    )


def _tenant(name: str, spaces: tuple[NamespaceAudit, ...]) -> TenantAudit:
    own = [one for one in spaces if one.tenant == name]
    return replace(
        sample_report().tenants[0],
        tenant=name,
        namespaces=len(own),
        chunks=sum(one.chunks for one in own),
        nbytes=sum(one.nbytes for one in own),
        hits=sum(one.hits or 0 for one in own),
        used_chunks=sum(one.used_chunks or 0 for one in own),
    )


def _tree(chance: random.Random, names: list[str], nodes: int) -> tuple[TreeNode, ...]:
    found: list[TreeNode] = []
    open_ends: list[int] = []
    while len(found) < nodes:
        number = len(found)
        is_root = not open_ends or (number < nodes // 20 and chance.random() < 0.3)
        up = None if is_root else found[chance.choice(open_ends[-60:])]
        depth = 0 if up is None else up.depth + up.chunks
        chunks = chance.choice((1, 2, 4, 8, 16)) if depth < 60 else 1
        hits = int(2 ** (chance.random() * 11)) if depth < 20 else int(chance.random() * 8)
        home = names[min(int(chance.expovariate(0.9)), len(names) - 1)]
        found.append(
            replace(
                sample_report().tree[0],
                id=number,
                parent=None if up is None else up.id,
                namespace=home if up is None else up.namespace,
                hash=f"{chance.getrandbits(160):040x}",
                depth=depth,
                token_start=256 * depth,
                token_end=256 * (depth + chunks),
                chunks=chunks,
                nbytes=chunks * 4 * _MIB,
                hits=hits * chunks,
                hits_max=hits,
                last_used_s=None if not hits else MADE_S - int(chance.expovariate(1e-5)),
                leaves=1,
                children=0,
                label=None,
                text=chance.choice(TEXTS) if up is None else None,
            )
        )
        open_ends.append(number)
    return tuple(found)


def _root(node: TreeNode) -> RootAudit:
    return replace(
        sample_report().roots[0],
        namespace=node.namespace,
        hash=node.hash,
        token_start=0,
        token_end_max=node.token_end + 4_096,
        chunks=node.chunks,
        nbytes=node.nbytes,
        hits=node.hits,
        label=node.text,
    )


def _depth(namespace: str, depth: int) -> DepthAudit:
    chunks = 2_400 // (depth + 1) + 40
    return DepthAudit(
        namespace, depth, depth + 1, chunks, 256 * chunks, chunks * _MIB, 9_000 // (depth + 1),
        int(chunks * 0.9 ** (depth / 2)), depth % 7, 3,
    )  # fmt: skip


def _growth(chance: random.Random) -> GrowthAudit:
    days = [
        GrowthDay(f"2026-{9 + day // 30:02}-{day % 30 + 1:02}", 90 + day, 180 + 2 * day,
                  int((40 + 2 * day) * (0.6 + chance.random()) * 1024 * _MIB))
        for day in range(80)
    ]  # fmt: skip
    return GrowthAudit(tuple(days), None, 160.0 * 1024 * _MIB, 5_000.0)


def _ages() -> AgesAudit:
    limits = (0, 3_600, 6 * 3_600, _DAY_S, 3 * _DAY_S, 7 * _DAY_S, 30 * _DAY_S)
    ends = (*limits[1:], None)
    written = (40, 180, 420, 900, 1_500, 4_100, 800)
    used = (1_900, 1_200, 700, 600, 300, 90, 0)
    both = [
        tuple(
            AgeBucket(start, end, 10 * size, size * 1024 * _MIB)
            for start, end, size in zip(limits, ends, sizes, strict=True)
        )
        for sizes in (written, used)
    ]
    return AgesAudit(both[0], both[1], 31_500, 3_150 * 1024 * _MIB)
