"""Compares the bulk store with the index and reports contents, owners, usage, cost and faults.

An audit changes nothing and reads no payload. It first walks the bulk store and the index into a
spool, then rechecks suspected faults, because replicas keep writing, and then computes the figures.
A walk that stopped early yields the figures of the parts it covered.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tokenizers import Tokenizer

from objkv.cache.listed_index import GHOSTS_UNSEEN, is_listed
from objkv.config import Config
from objkv.config.prices import LIST_PRICES, Prices
from objkv.ops.audit.answers import LifecycleAudit
from objkv.ops.audit.figures import (
    Basis,
    depth_audits,
    figures,
    namespace_audits,
    read_ages,
    read_cost,
    savings_audit,
    tenant_audits,
    totals,
)
from objkv.ops.audit.findings import (
    Walked,
    foreign_folders,
    lost_namespaces,
    problems,
    read_findings,
    with_force,
)
from objkv.ops.audit.identities import Facts, read_facts
from objkv.ops.audit.pins import read_active_pins
from objkv.ops.audit.report import (
    AuditReport,
    Ending,
    RootAudit,
    TreeNode,
)
from objkv.ops.audit.spool import AuditSpool, make_chunks
from objkv.ops.audit.text import TextReader, with_texts
from objkv.ops.audit.tree import Tree, read_roots, read_tree
from objkv.ops.audit.walk import AuditView, AuditWalk, part_unit, records_unit
from objkv.ops.backends_view import (
    BackendsView,
    NamespacePart,
    expected_payloads,
    stored_namespaces,
    stored_parts,
)
from objkv.ops.doctor.lifecycle import LifecycleVerdict, ReadRules, judge_rules
from objkv.ops.retrying import once
from objkv.ops.runs import Unit
from objkv.ops.sweep.survey import old_epochs, with_earlier

ROOTS_MAX = 50


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


def audit_view(view: BackendsView, lifecycle: ReadRules) -> AuditView:
    """Return the read-only part of ``view``. ``lifecycle`` reads the bucket's lifecycle rules."""
    return AuditView(
        bulk=view.bulk,
        index=view.index,
        is_own_index=view.is_own_index,
        seal_of=view.seal_of,
        unfinished=view.bulk.unfinished,
        lifecycle=lifecycle,
    )


@dataclass(frozen=True, slots=True)
class Places:
    """The places that a walk covers, by name."""

    facts: Mapping[str, Facts]
    """Facts of each namespace that has a folder in the bulk store."""
    old: frozenset[str]
    """Namespaces of an earlier format, or with a successor of a later epoch, in the walk or outside
    it."""
    parts: Sequence[NamespacePart]
    indexed: Sequence[str]
    """Namespaces that have records in the index."""
    others: Sequence[str] = ()
    """Folders of the bulk store that objkv did not create."""
    only: str | None = None
    """The one namespace to walk; None for all."""
    totals: Mapping[str, int] = field(default_factory=dict)
    """The expected number of payloads per namespace."""

    def units(self) -> list[str]:
        """Return the names of all units of the walk."""
        return ["leftovers", *map(records_unit, self.indexed), *map(part_unit, self.parts)]


def find_places(view: AuditView, only: str | None = None) -> Places:
    """Return the places of all namespaces, or of the namespace ``only``."""
    every = stored_namespaces(view.bulk)
    names = [name for name in every if only in (None, name)]
    indexed = [] if view.is_own_index else view.index.namespaces()
    documents = {name: read_facts(view.bulk, name) for name in every}
    totals = expected_payloads(view.index, is_own_index=view.is_own_index)
    return Places(
        facts={name: documents[name] for name in names},
        old=old_epochs(one.namespace for one in documents.values()),
        parts=stored_parts(view.bulk, names, totals),
        totals=totals,
        indexed=[name for name in indexed if only in (None, name)],
        others=() if only else foreign_folders(view.bulk.folders(""), every),
        only=only,
    )


def walk_stages(walk: AuditWalk, places: Places) -> Iterator[tuple[str, Iterable[Unit]]]:
    """Yield the stages of a walk in order, each with a name for people."""
    namespaces = {name: one.namespace for name, one in places.facts.items()}
    yield "reading records", walk.records(places.indexed, places.totals)
    yield "listing payloads", walk.payloads(places.parts, namespaces)
    yield "listing leftovers", walk.leftovers(places.only)
    if not walk.view.is_own_index:
        every = sorted({*namespaces, *places.indexed})
        yield "rechecking findings", walk.second_looks(every)


