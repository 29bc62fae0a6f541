"""Ages, growth and cost of what an audit has seen."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from objkv.ops.audit_figures import NamespaceFigures, added, namespace_names
from objkv.ops.audit_report import (
    AgeBucket,
    AgesAudit,
    CostAudit,
    GrowthAudit,
    GrowthDay,
    NamespaceAudit,
    Prices,
    TenantCost,
)
from objkv.ops.audit_spool import Spool

LIST_PRICES = Prices(gb_month=0.023, per_1000_puts=0.005, per_1000_gets=0.0004)
"""S3 Standard, us-east-1, as of November 2026."""


_DAY_S = 86_400
_DAYS_MAX = 400
_WEEK = 7
_MONTH_DAYS = 30
_GB = 1e9
_AGE_STARTS_S = (0, 3_600, 6 * 3_600, _DAY_S, 3 * _DAY_S, 7 * _DAY_S, 30 * _DAY_S, 90 * _DAY_S)
_PAYLOAD_DAYS = """
SELECT modified_s / 86400 AS day, count(*), sum(nbytes) FROM main.payloads GROUP BY day
"""
_CHUNK_DAYS = "SELECT oldest_s / 86400 AS day, count(*) FROM temp.chunks GROUP BY day"
_DAY_PAYLOADS = """
SELECT ns, count(*) FROM main.payloads WHERE modified_s / 86400 = ? GROUP BY ns
"""


@dataclass(frozen=True, slots=True)
class Basis:
    """What costs are computed from, besides what is stored."""

    prices: Prices
    now_s: float
    has_index: bool
    """Whether hits are counted."""


def read_ages(spool: Spool, now_s: float, *, has_index: bool) -> AgesAudit:
    """How old chunks are, and how long ago they were used."""
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


def _buckets(spool: Spool, column: str, now_s: float) -> tuple[AgeBucket, ...]:
    bounds = [*zip(_AGE_STARTS_S, (*_AGE_STARTS_S[1:], None), strict=True)]
    # A chunk that seems to come from the future is as young as any.
    cases = " ".join(
        f"WHEN {column} > {int(now_s) - end} THEN {number}"
        for number, (_, end) in enumerate(bounds)
        if end is not None
    )
    statement = (
        f"SELECT CASE {cases} ELSE {len(bounds) - 1} END AS bucket, count(*), sum(nbytes) "  # noqa: S608  # numbers of ours
        f"FROM temp.chunks WHERE {column} > 0 GROUP BY bucket"
    )
    found = {bucket: (chunks, nbytes) for bucket, chunks, nbytes in spool.rows(statement)}
    return tuple(
        AgeBucket(start, end, *found.get(number, (0, 0)))
        for number, (start, end) in enumerate(bounds)
    )


def read_growth(spool: Spool, now_s: float) -> GrowthAudit:
    """By day, UTC."""
    today = int(now_s) // _DAY_S
    found: dict[int, list[int]] = {}
    for day, payloads, nbytes in spool.rows(_PAYLOAD_DAYS):
        row = found.setdefault(min(max(day, 0), today), [0, 0, 0])
        row[1] += payloads
        row[2] += nbytes
    for day, chunks in spool.rows(_CHUNK_DAYS):
        found.setdefault(min(max(day, 0), today), [0, 0, 0])[0] += chunks
    if not found:
        return GrowthAudit((), None, None, None)
    first = max(min(found), today - _DAYS_MAX + 1)
    days = tuple(
        GrowthDay(_day(number), *found.get(number, (0, 0, 0))) for number in range(first, today + 1)
    )
    before = [found[number] for number in found if number < first]
    whole = days[:-1][-_WEEK:]
    return GrowthAudit(
        days=days,
        before=GrowthDay(_day(min(found)), *map(sum, zip(*before, strict=True)))
        if before
        else None,
        bytes_per_day=sum(day.nbytes for day in whole) / len(whole) if whole else None,
        payloads_per_day=float(whole[-1].payloads) if whole else None,
    )


def _day(number: int) -> str:
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=number)).date().isoformat()


def read_cost(
    spool: Spool,
    namespaces: Sequence[NamespaceAudit],
    found: Mapping[str, NamespaceFigures],
    growth: GrowthAudit,
    basis: Basis,
) -> CostAudit:
    """What all this costs in a month, and each tenant's part of it."""
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
    more = growth.bytes_per_day
    unused = added(one.unused_bytes for one in namespaces) if has_index else None
    return CostAudit(
        prices=prices,
        storage=storage,
        puts=float(_MONTH_DAYS * puts.total()),
        gets=gets if has_index else None,
        requests=requests,
        month=storage + requests,
        next_month=None
        if more is None
        else storage + requests + _MONTH_DAYS * more / _GB * prices.gb_month,
        unused=None if unused is None else unused / _GB * prices.gb_month,
        tenants=tuple(sorted(tenants, key=lambda one: (-one.month, one.tenant or ""))),
    )
