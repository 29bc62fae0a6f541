"""The figures of an audit by namespace, tenant and depth and in total, from the spool's tables."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from objkv.config.prices import Prices
from objkv.index.base import Savings
from objkv.ops.audit.answers import SavingsAudit, SavingsMonth
from objkv.ops.audit.identities import Facts
from objkv.ops.audit.report import (
    AgeBucket,
    AgesAudit,
    AuditTotals,
    CostAudit,
    DepthAudit,
    NamespaceAudit,
    TenantAudit,
    TenantCost,
)
from objkv.ops.audit.spool import AuditSpool

T = TypeVar("T", int, float)
DEPTHS_ALONE = 64
"""Depths that are reported one by one."""
_COUNTED = ("roots", "chunks", "payloads", "nbytes", "oldest_s", "newest_s")
_USE = ("hits", "used_chunks", "unused_bytes", "last_used_s")
"""Values that only an index has."""
_SUMS = ("tokens", "hits", "used_chunks", "unused_bytes")
_BY_NAMESPACE = """
SELECT ns, sum(has_record AND start IS NOT NULL AND up IS NULL), count(*), sum(payloads),
  sum(CASE WHEN start IS NOT NULL THEN ends - start END),
  sum(start IS NULL), sum(nbytes), sum(hits), sum(hits > 0),
  sum(CASE WHEN hits = 0 THEN nbytes END), sum(CASE WHEN pinned THEN 1 ELSE 0 END),
  min(oldest_s), max(newest_s), max(touched_s), sum(has_record), sum(raw_bytes),
  sum(recorded_bytes), sum(hot_payloads), sum(hot_bytes),
  total(hits * cold_payloads * 2592000.0 / max(? - oldest_s, 86400))
FROM temp.chunks GROUP BY ns
"""
_BY_DEPTH = """
SELECT start / (ends - start) AS depth, count(*), sum(ends - start), sum(nbytes), sum(hits),
  sum(hits > 0), sum(kids > 1), sum(kids = 0)
FROM temp.chunks WHERE ns = ? AND start IS NOT NULL GROUP BY depth ORDER BY depth
"""


@dataclass(frozen=True, slots=True)
class NamespaceFigures:
    """The tables' figures of one namespace."""

    name: str
    roots: int = 0
    chunks: int = 0
    payloads: int = 0
    known_tokens: int | None = None
    unknown_chunks: int = 0
    """Chunks of unknown length."""
    nbytes: int = 0
    hits: int | None = None
    used_chunks: int | None = None
    unused_bytes: int | None = None
    pinned: int = 0
    oldest_s: int | None = None
    newest_s: int | None = None
    last_used_s: int | None = None
    records: int = 0
    raw_bytes: int | None = None
    recorded_bytes: int | None = None
    hot_payloads: int = 0
    hot_bytes: int = 0
    gets_month: float = 0.0

    def tokens(self, chunk_tokens: int | None) -> int | None:
        """Return the tokens of all chunks, with ``chunk_tokens`` for chunks of unknown length."""
        if self.unknown_chunks and chunk_tokens is None:
            return self.known_tokens
        return (self.known_tokens or 0) + self.unknown_chunks * (chunk_tokens or 0)


def figures(spool: AuditSpool, now_s: float) -> dict[str, NamespaceFigures]:
    """Return the figures by namespace, with a few hundred bytes of memory per namespace."""
    names = namespace_names(spool)
    found = {}
    for ns, *values in spool.rows(_BY_NAMESPACE, (int(now_s),)):
        has_hits = values[6] is not None
        values[8] = (values[8] or 0) if has_hits else None
        values[12] = values[12] or None
        found[names[ns]] = NamespaceFigures(names[ns], *values)
    return found


def namespace_names(spool: AuditSpool) -> dict[int, str]:
    """Return the namespaces by their numbers in the spool."""
    return {int(ns): str(name) for ns, name in spool.rows("SELECT id, name FROM namespaces")}


def namespace_audits(
    found: Mapping[str, NamespaceFigures],
    facts: Mapping[str, Facts | None],
    wrong: Mapping[tuple[str, str], int],
    *,
    has_index: bool,
) -> tuple[NamespaceAudit, ...]:
    """Return the namespaces, largest first.

    Args:
        facts: None for namespaces that only the index has.
        wrong: number of findings by kind and namespace.
    """
    audits = []
    for name in sorted({*found, *facts}):
        one, fact = found.get(name, NamespaceFigures(name)), facts.get(name)
        known = fact is not None and fact.namespace.is_known
        counted: dict[str, Any] = {field: getattr(one, field) for field in _COUNTED}
        counted |= {field: getattr(one, field) if has_index else None for field in _USE}
        audits.append(
            NamespaceAudit(
                namespace=name,
                model=fact.model if fact else None,
                tenant=fact.tenant if fact else None,
                kv_dtype=fact.kv_dtype if fact else None,
                chunk_tokens=fact.chunk_tokens if fact else None,
                weights_epoch=fact.namespace.weights_epoch if fact and known else None,
                is_known=known,
                problem=fact.problem if fact else "the bulk store has no folder for it",
                **counted,
                tokens=one.tokens(fact.chunk_tokens if fact else None),
                pinned=one.pinned,
                ghosts=wrong.get(("ghost", name), 0),
                orphans=wrong.get(("orphan", name), 0) + wrong.get(("expired", name), 0),
                corrupt=wrong.get(("corrupt", name), 0),
                strangers=wrong.get(("stranger", name), 0),
                expired=wrong.get(("expired", name), 0),
            )
        )
    return tuple(sorted(audits, key=lambda one: (-one.nbytes, one.namespace)))


