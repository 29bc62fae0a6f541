"""A small report with something of everything, for the tests of whatever shows reports."""

from objkv.ops.audit.report import (
    AgeBucket,
    AgesAudit,
    AuditFinding,
    AuditReport,
    AuditTotals,
    CostAudit,
    DepthAudit,
    FieldDifference,
    FindingCount,
    FindingsAudit,
    GrowthAudit,
    GrowthDay,
    IdentityDifference,
    NamespaceAudit,
    Prices,
    RootAudit,
    TenantAudit,
    TenantCost,
    TreeNode,
)

MADE_S = 1_795_300_000
"""2026-11-21 22:26:40 UTC."""
CHAT, CODE, LOST = "a" * 32, "b" * 32, "5" * 32
_DAY_S = 86_400
_MIB = 1 << 20


def sample_report() -> AuditReport:
    """Two known namespaces of two tenants, one unknown; times, texts and numbers fit together."""
    return AuditReport(
        made_s=MADE_S,
        begun_s=MADE_S - 90,
        version="0.1.0",
        bulk_url="s3://kv-cache/production",
        index_url="rediss://cache.example.com:6379/0",
        ending="complete",
        parts_done=515,
        parts=515,
        resumed=False,
        totals=_totals(),
        namespaces=_namespaces(),
        tenants=_tenants(),
        depths=_depths(),
        roots=_roots(),
        roots_omitted=1,
        tree=_tree(),
        ages=_ages(),
        growth=_growth(),
        cost=_cost(),
        findings=_findings(),
        differences=_differences(),
        differences_omitted=0,
        problems=("7 payloads are of a namespace that has no identity document",),
    )


def _totals() -> AuditTotals:
    return AuditTotals(
        namespaces=3,
        tenants=2,
        roots=4,
        chunks=79,
        payloads=151,
        tokens=18_432,
        nbytes=295 * _MIB,
        raw_bytes=400 * _MIB,
        recorded_bytes=276 * _MIB,
        hot_payloads=16,
        hot_bytes=32 * _MIB,
        records=72,
        pinned=4,
        hits=1_204,
        used_chunks=41,
        unused_bytes=120 * _MIB,
        oldest_s=MADE_S - 12 * _DAY_S,
        newest_s=MADE_S - 40,
        last_used_s=MADE_S - 4,
    )


def _namespaces() -> tuple[NamespaceAudit, ...]:
    known = NamespaceAudit(
        namespace=CHAT,
        model="acme/chat-8b",
        tenant="search",
        kv_dtype="bfloat16",
        chunk_tokens=256,
        weights_epoch=0,
        is_known=True,
        problem=None,
        roots=2,
        chunks=48,
        payloads=96,
        tokens=12_288,
        nbytes=192 * _MIB,
        hits=1_190,
        used_chunks=37,
        unused_bytes=44 * _MIB,
        pinned=4,
        oldest_s=MADE_S - 12 * _DAY_S,
        newest_s=MADE_S - 40,
        last_used_s=MADE_S - 4,
        ghosts=2,
        orphans=7,
        corrupt=1,
        strangers=0,
        expired=6,
    )
    code = NamespaceAudit(
        namespace=CODE,
        model="acme/chat-8b",
        tenant='<script>alert("x")</script>',
        kv_dtype="fp8_e4m3",
        chunk_tokens=256,
        weights_epoch=1,
        is_known=True,
        problem=None,
        roots=1,
        chunks=24,
        payloads=48,
        tokens=6_144,
        nbytes=96 * _MIB,
        hits=14,
        used_chunks=4,
        unused_bytes=76 * _MIB,
        pinned=0,
        oldest_s=MADE_S - 3 * _DAY_S,
        newest_s=MADE_S - 7_200,
        last_used_s=MADE_S - 3_600,
        ghosts=0,
        orphans=0,
        corrupt=0,
        strangers=0,
        expired=0,
    )
    lost = NamespaceAudit(
        namespace=LOST,
        model=None,
        tenant=None,
        kv_dtype=None,
        chunk_tokens=None,
        weights_epoch=None,
        is_known=False,
        problem="no identity document",
        roots=1,
        chunks=7,
        payloads=7,
        tokens=None,
        nbytes=7 * _MIB,
        hits=None,
        used_chunks=None,
        unused_bytes=None,
        pinned=None,
        oldest_s=MADE_S - 9 * _DAY_S,
        newest_s=MADE_S - 9 * _DAY_S,
        last_used_s=None,
        ghosts=0,
        orphans=0,
        corrupt=0,
        strangers=7,
        expired=0,
    )
    return known, code, lost


