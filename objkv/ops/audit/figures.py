"""The figures of an audit by namespace and tenant and in total, from the inventory."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from objkv.config.prices import Prices
from objkv.index.base import Savings
from objkv.ops.audit.report import (
    AuditTotals,
    CostAudit,
    NamespaceAudit,
    SavingsAudit,
    SavingsMonth,
    TenantAudit,
)
from objkv.ops.backends_view import StoredNamespace
from objkv.ops.inventory.file import Inventory
from objkv.ops.inventory.findings import FAULTS, NamespaceFindings

T = TypeVar("T", int, float)
_COUNTED = ("roots", "chunks", "payloads", "nbytes", "oldest_s", "newest_s")
_USE = ("hits", "used_chunks", "unused_bytes", "last_used_s")
"""Values that only an index has."""
_NO_FOLDER = StoredNamespace("", False, problem="the bulk store has no folder for it")
_SUMS = ("tokens", "hits", "used_chunks", "unused_bytes")
_BY_NAMESPACE = """
SELECT ns, sum(has_record AND start IS NOT NULL AND up IS NULL), count(*), sum(payloads),
  sum(CASE WHEN start IS NOT NULL THEN ends - start END),
  sum(start IS NULL), sum(nbytes), sum(hits), sum(hits > 0),
  sum(CASE WHEN hits = 0 THEN nbytes END), sum(CASE WHEN pinned THEN 1 ELSE 0 END),
  min(oldest_s), max(newest_s), max(touched_s), sum(has_record), sum(raw_bytes),
  sum(recorded_bytes), sum(hot_payloads), sum(hot_bytes)
FROM temp.chunks GROUP BY ns
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

    def tokens(self, chunk_tokens: int | None) -> int | None:
        """Return the tokens of all chunks, with ``chunk_tokens`` for chunks of unknown length."""
        if self.unknown_chunks and chunk_tokens is None:
            return self.known_tokens
        return (self.known_tokens or 0) + self.unknown_chunks * (chunk_tokens or 0)


def figures(inventory: Inventory) -> dict[str, NamespaceFigures]:
    """Return the figures by namespace, with a few hundred bytes of memory per namespace."""
    names = inventory.names()
    found = {}
    for ns, *values in inventory.rows(_BY_NAMESPACE):
        has_hits = values[6] is not None
        values[8] = (values[8] or 0) if has_hits else None
        values[12] = values[12] or None
        found[names[ns]] = NamespaceFigures(names[ns], *values)
    return found


def namespace_audits(
    found: Mapping[str, NamespaceFigures],
    known: Mapping[str, StoredNamespace],
    names: Sequence[str],
    wrong: Mapping[tuple[str, str], NamespaceFindings],
    *,
    has_index: bool,
) -> tuple[NamespaceAudit, ...]:
    """Return the namespaces, largest first.

    Args:
        known: those that have a folder in the bulk store.
        names: all, also those that only the index has.
        wrong: findings by kind and namespace.
    """
    audits = []
    for name in sorted({*found, *names}):
        one = found.get(name, NamespaceFigures(name))
        space = known.get(name, _NO_FOLDER)
        own = {kind: n for (kind, where), n in wrong.items() if where == name}
        counted: dict[str, Any] = {field: getattr(one, field) for field in _COUNTED}
        counted |= {field: getattr(one, field) if has_index else None for field in _USE}
        audits.append(
            NamespaceAudit(
                namespace=name,
                model=space.model,
                tenant=space.tenant,
                kv_dtype=space.kv_dtype,
                chunk_tokens=space.chunk_tokens,
                weights_epoch=space.weights_epoch if space.is_known else None,
                is_known=space.is_known,
                problem=space.problem,
                **counted,
                tokens=one.tokens(space.chunk_tokens),
                pinned=one.pinned,
                findings={kind: n.count for kind, n in own.items()},
                faults=sum(n.count - n.young for kind, n in own.items() if kind in FAULTS),
            )
        )
    return tuple(sorted(audits, key=lambda one: (-one.nbytes, one.namespace)))


def tenant_audits(
    namespaces: Sequence[NamespaceAudit], quota_bytes: int, prices: Prices
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
            month=sum(one.nbytes for one in group) / _GB * prices.gb_month,
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


def added(values: Iterable[T | None]) -> T | None:
    """Return the sum of the known values; None if all are unknown."""
    known = [value for value in values if value is not None]
    return sum(known[1:], known[0]) if known else None


_GB = 1e9


def read_cost(namespaces: Sequence[NamespaceAudit], prices: Prices) -> CostAudit:
    """Return what storing all of this costs in a month."""
    unused = added(one.unused_bytes for one in namespaces)
    return CostAudit(
        prices=prices,
        month=sum(one.nbytes for one in namespaces) / _GB * prices.gb_month,
        unused=None if unused is None else unused / _GB * prices.gb_month,
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
