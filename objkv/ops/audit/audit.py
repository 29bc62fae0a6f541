"""Reports contents, owners, usage, cost and faults of everything stored, from an inventory.

An audit changes nothing and reads no payload.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace

from objkv.cache.bulk_index import MISSING_UNSEEN, is_listed
from objkv.config import Config
from objkv.config.prices import Prices
from objkv.ops.audit.figures import (
    namespace_audits,
    read_cost,
    savings_audit,
    tenant_audits,
    totals,
)
from objkv.ops.audit.report import AuditReport, LifecycleAudit
from objkv.ops.doctor.servers import ReadRules, judge_rules
from objkv.ops.formats import noun
from objkv.ops.inventory.findings import Doubt, count_findings, find_doubts, listed, read_findings
from objkv.ops.inventory.tree import largest_branches, make_tree
from objkv.ops.inventory.walk import Places, Walk
from objkv.ops.pin import PinList, list_pins
from objkv.ops.retrying import once
from objkv.ops.runs import Unit

_FEW = 20
"""Up to this many findings may be chance even if they are the majority."""


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
    bucket's rules.

    Raises ``StoreError``, ``ConfigError``.
    """
    now_s, inventory, view, places = clock(), walk.inventory, walk.view, walk.places
    public, grace_s = config.public(), config.sweep_grace_s
    walk.judge(ttl_s=config.ttl_s)
    make_tree(inventory, "nbytes")
    doubts = () if view.is_own_index else find_doubts(inventory, places, ttl_s=config.ttl_s)
    wrong = count_findings(inventory, grace_s=grace_s)
    namespaces = namespace_audits(inventory, places.namespaces, places.every, wrong)
    every = totals(namespaces)
    pins = list_pins(view.bulk, view.index, list(places.namespaces), now_s=now_s)
    report = AuditReport(
        made_s=int(now_s),
        begun_s=int(inventory.begun_s),
        version=version,
        bulk_url=public["bulk_url"],
        index_url=public["index_url"],
        totals=every,
        namespaces=namespaces,
        tenants=tenant_audits(namespaces, config.quota_bytes, prices),
        tree=largest_branches(inventory),
        cost=read_cost(every, prices),
        findings=read_findings(inventory, places, doubts, wrong, grace_s),
        namespace=places.only,
        savings=savings_audit(
            [one for one in view.index.savings() if places.only in (None, one.namespace)],
            prices.gpu_hour,
        ),
        pins=pins.pins,
        lifecycle=_lifecycle(lifecycle, config.ttl_s, pins),
        problems=(),
    )
    unread = [*sorted(walk.problems), *pins.problems]
    return replace(report, problems=tuple(_problems(report, walk, doubts, unread)))


def _problems(
    report: AuditReport, walk: Walk, doubts: Collection[Doubt], unread: Collection[str]
) -> Iterator[str]:
    """Yield what qualifies the numbers, in sentences, worst first. ``unread``: what could not be
    read."""
    places, payloads = walk.places, report.totals.payloads
    yield from (one.why for one in doubts)
    missing = next(one.count for one in report.findings.counts if one.kind == "missing")
    if payloads and missing > _FEW and missing > payloads:
        yield (
            f"{missing:,} records have no payload, more than there are payloads: check "
            "whether a lifecycle rule empties the bucket"
        )
    yield from _of_namespaces(report, places)
    if is_listed(once(walk.view.index)):
        yield MISSING_UNSEEN
    if report.lifecycle is not None and report.lifecycle.status == "conflicts":
        yield report.lifecycle.detail
    yield from unread
    if walk.view.is_own_index and payloads:
        yield (
            "the bulk store is its own index: nothing expires, hits are not counted, and "
            "chunks are described by the headers of their payloads"
        )
    if places.others:
        yield f"{listed(places.others)}: not created by objkv, not included"


def _of_namespaces(report: AuditReport, places: Places) -> Iterator[str]:
    unknown = [one.namespace for one in report.namespaces if not one.is_known and one.payloads]
    if unknown:
        yield f"{listed(unknown)}: payloads without a valid identity document"
    if old := sorted(places.old & places.namespaces.keys()):
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
        if tenant.quota_bytes is not None and tenant.nbytes > tenant.quota_bytes:
            yield f"tenant {tenant.tenant} exceeds its quota"


def _lifecycle(read: ReadRules, ttl_s: int, pins: PinList) -> LifecycleAudit | None:
    pinned_s = max((pin.until_s - pin.created_s for pin in pins.pins), default=0)
    found = judge_rules(read, ttl_s, pinned_s=pinned_s)
    if found is None:
        return None
    detail = f"{found.detail}; {found.fix}" if found.fix else found.detail
    return LifecycleAudit(found.status, found.rules.expire_days, detail)