def _tenants() -> tuple[TenantAudit, ...]:
    return tuple(
        TenantAudit(
            tenant=one.tenant,
            namespaces=1,
            roots=one.roots,
            chunks=one.chunks,
            payloads=one.payloads,
            tokens=one.tokens,
            nbytes=one.nbytes,
            quota_bytes=None if one.tenant is None else 1 << 30,
            hits=one.hits,
            used_chunks=one.used_chunks,
            unused_bytes=one.unused_bytes,
            oldest_s=one.oldest_s,
            newest_s=one.newest_s,
            last_used_s=one.last_used_s,
        )
        for one in _namespaces()
    )


def _depths() -> tuple[DepthAudit, ...]:
    return tuple(
        DepthAudit(
            namespace=CHAT,
            depth=depth,
            depth_end=depth + 1,
            chunks=chunks,
            tokens=chunks * 256,
            nbytes=chunks * 4 * _MIB,
            hits=400 - 90 * depth,
            used_chunks=max(1, chunks - 2),
            branches=int(depth == 3),
            leaves=2 if depth == 4 else 0,
        )
        for depth, chunks in enumerate((2, 2, 2, 2, 40))
    )


def _roots() -> tuple[RootAudit, ...]:
    first = RootAudit(
        namespace=CHAT,
        tenant="search",
        hash="1a" * 20,
        token_start=0,
        token_end_max=5 * 256,
        chunks=44,
        nbytes=176 * _MIB,
        shared_chunks=4,
        shared_tokens=1_024,
        branches=1,
        leaves=40,
        depth_max=5,
        hits=1_180,
        hits_max=400,
        used_chunks=35,
        reuse=26.8,
        oldest_s=MADE_S - 12 * _DAY_S,
        newest_s=MADE_S - 40,
        last_used_s=MADE_S - 4,
        label="You are a helpful assistant of <b>Acme</b> …",
    )
    second = RootAudit(
        namespace=CODE,
        tenant='<script>alert("x")</script>',
        hash="2b" * 20,
        token_start=512,
        token_end_max=512 + 24 * 256,
        chunks=24,
        nbytes=96 * _MIB,
        shared_chunks=24,
        shared_tokens=6_144,
        branches=0,
        leaves=1,
        depth_max=24,
        hits=14,
        hits_max=4,
        used_chunks=4,
        reuse=0.6,
        oldest_s=MADE_S - 3 * _DAY_S,
        newest_s=MADE_S - 7_200,
        last_used_s=MADE_S - 3_600,
        label=None,
    )
    return first, second


def _tree() -> tuple[TreeNode, ...]:
    trunk = TreeNode(
        id=0,
        parent=None,
        kind="chunks",
        namespace=CHAT,
        hash="1d" * 20,
        depth=0,
        token_start=0,
        token_end=1_024,
        chunks=4,
        nbytes=16 * _MIB,
        hits=1_060,
        hits_max=400,
        last_used_s=MADE_S - 4,
        newest_s=MADE_S - 11 * _DAY_S,
        leaves=40,
        children=40,
        folded=0,
        label="1a1a1a1a",
        text="You are a helpful assistant of <b>Acme</b> …",
    )
    branches = [
        TreeNode(
            id=1 + number,
            parent=0,
            kind="chunks",
            namespace=CHAT,
            hash=f"{0x40 + number:02x}" * 20,
            depth=4,
            token_start=1_024,
            token_end=1_280,
            chunks=1,
            nbytes=4 * _MIB,
            hits=90 - 20 * number,
            hits_max=90 - 20 * number,
            last_used_s=MADE_S - 60 * number,
            newest_s=MADE_S - 40,
            leaves=1,
            children=0,
            folded=0,
            label=None,
            text=None,
        )
        for number in range(3)
    ]
    other = TreeNode(
        id=4,
        parent=0,
        kind="other",
        namespace=CHAT,
        hash="",
        depth=4,
        token_start=1_024,
        token_end=1_280,
        chunks=37,
        nbytes=148 * _MIB,
        hits=12,
        hits_max=2,
        last_used_s=MADE_S - 7_200,
        newest_s=MADE_S - 4_000,
        leaves=37,
        children=0,
        folded=37,
        label="37 smaller",
        text=None,
    )
    alone = TreeNode(
        id=5,
        parent=None,
        kind="chunks",
        namespace=CODE,
        hash="2c" * 20,
        depth=2,
        token_start=512,
        token_end=512 + 24 * 256,
        chunks=24,
        nbytes=96 * _MIB,
        hits=14,
        hits_max=4,
        last_used_s=MADE_S - 3_600,
        newest_s=MADE_S - 7_200,
        leaves=1,
        children=0,
        folded=0,
        label="2b2b2b2b",
        text=None,
    )
    return trunk, *branches, other, alone


