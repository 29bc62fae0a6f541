"""Joins bucket and index and makes a report of it: what is stored, for whom, of what use, what it
costs and what is wrong. Changes nothing, reads no payload.

First both ends are walked into a spool; what seems wrong is looked at twice, because replicas go
on meanwhile; then the figures are made. A walk that was stopped gives the figures of its part.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from objkv.ops.audit.figures import (
    LIST_PRICES,
    Basis,
    depth_audits,
    figures,
    namespace_audits,
    read_ages,
    read_cost,
    read_growth,
    tenant_audits,
    totals,
)
from objkv.ops.audit.findings import Walked, foreign_folders, problems, read_findings
from objkv.ops.audit.identities import Facts, compare, read_facts
from objkv.ops.audit.report import AuditReport, Ending, Prices, RootAudit, TreeNode
from objkv.ops.audit.spool import AuditSpool, make_chunks
from objkv.ops.audit.text import TextReader, with_texts
from objkv.ops.audit.tree import Tree, read_roots, read_tree
from objkv.ops.audit.walk import AuditView, part_unit, records_unit
from objkv.ops.backends_view import NamespacePart, stored_namespaces, stored_parts
from objkv.ops.sweep.survey import old_epochs

DIFFERENCES_MAX = 50
ROOTS_MAX = 50


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """What a report is to tell, and by which settings it judges."""

    version: str
    """Of objkv."""
    bulk_url: str
    index_url: str
    """Both without secrets."""
    ttl_s: int
    """A record's life."""
    grace_s: float
    """What is wrong and younger may be about to become right."""
    quota_bytes: int = 0
    """Of each tenant; 0: none."""
    roots_max: int = ROOTS_MAX
    prices: Prices = LIST_PRICES
    tokenizer: Tokenizer | None = None
    """None: no texts."""
    show_text: bool = False
    workers: int = 16


@dataclass(frozen=True, slots=True)
class Places:
    """Where there may be something, by name."""

    facts: Mapping[str, Facts]
    """Of the namespaces that the bulk store has folders of."""
    old: frozenset[str]
    """Namespaces of which there is one with a later epoch, whether or not it is looked at."""
    parts: Sequence[NamespacePart]
    indexed: Sequence[str]
    """Namespaces that the index has records of."""
    others: Sequence[str] = ()
    """Folders of the bulk store that are not objkv's."""
    only: str | None = None
    """The one namespace that is looked at; None for all."""

    def units(self) -> list[str]:
        """Names of the units of the whole walk."""
        return ["leftovers", *map(records_unit, self.indexed), *map(part_unit, self.parts)]


def find_places(view: AuditView, only: str | None = None) -> Places:
    """The names of all there is, or of the namespace ``only``."""
    every = stored_namespaces(view.bulk)
    names = [name for name in every if only in (None, name)]
    indexed = [] if view.is_own_index else view.index.namespaces()
    documents = {name: read_facts(view.bulk, name) for name in every}
    return Places(
        facts={name: documents[name] for name in names},
        old=old_epochs(one.namespace for one in documents.values()),
        parts=stored_parts(view.bulk, names),
        indexed=[name for name in indexed if only in (None, name)],
        others=() if only else foreign_folders(view.bulk.folders(""), every),
        only=only,
    )


@dataclass(slots=True)
class Audit:
    """The figures of a walk, however far it came."""

    view: AuditView
    spool: AuditSpool
    places: Places
    options: AuditOptions
    clock: Callable[[], float] = time.time

    def walked(self) -> dict[str, Walked]:
        """How far each namespace was looked at."""
        done = self.spool.done
        parts: dict[str, bool] = {}
        for part in self.places.parts:
            parts[part.namespace] = parts.get(part.namespace, True) and part_unit(part) in done
        # The index knows nothing of a namespace that it does not name: that is an answer, too.
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
        """``met``: what the walk could not look at, in sentences. Raises ``StoreError``,
        ``ConfigError``."""
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
        every_name: dict[str, Facts | None] = {**dict.fromkeys(walked), **facts}
        namespaces = namespace_audits(found, every_name, wrong, has_index=has_index)
        largest = [facts[one.namespace] for one in namespaces if one.namespace in facts]
        differences, differences_omitted = compare(self.view.bulk, largest, most=DIFFERENCES_MAX)
        tree, nodes, roots = self._shapes(has_index=has_index)
        growth = read_growth(self.spool, now_s)
        every = totals(namespaces, found, has_index=has_index)
        units = self.places.units()
        report = AuditReport(
            made_s=int(now_s),
            begun_s=int(self.spool.begun_s),
            version=options.version,
            bulk_url=options.bulk_url,
            index_url=options.index_url,
            ending=ending,
            parts_done=sum(unit in self.spool.done for unit in units),
            parts=len(units),
            resumed=self.spool.resumed,
            totals=every,
            namespaces=namespaces,
            tenants=tenant_audits(namespaces, options.quota_bytes),
            depths=depth_audits(self.spool, namespaces, has_index=has_index),
            roots=roots,
            roots_omitted=max(0, every.roots - len(roots)),
            tree=nodes,
            ages=read_ages(self.spool, now_s, has_index=has_index),
            growth=growth,
            cost=read_cost(
                self.spool, namespaces, found, growth, Basis(options.prices, now_s, has_index)
            ),
            findings=findings,
            differences=differences,
            differences_omitted=differences_omitted,
            problems=(),
        )
        told = problems(
            report,
            walked,
            others=self.places.others,
            met=sorted(met),
            namespaces_omitted=tree.namespaces_omitted,
        )
        return replace(report, problems=told)

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