@dataclass(slots=True)
class Audit:
    """The figures of a walk, complete or not."""

    view: AuditView
    spool: AuditSpool
    places: Places
    options: AuditOptions
    clock: Callable[[], float] = time.time

    def walked(self) -> dict[str, Walked]:
        """Return how much of each namespace the walk covered."""
        done = self.spool.done
        parts: dict[str, bool] = {}
        for part in self.places.parts:
            parts[part.namespace] = parts.get(part.namespace, True) and part_unit(part) in done
        # A namespace missing from the index counts as read: it has no records.
        return {
            name: Walked(
                has_records=not self.view.is_own_index
                and parts.get(name, True)
                and (name not in self.places.indexed or records_unit(name) in done),
                is_known=name in self.places.facts and self.places.facts[name].namespace.is_known,
                is_old=name in self.places.old,
            )
            for name in sorted({*self.places.facts, *self.places.indexed})
        }

    def report(self, ending: Ending, met: Collection[str] = ()) -> AuditReport:
        """Return the report. ``met``: a message for each part that the walk could not read.

        Raises ``StoreError``, ``ConfigError``.
        """
        now_s, options, has_index = self.clock(), self.options, not self.view.is_own_index
        make_chunks(self.spool)
        found = figures(self.spool, now_s)
        walked = self.walked()
        findings, wrong = read_findings(
            self.spool,
            walked,
            expired_s=now_s - options.ttl_s,
            young_s=self.spool.begun_s - options.grace_s,
        )
        facts = self.places.facts
        kept = with_earlier(
            lost_namespaces(self.spool, expired_s=now_s - options.ttl_s),
            {name: one.namespace for name, one in facts.items()},
            self.places.old,
        )
        every_name: dict[str, Facts | None] = {**dict.fromkeys(walked), **facts}
        namespaces = namespace_audits(found, every_name, wrong, has_index=has_index)
        tree, nodes, roots = self._shapes(has_index=has_index)
        every = totals(namespaces, found, has_index=has_index)
        answers, unread = self._answers(now_s)
        basis = Basis(options.prices, now_s, has_index)
        report = AuditReport(
            made_s=int(now_s),
            begun_s=int(self.spool.begun_s),
            version=options.version,
            bulk_url=options.bulk_url,
            index_url=options.index_url,
            ending=ending,
            parts_done=sum(unit in self.spool.done for unit in self.places.units()),
            parts=len(self.places.units()),
            totals=every,
            namespaces=namespaces,
            tenants=tenant_audits(namespaces, options.quota_bytes),
            depths=depth_audits(self.spool, namespaces, has_index=has_index),
            roots=roots,
            roots_omitted=max(0, every.roots - len(roots)),
            tree=nodes,
            ages=read_ages(self.spool, now_s, has_index=has_index),
            cost=read_cost(self.spool, namespaces, found, basis),
            findings=with_force(findings, every, wrong, kept),
            namespace=self.places.only,
            **answers,
            problems=(),
        )
        omitted, others = tree.namespaces_omitted, self.places.others
        met = [*sorted(met), *unread]
        found_problems = problems(
            report, walked, others=others, met=met, namespaces_omitted=omitted
        )
        return replace(report, problems=found_problems)

    def _answers(self, now_s: float) -> tuple[dict[str, Any], list[str]]:
        """Return the report's fields about savings, pins and lifecycle rules, and sentences about
        what could not be read. Raises ``StoreError``."""
        view, facts, options = self.view, self.places.facts, self.options
        pins, unreadable = read_active_pins(view.bulk, facts, now_s=now_s)
        pinned_s = max((pin.until_s - pin.created_s for pin in pins), default=0)
        rules = judge_rules(view.lifecycle, options.ttl_s, pinned_s=pinned_s)
        only = self.places.only
        savings = [one for one in view.index.savings() if only in (None, one.namespace)]
        fields = {
            "savings": savings_audit(savings, options.prices.gpu_hour),
            "pins": pins,
            "lifecycle": None if rules is None else _lifecycle(rules),
        }
        ghosts = [GHOSTS_UNSEEN] if is_listed(once(view.index)) else []
        conflict = [rules.detail] if rules is not None and rules.status == "conflicts" else []
        return fields, [*ghosts, *conflict, *unreadable]

    def _shapes(
        self, *, has_index: bool
    ) -> tuple[Tree, tuple[TreeNode, ...], tuple[RootAudit, ...]]:
        facts, options = self.places.facts, self.options
        tenants = {name: fact.tenant for name, fact in facts.items()}
        roots = read_roots(self.spool, tenants, most=options.roots_max, has_index=has_index)
        tree = read_tree(self.spool)
        if options.tokenizer is None:
            return tree, tree.nodes, roots
        namespaces = {name: fact.namespace for name, fact in facts.items()}
        reader = TextReader(self.view, namespaces, options.tokenizer, options.show_text)
        return tree, *with_texts(self.spool, tree, roots, reader, workers=options.workers)


def _lifecycle(found: LifecycleVerdict) -> LifecycleAudit:
    detail = f"{found.detail}; {found.fix}" if found.fix else found.detail
    return LifecycleAudit(found.status, found.rules.expire_days, detail)
