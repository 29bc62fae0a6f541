"""``objkv sweep``: what nobody can use, found and removed."""

from collections.abc import Iterator
from typing import Annotated

import typer

from objkv.cli.command import FINE, FOUND, Session, command
from objkv.cli.output import counted, size
from objkv.cli.upkeep import WORKERS, OneNamespace, Restart, Upkeep, Workers, upkeep
from objkv.errors import ConfigError
from objkv.ops.runs import Counters
from objkv.ops.sweep.remove import CATEGORIES, Category, Remover, SweepLimits
from objkv.ops.sweep.survey import refuse_mismatch, survey
from objkv.ops.sweep.sweep import Sweep

_SHOWN = 3
_MEANS: dict[Category, str] = {
    "orphan": "payloads without a record",
    "ghost": "records without a payload",
    "expired": "payloads that nobody used while a record lives",
    "over_quota": "ends of prefixes that are used least",
    "old_epoch": "of an earlier weights_epoch",
    "stranger": "in namespaces without identity document: removed with --strangers",
    "temporary": "left by killed writers",
    "quarantined": "taken out of use by objkv verify",
}


@command
def sweep(
    session: Session,
    apply: Annotated[
        bool, typer.Option("--apply", help="Remove what is found. Without it: only say.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help=f"One of {', '.join(CATEGORIES)}; give it again for more.", metavar="CATEGORY"
        ),
    ] = None,
    namespace: OneNamespace = None,
    grace_s: Annotated[
        float | None,
        typer.Option(min=0, help="Leave younger ones alone; sweep_grace_s.", metavar="SECONDS"),
    ] = None,
    strangers: Annotated[bool, typer.Option("--strangers", help="Remove strangers, too.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Although an end looks wiped or wrong.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Remove at most so many.", metavar="N")
    ] = None,
    workers: Workers = WORKERS,
    restart: Restart = False,
) -> int:
    """Find what nobody can use, and with --apply remove it."""
    config = session.config
    limits = SweepLimits(
        apply=apply,
        grace_s=config.sweep_grace_s if grace_s is None else grace_s,
        only=_categories(only),
        strangers=strangers,
        force=force,
        removals_max=limit,
    )
    high, low = config.quota_high_percent, config.quota_low_percent
    # All that decides what is found: a run continues another only where they are the same.
    settings = (
        *(apply, sorted(limits.only), namespace, limits.grace_s, strangers),
        *(config.ttl_s, config.quota_bytes, high, low),
    )
    with upkeep(session, "sweep", *settings, writes=apply, workers=workers, restart=restart) as run:
        found = None
        with run.interruptible():
            with session.out.waiting("reading namespaces"):
                found = survey(run.view, run.pick(namespace))
                if not force:
                    refuse_mismatch(run.view, found)
            remover = Remover(run.view, limits, lambda: run.pool.halt("limit"))
            work = Sweep(run.view, found, limits, remover, workers=workers)
            run.run("sweeping leftovers", work.leftovers())
            run.run("sweeping payloads", work.parts())
            run.run("sweeping records", work.ghosts())
            if namespace is None:  # a tenant's quota is for all of its namespaces
                quotas = work.quotas(config.quota_bytes, high_percent=high, low_percent=low)
                run.run("sweeping beyond quotas", quotas)
            run.run("sweeping documents", work.documents())
        is_found = any(run.counters.counts[category] for category in CATEGORIES)
        is_empty = found is not None and not found.namespaces and not found.indexed
        if is_empty and not is_found and not session.out.machine:
            run.report_nothing()
        else:
            _show(run, apply)
        return run.code(FOUND if is_found and not apply else FINE)


def _categories(only: list[str] | None) -> tuple[Category, ...]:
    for name in only or ():
        if name not in CATEGORIES:
            raise ConfigError(f"--only {name}: write one of {', '.join(CATEGORIES)}")
    return tuple(one for one in CATEGORIES if not only or one in only)


def _show(run: Upkeep, apply: bool) -> None:
    counters, out = run.counters, run.session.out
    counts, nbytes = counters.counts, counters.nbytes
    beside = {
        name: counts[name] for name in ("young", "pinned", "busy", "changed", "documents", "other")
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
            uploads_listed=not counts["not_listed"],
        )
        out.document(document)
        return
    rows = [(one, counts[one], size(nbytes[one]), _MEANS[one]) for one in CATEGORIES if counts[one]]
    if rows:
        out.table(("", ">payloads", ">bytes", ""), rows)
        out.table(("", ""), list(_some(counters)))
    else:
        out.line("nothing to sweep" if run.pool.ending == "complete" else "nothing found so far")
    told = [f"{count:,} {name}" for name, count in beside.items() if count]
    if told:
        out.line("left alone: " + ", ".join(told))
    if counts["not_listed"]:
        out.line(
            "uploads in parts may not be listed: a rule of the bucket has to end them", "yellow"
        )
    if apply:
        out.line(f"removed {_removed(counters)}")
    elif rows:
        out.line("nothing was removed: --apply does it")
    run.report_end()


def _some(counters: Counters) -> Iterator[tuple[str, str]]:
    """The first few of each category, and how many more there are."""
    for one in CATEGORIES:
        keys = [finding.key for finding in counters.findings if finding.kind == one][:_SHOWN]
        yield from ((one, key) for key in keys)
        if keys and counters.counts[one] > len(keys):
            yield "", f"{counters.counts[one] - len(keys):,} more: --json names them"


def _removed(counters: Counters) -> str:
    """What was removed; a record has no bytes in the bulk store."""
    ghosts = min(counters.counts["ghost"], counters.counts["removed"])
    entries = counters.counts["removed"] - ghosts
    told = [f"{entries:,}, {size(counters.nbytes['removed'])}"] if entries or not ghosts else []
    told += [f"{counted(ghosts, 'record')} of payloads that are not there"] if ghosts else []
    return "; ".join(told)
