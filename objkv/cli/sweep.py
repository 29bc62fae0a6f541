"""``objkv sweep``: find and delete unreachable and evictable data."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Annotated

import typer

from objkv.cli.command import FINE, FOUND, Session, command
from objkv.cli.options import Namespace, time_option
from objkv.cli.output import counted
from objkv.cli.upkeep import Upkeep, upkeep
from objkv.ops.formats import size
from objkv.ops.inventory.findings import MEANINGS, REMEDIES, Doubt, find_doubts
from objkv.ops.inventory.walk import Walk
from objkv.ops.runs import Counters
from objkv.ops.sweep.remove import CATEGORIES, Category, SweepLimits
from objkv.ops.sweep.sweep import Sweep

_SHOWN = 3
_MEANS: dict[Category, str] = {
    **{kind: MEANINGS[kind] for kind in CATEGORIES if kind != "over_quota"},
    "over_quota": "payloads at the ends of the least used prefixes",
}


@command
def sweep(
    session: Session,
    apply: Annotated[
        bool, typer.Option("--apply", help="Delete the data found (default: report only).")
    ] = False,
    namespace: Namespace = None,
    grace_s: Annotated[
        float | None,
        time_option("Keep data younger than this instead of the setting sweep_grace_s", "--grace"),
    ] = None,
    unidentified: Annotated[
        bool,
        typer.Option("--unidentified", help="Let --apply delete the category unidentified, too."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Proceed even if index and bucket do not seem to match.")
    ] = False,
) -> int:
    """Find unreachable and evictable data; delete it with --apply."""
    config = session.config
    grace_s = config.sweep_grace_s if grace_s is None else grace_s
    limits = SweepLimits(apply=apply, grace_s=grace_s, unidentified=unidentified)
    with upkeep(session, "sweep", writes=apply, namespace=namespace) as run:
        is_empty, doubts = False, tuple[Doubt, ...]()
        with run.interruptible():
            walk = run.walk()
            is_empty = not walk.scope.every
            run.run("reading records", walk.records())
            run.run("listing payloads", walk.payloads())
            run.run("listing leftovers", walk.leftovers())
            if run.pool.ending == "complete":
                doubts = _sweep(run, walk, limits, config.quota_bytes, force=force)
        is_found = any(run.counters.counts[category] for category in CATEGORIES)
        if is_empty and not is_found and not session.out.machine:
            run.report_nothing()
        else:
            is_applied = apply and not any(one.namespace is None for one in doubts)
            _show(run, is_applied, doubts, unidentified=unidentified)
        counts = run.counters.counts
        is_kept = bool(counts["unidentified"]) and not unidentified
        is_left = bool(doubts or counts["full"]) or is_kept or (is_found and not apply)
        return run.code(FOUND if is_left else FINE)


def _sweep(
    run: Upkeep, walk: Walk, limits: SweepLimits, quota_bytes: int, *, force: bool
) -> tuple[Doubt, ...]:
    """Sweep what the walk found, and return what was kept because it looks like a mistake:
    nothing with ``force``."""
    doubts = tuple[Doubt, ...]()
    walk.judge(ttl_s=run.view.ttl_s)
    if not force and not run.view.is_own_index:
        doubts = find_doubts(walk.inventory, walk.scope, ttl_s=run.view.ttl_s)
    if any(one.namespace is None for one in doubts):
        limits = replace(limits, apply=False)
    work = Sweep(run.view, walk, limits, doubts=doubts)
    run.run("sweeping leftovers", work.leftovers())
    run.run("sweeping payloads", work.parts())
    run.run("sweeping records", work.missing())
    if run.namespace is None:  # a tenant's quota covers all of its namespaces
        run.run("sweeping tenants over quota", work.quotas(quota_bytes))
    run.run("sweeping documents", work.documents())
    run.run("counting records", work.totals())
    return doubts


def _show(run: Upkeep, apply: bool, doubts: Collection[Doubt], *, unidentified: bool) -> None:
    counters, out = run.counters, run.session.out
    counts, nbytes = counters.counts, counters.nbytes
    names = ("young", "pinned", "doubted", "busy", "changed", "documents")
    beside = {name: counts[name] for name in names}
    if out.machine:
        run.report(
            "sweep",
            applied=apply,
            categories={
                one: {"payloads": counts[one], "nbytes": nbytes[one]} for one in CATEGORIES
            },
            removed=counts["removed"],
            removed_bytes=nbytes["removed"],
            kept=beside,
            doubts=doubts,
        )
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
    if apply and counts["unidentified"] and not unidentified:
        out.line(
            f"{counts['unidentified']:,} unidentified kept: {REMEDIES['unidentified']}", "yellow"
        )
    for one in counters.findings:
        if one.kind == "full":
            out.line(
                f"tenant {one.key}: pins alone fill the quota, so saves stop: objkv pin --list, "
                "objkv unpin, or a larger quota_bytes",
                "yellow",
            )
    if counts["busy"]:
        out.line("busy ones are being written: a later sweep judges them")
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
    forgotten = min(counters.counts["missing"], counters.counts["removed"])
    entries = counters.counts["removed"] - forgotten
    parts = [f"{entries:,}, {size(counters.nbytes['removed'])}"] if entries or not forgotten else []
    parts += [f"{counted(forgotten, 'record')} of missing payloads"] if forgotten else []
    if documents := counters.counts["documents"]:
        parts.append(f"{counted(documents, 'document')} of old epochs or ended pins")
    return "; ".join(parts)