def _ages() -> AgesAudit:
    return AgesAudit(
        age=(
            AgeBucket(0, 3_600, 8, 32 * _MIB),
            AgeBucket(3_600, 21_600, 24, 96 * _MIB),
            AgeBucket(21_600, _DAY_S, 0, 0),
            AgeBucket(_DAY_S, 7 * _DAY_S, 36, 144 * _MIB),
            AgeBucket(7 * _DAY_S, None, 11, 23 * _MIB),
        ),
        last_use=(
            AgeBucket(0, 3_600, 30, 120 * _MIB),
            AgeBucket(3_600, 21_600, 7, 28 * _MIB),
            AgeBucket(21_600, _DAY_S, 4, 16 * _MIB),
            AgeBucket(_DAY_S, 7 * _DAY_S, 0, 0),
            AgeBucket(7 * _DAY_S, None, 0, 0),
        ),
        never_used_chunks=31,
        never_used_bytes=120 * _MIB,
    )


def _growth() -> GrowthAudit:
    per_day = (3, 0, 5, 4, 6, 9, 8, 2, 10, 12, 12, 8)
    return GrowthAudit(
        days=tuple(
            GrowthDay(f"2026-11-{10 + number}", chunks, 2 * chunks, chunks * 4 * _MIB)
            for number, chunks in enumerate(per_day)
        ),
        before=None,
        bytes_per_day=8.3 * 4 * _MIB,
        payloads_per_day=16.6,
    )


def _cost() -> CostAudit:
    return CostAudit(
        prices=Prices(gb_month=0.023, per_1000_puts=0.005, per_1000_gets=0.0004),
        storage=0.0071,
        puts=498.0,
        gets=6_020.0,
        requests=0.0049,
        month=0.0120,
        next_month=0.0360,
        unused=0.0029,
        tenants=(
            TenantCost("search", 0.0046, 0.0040, 0.0086),
            TenantCost('<script>alert("x")</script>', 0.0023, 0.0009, 0.0032),
            TenantCost(None, 0.0002, 0.0, 0.0002),
        ),
    )


def _findings() -> FindingsAudit:
    path = f"{CHAT}/1a/{'1a' * 20}/0.L0-32_H0-4.safetensors"
    return FindingsAudit(
        counts=(
            FindingCount("ghost", 2, 8 * _MIB, 0, "objkv sweep forgets them"),
            FindingCount("orphan", 1, 4 * _MIB, 1, "objkv rebuild gives them records"),
            FindingCount("stranger", 7, 7 * _MIB, 0, "objkv sweep --strangers removes them"),
            FindingCount("corrupt", 1, 4 * _MIB, 0, "objkv verify --all --quarantine"),
            FindingCount("expired", 6, 24 * _MIB, 0, "objkv sweep --apply removes them"),
            FindingCount("old_epoch", 0, 0, 0, "objkv sweep --apply removes them"),
            FindingCount("leftover", 0, 0, 0, "objkv sweep removes them"),
        ),
        first=(
            AuditFinding("ghost", path, 4 * _MIB, "recorded, and not there"),
            AuditFinding("corrupt", path, 4 * _MIB, "4,194,303 bytes, recorded are 4,194,304"),
        ),
        omitted=15,
    )


def _differences() -> tuple[IdentityDifference, ...]:
    return (
        IdentityDifference(
            a=CHAT,
            b=CODE,
            reason="they do not share: kv_dtype and tenant differ",
            fields=(
                FieldDifference(
                    "kv_dtype",
                    "bfloat16",
                    "fp8_e4m3",
                    "KV is kept in another type",
                    "start both with the same --kv-cache-dtype",
                ),
                FieldDifference(
                    "tenant",
                    "search",
                    '<script>alert("x")</script>',
                    "tenants never share",
                    "set tenant alike, if these may read each other's KV",
                ),
            ),
        ),
    )
