"""The figures of an audit by namespace and tenant and in total, from the inventory."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

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
from objkv.ops.inventory.findings import FAULTS, Found, NamespaceFindings

_NO_FOLDER: Final = StoredNamespace("", False, problem="the bulk store has no folder for it")
_NOTHING: Final[dict[str, Any]] = dict.fromkeys(("roots", "chunks", "payloads", "nbytes"), 0)
_SUMS: Final = ("tokens", "hits", "used_chunks", "unused_bytes")
_UNKNOWN: Final = dict.fromkeys((*_SUMS, "oldest_s", "newest_s", "last_used_s"))
_GB: Final = 1e9
_US: Final = 1e6
_HOUR_S: Final = 3_600
# Columns have the names of fields of ``StoredAudit``. Hits are known only with an index.
_BY_NAMESPACE = """
SELECT ns, count(*) AS chunks, sum(payloads) AS payloads, sum(nbytes) AS nbytes,
  sum(has_record AND start IS NOT NULL AND up IS NULL) AS roots,
  sum(ends - start) AS tokens, sum(start IS NULL) AS unknown_chunks,
  sum(hits) AS hits, sum(hits > 0) AS used_chunks,
  CASE WHEN count(hits) THEN ifnull(sum(CASE WHEN hits = 0 THEN nbytes END), 0) END
    AS unused_bytes,
  min(oldest_s) AS oldest_s, max(newest_s) AS newest_s,
  nullif(max(touched_s), 0) AS last_used_s
FROM temp.chunks GROUP BY ns
"""


def namespace_audits(
    inventory: Inventory,
    known: Mapping[str, StoredNamespace],
    names: Iterable[str],
    wrong: NamespaceFindings,
) -> tuple[NamespaceAudit, ...]:
    """Return the namespaces, largest first, with a few hundred bytes of memory for each.

    Args:
        known: those that have a folder in the bulk store.
        names: all, also those that only the index has.
        wrong: findings by kind and namespace.
    """
    every = inventory.names()
    figures = {every[row.pop("ns")]: row for row in inventory.named(_BY_NAMESPACE)}
    audits = [
        _namespace_audit(
            known.get(name, _NO_FOLDER),
            name,
            figures.get(name, {}),
            [found for (_, where), found in wrong.items() if where == name],
        )
        for name in sorted({*figures, *names})
    ]
    return tuple(sorted(audits, key=lambda one: (-one.nbytes, one.namespace)))


def _namespace_audit(
    space: StoredNamespace, name: str, row: dict[str, Any], found: Sequence[Found]
) -> NamespaceAudit:
    values = {**_NOTHING, **_UNKNOWN, **row}
    unknown = values.pop("unknown_chunks", 0)
    if space.chunk_tokens is not None:
        values["tokens"] = (values["tokens"] or 0) + unknown * space.chunk_tokens
    elif not unknown:
        values["tokens"] = values["tokens"] or 0
    return NamespaceAudit(
        namespace=name,
        model=space.model,
        tenant=space.tenant,
        kv_dtype=space.kv_dtype,
        chunk_tokens=space.chunk_tokens,
        weights_epoch=space.weights_epoch if space.is_known else None,
        is_known=space.is_known,
        problem=space.problem,
        findings={one.kind: one.count for one in found},
        faults=sum(one.count - one.young for one in found if one.kind in FAULTS),
        **values,
    )


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


def totals(namespaces: Sequence[NamespaceAudit]) -> AuditTotals:
    """Return the sums over all namespaces."""
    tenants = {one.tenant for one in namespaces if one.tenant is not None}
    return AuditTotals(namespaces=len(namespaces), tenants=len(tenants), **_together(namespaces))


def _together(namespaces: Sequence[NamespaceAudit]) -> dict[str, Any]:
    """Return the fields of ``StoredAudit``, summed over ``namespaces``."""

    def known(field: str) -> list[int]:
        values = [getattr(one, field) for one in namespaces]
        return [value for value in values if value is not None]

    return {
        **{field: sum(known(field)) for field in _NOTHING},
        **{field: sum(known(field)) if known(field) else None for field in _SUMS},
        "oldest_s": min(known("oldest_s"), default=None),
        "newest_s": max(known("newest_s"), default=None),
        "last_used_s": max(known("last_used_s"), default=None),
    }


def read_cost(every: AuditTotals, prices: Prices) -> CostAudit:
    """Return what storing all of this costs in a month."""
    unused = every.unused_bytes
    return CostAudit(
        prices=prices,
        month=every.nbytes / _GB * prices.gb_month,
        unused=None if unused is None else unused / _GB * prices.gb_month,
    )


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
