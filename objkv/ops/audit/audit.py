"""Reports contents, owners, usage, cost and faults of everything stored, from an inventory.

An audit changes nothing and reads no payload.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from objkv.cache.listed_index import MISSING_UNSEEN, is_listed
from objkv.config import Config
from objkv.config.prices import LIST_PRICES, Prices
from objkv.ops.audit.figures import (
    figures,
    namespace_audits,
    read_cost,
    savings_audit,
    tenant_audits,
    totals,
)
from objkv.ops.audit.pins import read_active_pins
from objkv.ops.audit.report import AuditReport, LifecycleAudit
from objkv.ops.audit.text import TextReader, with_texts
from objkv.ops.doctor.servers import LifecycleVerdict, ReadRules, judge_rules
from objkv.ops.formats import noun
from objkv.ops.inventory.file import Inventory
from objkv.ops.inventory.findings import Doubt, find_doubts, listed, read_findings
from objkv.ops.inventory.tree import RootAudit, Tree, TreeNode, make_tree, read_roots, read_tree
from objkv.ops.inventory.walk import Places, ReadView, Walk
from objkv.ops.retrying import once
from objkv.ops.runs import Unit

ROOTS_MAX = 50
_FEW = 20
"""Up to this many findings may be chance even if they are the majority."""


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """The contents of a report, and the settings that it judges by."""

    version: str
    """objkv's version."""
    bulk_url: str
    """Without secrets, as ``index_url``."""
    index_url: str
    ttl_s: int
    """Lifetime of a record that is not used."""
    grace_s: float
    """An orphan younger than this may still get its record."""
    quota_bytes: int = 0
    """Quota per tenant; 0 for none."""
    roots_max: int = ROOTS_MAX
    prices: Prices = LIST_PRICES
    tokenizer: Tokenizer | None = None
    """None to omit texts."""
    show_text: bool = False
    workers: int = 16


def audit_options(config: Config, version: str) -> AuditOptions:
    """Return the part of the options that comes from the settings. ``version`` is objkv's."""
    public = config.public()
    return AuditOptions(
        version=version,
        bulk_url=public["bulk_url"],
        index_url=public["index_url"],
        ttl_s=config.ttl_s,
        grace_s=config.sweep_grace_s,
        quota_bytes=config.quota_bytes,
    )


def audit_stages(walk: Walk) -> Iterator[tuple[str, Iterable[Unit]]]:
    """Yield the stages of the walk of an audit in order, each with a name for people."""
    yield "reading records", walk.records()
    yield "listing payloads", walk.payloads(headers=walk.view.is_own_index)
    yield "listing leftovers", walk.leftovers()
    yield "rechecking findings", walk.second_looks()


