"""Reports contents, owners, usage, cost and faults of all that is stored, from an inventory."""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from objkv.cache.bulk_index import MISSING_UNSEEN, is_listed
from objkv.cache.quota import FULL_PERCENT
from objkv.config import Config
from objkv.config.prices import Prices
from objkv.index.base import Savings
from objkv.ops.audit.report import (
    AuditReport,
    AuditTotals,
    CostAudit,
    LifecycleAudit,
    NamespaceAudit,
    SavingsAudit,
    TenantAudit,
)
from objkv.ops.backends_view import StoredNamespace, without_retries
from objkv.ops.doctor.servers import ReadRules, judge_rules
from objkv.ops.formats import noun
from objkv.ops.inventory.file import Inventory
from objkv.ops.inventory.findings import (
    FAULTS,
    Doubt,
    NamespaceFindings,
    count_findings,
    find_doubts,
    listed,
    read_findings,
)
from objkv.ops.inventory.tree import largest_branches, make_tree
from objkv.ops.inventory.walk import Walk, WalkScope
from objkv.ops.pin import PinList, list_pins
from objkv.ops.runs import Unit

_FEW = 20
"""Up to this many findings may be chance even if they are the majority."""
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


def audit_stages(walk: Walk) -> Iterator[tuple[str, Iterable[Unit]]]:
    """Yield the stages of the walk of an audit in order, each with a name for people."""
    yield "reading records", walk.records()
    yield "listing payloads", walk.payloads(headers=walk.view.is_own_index)
    yield "listing leftovers", walk.leftovers()
    yield "reading pins", walk.pins()
    yield "rechecking findings", walk.second_looks()


def make_report(
    walk: Walk,
    config: Config,
    *,
    version: str,
    prices: Prices,
    lifecycle: ReadRules = lambda: None,
    clock: Callable[[], float] = time.time,
) -> AuditReport:
    """Return the report of a walk that is done. ``version`` is objkv's; ``lifecycle`` reads the
    bucket's rules. Raises ``StoreError``, ``ConfigError``."""
    now_s, inventory, view, scope = clock(), walk.inventory, walk.view, walk.scope
    public, grace_s = config.public(), config.sweep_grace_s
    walk.judge(ttl_s=config.ttl_s)
    make_tree(inventory, "nbytes")
    doubts = () if view.is_own_index else find_doubts(inventory, scope, ttl_s=config.ttl_s)
    wrong = count_findings(inventory, grace_s=grace_s)
    namespaces = _namespace_audits(inventory, scope.namespaces, scope.every, wrong)
    tenants = {one.tenant for one in namespaces if one.tenant is not None}
    counted = {"namespaces": len(namespaces), "tenants": len(tenants)}
    every = AuditTotals(**counted, **_together(namespaces))
    unused = every.unused_bytes
    pins = list_pins(view.bulk, view.index, list(scope.namespaces), now_s=now_s)
    report = AuditReport(
        made_s=int(now_s),
        begun_s=int(inventory.begun_s),
        version=version,
        bulk_url=public["bulk_url"],
        index_url=public["index_url"],
        totals=every,
        namespaces=namespaces,
        tenants=_tenant_audits(namespaces, config.quota_bytes, prices),
        tree=largest_branches(inventory),
        cost=CostAudit(
            prices=prices,
            month=every.nbytes / _GB * prices.gb_month,
            unused=None if unused is None else unused / _GB * prices.gb_month,
        ),
        findings=read_findings(inventory, scope, doubts, wrong, grace_s),
        namespace=scope.only,
        savings=_savings_audit(
            [one for one in view.index.savings() if scope.only in (None, one.namespace)],
            prices.gpu_hour,
        ),
        pins=pins.pins,
        lifecycle=_lifecycle(lifecycle, config.ttl_s, pins),
        problems=(),
    )
    unread = [*sorted(walk.problems), *pins.problems]
    problems = tuple(_problems(report, walk, doubts, unread))
    # Without records that a payload should still have, all may simply have expired.
    orphans = any(one.kind == "orphan" and one.count for one in report.findings.counts)
    is_doubted = any(one.is_of_bulk or orphans for one in doubts)
    return replace(report, problems=problems, is_doubted=is_doubted)


