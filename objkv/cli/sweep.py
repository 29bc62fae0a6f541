"""``objkv sweep``: find and delete unreachable and evictable data."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Annotated

import typer

from objkv.cli.command import FINE, FOUND, Session, command
from objkv.cli.options import time_option
from objkv.cli.output import counted, size
from objkv.cli.upkeep import WORKERS, OneNamespace, Upkeep, Workers, upkeep
from objkv.errors import ConfigError
from objkv.ops.runs import Counters
from objkv.ops.sweep.remove import CATEGORIES, Category, Remover, SweepLimits
from objkv.ops.sweep.survey import Doubt, find_doubts, survey
from objkv.ops.sweep.sweep import Sweep

_SHOWN = 3
_MEANS: dict[Category, str] = {
    "orphan": "payloads without a record",
    "ghost": "records without a payload",
    "expired": "payloads unused for ttl_s",
    "over_quota": "payloads at the ends of the least used prefixes",
    "old_epoch": "payloads of an earlier weights_epoch or format",
    "stranger": "payloads without an identity document; deleted only if named",
    "temporary": "leftovers of killed writers",
    "quarantined": "payloads quarantined by objkv verify",
}


@command
def sweep(
    session: Session,
    apply: Annotated[
        bool, typer.Option("--apply", help="Delete the data found (default: report only).")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Sweep only this category; repeatable. One of {', '.join(CATEGORIES)}.",
            metavar="CATEGORY",
        ),
    ] = None,
    namespace: OneNamespace = None,
    grace_s: Annotated[
        float | None,
        time_option("Keep data younger than this instead of the setting sweep_grace_s", "--grace"),
    ] = None,
    strangers: Annotated[
        bool, typer.Option("--strangers", help="Let --apply delete the category stranger, too.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Proceed even if index and bucket do not seem to match."),
    ] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Delete at most this many items.", metavar="N")
    ] = None,
    workers: Workers = WORKERS,
) -> int:
    """Find unreachable and evictable data; delete it with --apply."""
    config = session.config
    limits = SweepLimits(
        apply=apply,
        grace_s=config.sweep_grace_s if grace_s is None else grace_s,
        only=_categories(only),
        strangers=strangers or "stranger" in (only or ()),
        force=force,
        removals_max=limit,
    )
    with upkeep(
        session,
        "sweep",
        writes=apply,
        workers=workers,
        namespace=namespace,
    ) as run:
        found = None
        doubts: tuple[Doubt, ...] = ()
        with run.interruptible():
            with session.out.waiting("reading namespaces"):
                found = survey(run.view, run.namespace)
                if not force:
                    doubts = find_doubts(run.view, found)
            if any(one.namespace is None for one in doubts):
                limits = replace(limits, apply=False)
            remover = Remover(run.view, limits, lambda: run.pool.halt("limit"))
            work = Sweep(run.view, found, limits, remover, doubts=doubts, workers=workers)
            run.run("sweeping leftovers", work.leftovers())
            run.run("sweeping payloads", work.parts())
            run.run("sweeping records", work.ghosts())
            if namespace is None:  # a tenant's quota covers all of its namespaces
                run.run("sweeping tenants over quota", work.quotas(config.quota_bytes))
            run.run("sweeping documents", work.documents())
        is_found = any(run.counters.counts[category] for category in CATEGORIES)
        is_empty = found is not None and not found.namespaces and not found.indexed
        if is_empty and not is_found and not session.out.machine:
            run.report_nothing()
        else:
            _show(run, limits.apply, doubts)
        is_left = bool(doubts) or (is_found and not limits.apply)
        return run.code(FOUND if is_left else FINE)


def _categories(only: list[str] | None) -> tuple[Category, ...]:
    for name in only or ():
        if name not in CATEGORIES:
            raise ConfigError(f"--only {name}: must be one of {', '.join(CATEGORIES)}")
    return tuple(one for one in CATEGORIES if not only or one in only)


def _show(run: Upkeep, apply: bool, doubts: Collection[Doubt]) -> None:
    counters, out = run.counters, run.session.out
    counts, nbytes = counters.counts, counters.nbytes
    beside = {
        name: counts[name]
        for name in ("young", "pinned", "doubted", "busy", "changed", "documents", "other")
    }
    if out.machine:
        categories = {one: {"payloads": counts[one], "nbytes": nbytes[one]} for one in CATEGORIES}
        document = run.report(
            "sweep",
            applied=apply,
            categories=categories,
            removed=counts["removed"],
            removed_bytes=nbytes["removed"],
            kept=beside,
            doubts=list(doubts),
        )
        out.document(document)
        return
    rows = [(one, counts[one], size(nbytes[one]), _MEANS[one]) for one in CATEGORIES if counts[one]]
    if rows:
        out.table(("", ">payloads", ">bytes", "~"), rows)
        out.table(("", ""), list(_some(counters)))
    else:
        out.line("nothing to sweep" if run.pool.ending == "complete" else "nothing found so far")
    kept = [f"{n:,} {name}" for name, n in beside.items() if n and name != "documents"]
    if kept:
        out.line("kept: " + ", ".join(kept))
    for doubt in doubts:
        out.line(f"kept, because {doubt.why}", "yellow")
    if apply:
        out.line(f"deleted {_removed(counters)}")
    elif any(one.namespace is None for one in doubts):
        out.line("nothing was deleted")
    elif rows:
        out.line("nothing was deleted: add --apply to delete")
    run.report_end()


def _some(counters: Counters) -> Iterator[tuple[str, str]]:
    """Yield the first keys of each category and the number of further ones."""
    for one in CATEGORIES:
        keys = [finding.key for finding in counters.findings if finding.kind == one][:_SHOWN]
        yield from ((one, key) for key in keys)
        if keys and counters.counts[one] > len(keys):
            yield "", f"{counters.counts[one] - len(keys):,} more: --json lists them"


def _removed(counters: Counters) -> str:
    """Describe the deletions; a record has no bytes in the bulk store."""
    ghosts = min(counters.counts["ghost"], counters.counts["removed"])
    entries = counters.counts["removed"] - ghosts
    parts = [f"{entries:,}, {size(counters.nbytes['removed'])}"] if entries or not ghosts else []
    parts += [f"{counted(ghosts, 'record')} of missing payloads"] if ghosts else []
    if documents := counters.counts["documents"]:
        parts.append(f"{counted(documents, 'document')} of old epochs or ended pins")
    return "; ".join(parts)