@dataclass(slots=True)
class Audit:
    """The report of a walk that is done."""

    walk: Walk
    options: AuditOptions
    lifecycle: ReadRules = lambda: None
    """Reads the bucket's lifecycle rules."""
    clock: Callable[[], float] = time.time

    @property
    def view(self) -> ReadView:
        """The store and the index."""
        return self.walk.view

    @property
    def inventory(self) -> Inventory:
        """What the walk found."""
        return self.walk.inventory

    @property
    def places(self) -> Places:
        """The places that were walked."""
        return self.walk.places

    def report(self) -> AuditReport:
        """Return the report. Raises ``StoreError``, ``ConfigError``."""
        now_s, options, inventory = self.clock(), self.options, self.inventory
        has_index, places = not self.view.is_own_index, self.places
        self.walk.judge(ttl_s=options.ttl_s)
        make_tree(inventory, "nbytes")
        found = figures(inventory)
        doubts = find_doubts(inventory, ttl_s=options.ttl_s) if has_index else ()
        findings, wrong = read_findings(inventory, places, doubts, grace_s=options.grace_s)
        namespaces = namespace_audits(
            found, places.namespaces, places.every, wrong, has_index=has_index
        )
        tree, nodes, roots = self._shapes(has_index=has_index)
        every = totals(namespaces, found, has_index=has_index)
        answers, unread = self._answers(now_s)
        report = AuditReport(
            made_s=int(now_s),
            begun_s=int(inventory.begun_s),
            version=options.version,
            bulk_url=options.bulk_url,
            index_url=options.index_url,
            totals=every,
            namespaces=namespaces,
            tenants=tenant_audits(namespaces, options.quota_bytes, options.prices),
            roots=roots,
            roots_omitted=max(0, every.roots - len(roots)),
            tree=nodes,
            cost=read_cost(namespaces, options.prices),
            findings=findings,
            namespace=places.only,
            **answers,
            problems=(),
        )
        met = [*sorted(self.walk.problems), *unread]
        return replace(report, problems=tuple(self._problems(report, tree, doubts, met)))

    def _answers(self, now_s: float) -> tuple[dict[str, Any], list[str]]:
        """Return the report's fields about savings, pins and lifecycle rules, and sentences about
        what could not be read. Raises ``StoreError``."""
        view, options, only = self.view, self.options, self.places.only
        pins, unreadable = read_active_pins(view.bulk, self.places.namespaces, now_s=now_s)
        pinned_s = max((pin.until_s - pin.created_s for pin in pins), default=0)
        rules = judge_rules(self.lifecycle, options.ttl_s, pinned_s=pinned_s)
        savings = [one for one in view.index.savings() if only in (None, one.namespace)]
        fields = {
            "savings": savings_audit(savings, options.prices.gpu_hour),
            "pins": pins,
            "lifecycle": None if rules is None else _lifecycle(rules),
        }
        unseen = [MISSING_UNSEEN] if is_listed(once(view.index)) else []
        conflict = [rules.detail] if rules is not None and rules.status == "conflicts" else []
        return fields, [*unseen, *conflict, *unreadable]

    def _shapes(
        self, *, has_index: bool
    ) -> tuple[Tree, tuple[TreeNode, ...], tuple[RootAudit, ...]]:
        namespaces, options = self.places.namespaces, self.options
        tenants = {name: one.tenant for name, one in namespaces.items()}
        roots = read_roots(self.inventory, tenants, most=options.roots_max, has_index=has_index)
        tree = read_tree(self.inventory)
        if options.tokenizer is None:
            return tree, tree.nodes, roots
        reader = TextReader(self.view, namespaces, options.tokenizer, options.show_text)
        return tree, *with_texts(self.inventory, tree, roots, reader, workers=options.workers)

    def _problems(
        self, report: AuditReport, tree: Tree, doubts: Collection[Doubt], met: Collection[str]
    ) -> Iterator[str]:
        """Yield what qualifies the numbers, in sentences, worst first. ``met``: what could not be
        read."""
        places, payloads = self.places, report.totals.payloads
        yield from (one.why for one in doubts)
        missing = next(one.count for one in report.findings.counts if one.kind == "missing")
        if payloads and missing > _FEW and missing > payloads:
            yield (
                f"{missing:,} records have no payload, more than there are payloads: check "
                "whether a lifecycle rule empties the bucket"
            )
        yield from _of_namespaces(report, places)
        yield from met
        if omitted := tree.namespaces_omitted:
            yield f"the tree omits the {omitted} smallest {noun(omitted, 'namespace')}"
        if report.totals.records is None and payloads:
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
    if gone := sum(one.token_start > 0 for one in report.roots):
        yield (
            f"{gone} of the largest {len(report.roots)} "
            f"{noun(len(report.roots), 'prefix', 'prefixes')} "
            f"{noun(gone, 'has lost its', 'have lost their')} first chunks, so the remaining "
            "chunks cannot be loaded"
        )
    for tenant in report.tenants:
        if tenant.quota_bytes is not None and tenant.nbytes > tenant.quota_bytes:
            yield f"tenant {tenant.tenant} exceeds its quota"


def _lifecycle(found: LifecycleVerdict) -> LifecycleAudit:
    detail = f"{found.detail}; {found.fix}" if found.fix else found.detail
    return LifecycleAudit(found.status, found.rules.expire_days, detail)