def tenant_audits(
    namespaces: Sequence[NamespaceAudit], quota_bytes: int
) -> tuple[TenantAudit, ...]:
    """Return the tenants, largest first."""
    groups: defaultdict[str | None, list[NamespaceAudit]] = defaultdict(list)
    for one in namespaces:
        groups[one.tenant].append(one)
    audits = [
        TenantAudit(
            tenant=tenant,
            namespaces=len(group),
            quota_bytes=quota_bytes if quota_bytes and tenant is not None else None,
            **_together(group),
        )
        for tenant, group in groups.items()
    ]
    return tuple(sorted(audits, key=lambda one: (-one.nbytes, one.tenant or "")))


def totals(
    namespaces: Sequence[NamespaceAudit],
    found: Mapping[str, NamespaceFigures],
    *,
    has_index: bool,
) -> AuditTotals:
    """Return the sums over all namespaces."""
    every = list(found.values())
    return AuditTotals(
        namespaces=len(namespaces),
        tenants=len({one.tenant for one in namespaces if one.tenant is not None}),
        **_together(namespaces),
        raw_bytes=added(one.raw_bytes for one in every),
        recorded_bytes=added(one.recorded_bytes for one in every),
        hot_payloads=sum(one.hot_payloads for one in every) if has_index else None,
        hot_bytes=sum(one.hot_bytes for one in every) if has_index else None,
        records=sum(one.records for one in every) if has_index else None,
        pinned=sum(one.pinned for one in every),
    )


def _together(namespaces: Sequence[NamespaceAudit]) -> dict[str, Any]:
    """Return the fields of ``StoredAudit``, summed over ``namespaces``."""

    def known(field: str) -> list[int]:
        values = [getattr(one, field) for one in namespaces]
        return [value for value in values if value is not None]

    return {
        **{field: sum(known(field)) for field in ("roots", "chunks", "payloads", "nbytes")},
        **{field: sum(known(field)) if known(field) else None for field in _SUMS},
        "oldest_s": min(known("oldest_s"), default=None),
        "newest_s": max(known("newest_s"), default=None),
        "last_used_s": max(known("last_used_s"), default=None),
    }


def depth_audits(
    spool: AuditSpool, namespaces: Sequence[NamespaceAudit], *, has_index: bool
) -> tuple[DepthAudit, ...]:
    """Return the depths, in the order of ``namespaces``."""
    numbers = {name: ns for ns, name in namespace_names(spool).items()}
    audits: list[DepthAudit] = []
    for name in (one.namespace for one in namespaces if one.namespace in numbers):
        buckets: dict[int, list[int]] = {}
        for depth, *values in spool.rows(_BY_DEPTH, (numbers[name],)):
            bucket = buckets.setdefault(_bucket(depth), [0] * len(values))
            for place, value in enumerate(values):
                bucket[place] += value or 0
        for depth, (chunks, tokens, nbytes, hits, used, branches, leaves) in buckets.items():
            audits.append(
                DepthAudit(
                    namespace=name,
                    depth=depth,
                    depth_end=depth + 1 if depth < DEPTHS_ALONE else 2 * depth,
                    chunks=chunks,
                    tokens=tokens,
                    nbytes=nbytes,
                    hits=hits if has_index else None,
                    used_chunks=used if has_index else None,
                    branches=branches,
                    leaves=leaves,
                )
            )
    return tuple(audits)


def _bucket(depth: int) -> int:
    return depth if depth < DEPTHS_ALONE else 1 << (depth.bit_length() - 1)


def added(values: Iterable[T | None]) -> T | None:
    """Return the sum of the known values; None if all are unknown."""
    known = [value for value in values if value is not None]
    return sum(known[1:], known[0]) if known else None


_DAY_S = 86_400
_MONTH_DAYS = 30
_GB = 1e9
_AGE_STARTS_S = (0, 3_600, 6 * 3_600, _DAY_S, 3 * _DAY_S, 7 * _DAY_S, 30 * _DAY_S, 90 * _DAY_S)
_DAY_PAYLOADS = """
SELECT ns, count(*) FROM main.payloads WHERE modified_s / 86400 = ? GROUP BY ns
"""