def _problems(
    report: AuditReport, walk: Walk, doubts: Collection[Doubt], unread: Collection[str]
) -> Iterator[str]:
    """Yield what qualifies the numbers, worst first. ``unread``: what could not be read."""
    scope, payloads = walk.scope, report.totals.payloads
    yield from (one.why for one in doubts)
    missing = next(one.count for one in report.findings.counts if one.kind == "missing")
    if payloads and missing > _FEW and missing > payloads:
        yield (
            f"{missing:,} records have no payload, more than there are payloads: check "
            "whether a lifecycle rule empties the bucket"
        )
    yield from _of_namespaces(report, scope)
    if is_listed(without_retries(walk.view.index)):
        yield MISSING_UNSEEN
    if report.lifecycle is not None and report.lifecycle.status == "conflicts":
        yield report.lifecycle.detail
    yield from unread
    if walk.view.is_own_index and payloads:
        yield (
            "the bulk store is its own index: nothing expires, hits are not counted, and "
            "chunks are described by the headers of their payloads"
        )
    if scope.others:
        yield f"{listed(scope.others)}: not created by objkv, not included"


def _of_namespaces(report: AuditReport, scope: WalkScope) -> Iterator[str]:
    unknown = [one.namespace for one in report.namespaces if not one.is_known and one.payloads]
    if unknown:
        yield f"{listed(unknown)}: payloads without a valid identity document"
    if old := sorted(scope.old & scope.namespaces.keys()):
        yield (
            f"{listed(old)}: from an earlier weights_epoch or format; objkv sweep --apply deletes "
            f"{noun(len(old), 'it', 'them')}"
        )
    roots = len(report.roots)
    if gone := sum(one.token_start > 0 for one in report.roots):
        yield (
            f"{gone} of the largest {roots} {noun(roots, 'prefix', 'prefixes')} "
            f"{noun(gone, 'has lost its', 'have lost their')} first chunks, so the remaining "
            "chunks cannot be loaded"
        )
    for tenant in report.tenants:
        if tenant.quota_bytes and 100 * tenant.nbytes >= FULL_PERCENT * tenant.quota_bytes:
            fix = "objkv sweep --apply evicts the least used prefixes that are not pinned"
            if report.index_url.startswith("bulk:"):
                fix = "delete old files, or set an index_url, with which a sweep evicts"
            used = 100 * tenant.nbytes // tenant.quota_bytes
            yield (
                f"the bulk store holds {used} % of tenant {tenant.tenant}'s quota, and saves stop "
                f"when what has records reaches {FULL_PERCENT} %: {fix}"
            )


def _lifecycle(read: ReadRules, ttl_s: int, pins: PinList) -> LifecycleAudit | None:
    pinned_s = max((pin.until_s - pin.created_s for pin in pins.pins), default=0)
    found = judge_rules(read, ttl_s, pinned_s=pinned_s)
    if found is None:
        return None
    detail = f"{found.detail}; {found.fix}" if found.fix else found.detail
    return LifecycleAudit(found.status, found.rules.expire_days, detail)


def _namespace_audits(
    inventory: Inventory,
    known: Mapping[str, StoredNamespace],
    names: Iterable[str],
    wrong: NamespaceFindings,
) -> tuple[NamespaceAudit, ...]:
    """Return the namespaces, largest first. ``known``: those that have a folder in the bulk store.
    ``names``: all, also those that only the index has."""
    every = inventory.names()
    figures = {every[row.pop("ns")]: row for row in inventory.named(_BY_NAMESPACE)}
    audits = [
        _namespace_audit(known.get(name, _NO_FOLDER), name, figures.get(name, {}), wrong)
        for name in {*figures, *names}
    ]
    return tuple(sorted(audits, key=lambda one: (-one.nbytes, one.namespace)))


def _namespace_audit(
    space: StoredNamespace, name: str, row: dict[str, Any], wrong: NamespaceFindings
) -> NamespaceAudit:
    found = [one for (_, where), one in wrong.items() if where == name]
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


def _tenant_audits(
    namespaces: Sequence[NamespaceAudit], quota_bytes: int, prices: Prices
) -> tuple[TenantAudit, ...]:
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


def _savings_audit(savings: Sequence[Savings], gpu_hour: float | None) -> SavingsAudit:
    """Return what these savings add up to, and their price at ``gpu_hour`` dollars."""
    if not savings:
        return SavingsAudit(*[None] * 8)
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
    )
