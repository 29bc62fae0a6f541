"""``objkv verify``: verify stored payloads and their index records."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from objkv.cache.listed_index import GHOSTS_UNSEEN, is_listed
from objkv.cli.command import FINE, FOUND, Session, command
from objkv.cli.output import counted, size
from objkv.cli.upkeep import (
    MEMORY_BYTES,
    WORKERS,
    Deadline,
    MemoryBytes,
    OneNamespace,
    Upkeep,
    Workers,
    upkeep,
)
from objkv.errors import ConfigError
from objkv.ops.backends_view import (
    NamespacePart,
    StoredNamespace,
    read_namespace,
    stored_namespaces,
    stored_parts,
)
from objkv.ops.retrying import once
from objkv.ops.runs import Counters
from objkv.ops.sweep.survey import refuse_wrong_bulk
from objkv.ops.verify import Verify, choose_sample, unindexed
from objkv.ops.verify_payload import Budget

SAMPLE = 200
_WRONG = ("missing", "corrupt", "foreign", "mismatch", "hot")
_DONE = {
    "quarantined": "quarantined",
    "forgotten": "records of missing payloads removed",
    "mended": "repaired",
}
"""Repairs by JSON key, and the words that are printed for them."""


@command
def verify(
    session: Session,
    namespace: OneNamespace = None,
    sample: Annotated[
        int, typer.Option(min=1, help="Check this many payloads, chosen at random.", metavar="N")
    ] = SAMPLE,
    every: Annotated[bool, typer.Option("--all", help="Check all payloads.")] = False,
    quarantine: Annotated[
        bool,
        typer.Option("--quarantine", help="Report how --apply would repair payloads and records."),
    ] = False,
    apply: Annotated[
        bool,
        typer.Option(
            "--apply",
            help="With --quarantine: move bad payloads to quarantine/ and repair records.",
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Quarantine even if most payloads are bad.")
    ] = False,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the random sample.", metavar="N")
    ] = None,
    deadline_s: Deadline = None,
    memory_bytes: MemoryBytes = MEMORY_BYTES,
    workers: Workers = WORKERS,
) -> int:
    """Verify stored payloads and their index records."""
    if apply and not quarantine:
        raise ConfigError("--apply needs --quarantine")
    with upkeep(
        session,
        "verify",
        writes=apply,
        workers=workers,
        namespace=namespace,
        deadline_s=deadline_s,
    ) as run:
        chosen_of, is_empty, refusal = None, False, None
        with run.interruptible():
            with session.out.waiting("reading namespaces"):
                found, parts, indexed = _places(run)
            if apply and not force:
                refuse_wrong_bulk(run.view, indexed)
            work = Verify(
                run.view,
                found,
                quarantine=apply,
                force=force,
                budget=Budget(memory_bytes),
                workers=workers,
            )
            most = None if every else sample
            chosen_of = _check(run, work, (parts, indexed), most=most, seed=seed, apply=apply)
            if quarantine and not apply and not force:
                refusal = _refusal(run, work, indexed)
            is_empty = not parts and not indexed
        if is_empty and not session.out.machine:
            run.report_nothing()
        else:
            how = {"every": every, "quarantine": quarantine, "applied": apply, "refusal": refusal}
            _show(run, chosen_of, how)
        is_left = _is_bad_left(run.counters) or _is_index_lost(run.counters)
        return run.code(FOUND if is_left else FINE)


def _is_bad_left(counters: Counters) -> bool:
    """Whether bad payloads were found that this run did not repair."""
    counts = counters.counts
    return sum(counts[kind] for kind in _WRONG) > sum(counts[kind] for kind in _DONE)


def _check(
    run: Upkeep,
    work: Verify,
    places: tuple[list[NamespacePart], list[str]],
    *,
    most: int | None,
    seed: int | None,
    apply: bool,
) -> int | None:
    """Check everything in these places, or a sample of ``most`` payloads; then return the number of
    payloads that the sample was chosen from."""
    parts, indexed = places
    chosen_of = None
    if most is None:
        run.run("checking payloads", work.parts(parts))
        run.run("looking for missing payloads", work.missing(indexed, run.expected()))
    else:
        with run.session.out.waiting("choosing a sample"):
            sample = choose_sample(run.view, indexed, parts, size=most, seed=seed)
        chosen_of = sample.chosen_of
        run.run("checking payloads", work.sample(sample.keys))
        run.run("looking for records", unindexed(run.view, parts))
    if apply and run.pool.ending == "complete":
        run.run("quarantining", work.settle(run.counters))
    return chosen_of


def _refusal(run: Upkeep, work: Verify, indexed: list[str]) -> str | None:
    """Return why --apply would be refused; None if it would not."""
    if work.refusal is not None:
        return work.refusal
    try:
        refuse_wrong_bulk(run.view, indexed)
        work.refuse_doubtful(run.counters)
    except ConfigError as exc:
        return str(exc)
    return None


def _is_index_lost(counters: Counters) -> bool:
    """Whether most of the listed payloads have no record."""
    counts = counters.counts
    without = counts["unindexed"]
    checked = sum(counts[kind] for kind in ("ok", *_WRONG)) - counts["missing"]
    return without > (counts["listed"] - without if counts["listed"] else checked)


def _places(run: Upkeep) -> tuple[dict[str, StoredNamespace], list[NamespacePart], list[str]]:
    view, namespace = run.view, run.namespace
    names = [name for name in stored_namespaces(view.bulk) if namespace in (None, name)]
    known = [] if view.is_own_index else view.index.namespaces()
    every = {name: read_namespace(view.bulk, name) for name in names}
    found = run.with_keys(every)
    skipped = every.keys() - found.keys()
    indexed = [name for name in known if namespace in (None, name) and name not in skipped]
    return found, stored_parts(view.bulk, list(found), run.expected()), indexed


def _plan(counts: Mapping[str, int]) -> str:
    """Describe what --apply would do."""
    steps = (
        (counts["corrupt"] + counts["foreign"], "payload", "quarantine {}"),
        (counts["missing"], "record", "remove {} of missing payloads"),
        (counts["mismatch"] + counts["hot"], "record", "repair {}"),
    )
    return ", ".join(words.format(counted(n, what)) for n, what, words in steps if n)


def _show(run: Upkeep, chosen_of: int | None, how: dict[str, Any]) -> None:
    """``chosen_of``: the number of payloads that a sample was chosen from. ``how``: the options by
    their JSON keys, and why --apply would be refused."""
    counters, out = run.counters, run.session.out
    counts = counters.counts
    checked = sum(counts[kind] for kind in ("ok", *_WRONG))
    nbytes = sum(counters.nbytes[kind] for kind in ("ok", *_WRONG))
    if out.machine:
        document = run.report(
            "verify",
            **how,
            chosen_of=chosen_of,
            checked=checked,
            checked_bytes=nbytes,
            ghosts_seen=not is_listed(once(run.view.index)),
            **{kind: counts[kind] for kind in ("ok", *_WRONG, "unindexed", "changed", *_DONE)},
        )
        out.document(document)
        return
    wrong = sum(counts[kind] for kind in _WRONG)
    number = counted(checked, "payload")
    if chosen_of is not None and chosen_of > checked:
        number = f"{checked:,} of about {counted(chosen_of, 'payload')}, chosen at random"
    out.line(f"checked {number}, {size(nbytes)}: {wrong:,} bad")
    if chosen_of is not None and chosen_of > checked:
        out.line("--all checks all payloads")
    if counts["unindexed"]:
        out.line(f"{counts['unindexed']:,} more have no record: objkv sweep lists them")
    if _is_index_lost(counters):
        out.line(
            "most payloads have no record: the index was lost, or index_url or redis_prefix is "
            "wrong; objkv rebuild --apply restores the records",
            "yellow",
        )
    if is_listed(once(run.view.index)):
        out.line(GHOSTS_UNSEEN, "yellow")
    run.print_findings()
    done = [f"{counts[kind]:,} {words}" for kind, words in _DONE.items() if counts[kind]]
    if done:
        out.line(", ".join(done))
    elif wrong and not how["quarantine"]:
        out.line("nothing was changed: --quarantine --apply moves bad payloads to quarantine/")
    elif wrong and how["refusal"]:
        out.line(f"nothing was changed, and --apply would be refused: {how['refusal']}", "yellow")
    elif wrong and not how["applied"]:
        out.line(f"nothing was changed: --apply would {_plan(counts)}")
    elif wrong:
        out.line("nothing was changed: quarantining starts only after everything is checked")
    if how["applied"] and counters.omitted:
        out.line(
            f"{counters.omitted:,} more bad payloads were found than one run handles: run the "
            "command again",
            "yellow",
        )
    run.report_end()