@dataclass(frozen=True, slots=True)
class Basis:
    """The inputs of a cost computation other than the stored chunks."""

    prices: Prices
    now_s: float
    has_index: bool
    """Whether hits are counted."""


def read_ages(spool: AuditSpool, now_s: float, *, has_index: bool) -> AgesAudit:
    """Return chunks by age and by last use."""
    never = None, None
    if has_index:
        counted = "SELECT count(*), ifnull(sum(nbytes), 0) FROM temp.chunks WHERE hits = 0"
        never = spool.some(counted)[0]
    return AgesAudit(
        age=_buckets(spool, "newest_s", now_s),
        last_use=_buckets(spool, "touched_s", now_s) if has_index else (),
        never_used_chunks=never[0],
        never_used_bytes=never[1],
    )


def _buckets(spool: AuditSpool, column: str, now_s: float) -> tuple[AgeBucket, ...]:
    bounds = [*zip(_AGE_STARTS_S, (*_AGE_STARTS_S[1:], None), strict=True)]
    # A chunk from the future, by a wrong clock, is in the youngest bucket.
    cases = " ".join(
        f"WHEN {column} > {int(now_s) - end} THEN {number}"
        for number, (_, end) in enumerate(bounds)
        if end is not None
    )
    statement = (
        f"SELECT CASE {cases} ELSE {len(bounds) - 1} END AS bucket, count(*), sum(nbytes) "  # noqa: S608  # our own numbers
        f"FROM temp.chunks WHERE {column} > 0 GROUP BY bucket"
    )
    found = {bucket: (chunks, nbytes) for bucket, chunks, nbytes in spool.rows(statement)}
    return tuple(
        AgeBucket(start, end, *found.get(number, (0, 0)))
        for number, (start, end) in enumerate(bounds)
    )


def read_cost(
    spool: AuditSpool,
    namespaces: Sequence[NamespaceAudit],
    found: Mapping[str, NamespaceFigures],
    basis: Basis,
) -> CostAudit:
    """Return the monthly cost and each tenant's share of it."""
    prices, now_s, has_index = basis.prices, basis.now_s, basis.has_index
    names = namespace_names(spool)
    yesterday = int(now_s) // _DAY_S - 1
    puts = Counter({names[ns]: count for ns, count in spool.rows(_DAY_PAYLOADS, (yesterday,))})
    by_tenant: dict[str | None, list[float]] = {}
    gets = 0.0
    for one in namespaces:
        figures = found.get(one.namespace)
        loads = figures.gets_month if figures and has_index else 0.0
        gets += loads
        cost = by_tenant.setdefault(one.tenant, [0.0, 0.0])
        cost[0] += one.nbytes / _GB * prices.gb_month
        cost[1] += loads / 1000 * prices.per_1000_gets
        cost[1] += _MONTH_DAYS * puts[one.namespace] / 1000 * prices.per_1000_puts
    tenants = [
        TenantCost(name, storage=kept, requests=asked, month=kept + asked)
        for name, (kept, asked) in by_tenant.items()
    ]
    storage = sum(one.storage for one in tenants)
    requests = sum(one.requests for one in tenants)
    unused = added(one.unused_bytes for one in namespaces) if has_index else None
    return CostAudit(
        prices=prices,
        storage=storage,
        puts=float(_MONTH_DAYS * puts.total()),
        gets=gets if has_index else None,
        requests=requests,
        month=storage + requests,
        unused=None if unused is None else unused / _GB * prices.gb_month,
        tenants=tuple(sorted(tenants, key=lambda one: (-one.month, one.tenant or ""))),
    )


_US: Final = 1e6
_HOUR_S: Final = 3_600


def savings_audit(savings: Sequence[Savings], gpu_hour: float | None) -> SavingsAudit:
    """Return what these savings add up to, and their price at ``gpu_hour`` dollars."""
    if not savings:
        return SavingsAudit(None, None, None, None, None, None, None, None, ())
    timed = [one for one in savings if one.timed_tokens]
    compute_s = sum(one.compute_gpu_us for one in timed) / _US if timed else None
    load_s = sum(one.load_gpu_us for one in timed) / _US if timed else None
    gpu_s = None if compute_s is None or load_s is None else compute_s - load_s
    return SavingsAudit(
        first_month=min(one.month for one in savings),
        loads=sum(one.loads for one in savings),
        tokens=sum(one.tokens for one in savings),
        timed_tokens=sum(one.timed_tokens for one in savings),
        compute_gpu_s=compute_s,
        load_gpu_s=load_s,
        gpu_s=gpu_s,
        usd=None if gpu_s is None or gpu_hour is None else gpu_s / _HOUR_S * gpu_hour,
        months=tuple(
            SavingsMonth(
                one.namespace,
                one.month,
                one.loads,
                one.tokens,
                (one.compute_gpu_us - one.load_gpu_us) / _US if one.timed_tokens else None,
            )
            for one in savings
        ),
    )
