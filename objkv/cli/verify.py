"""``objkv verify``: verify stored payloads and their index records."""

from typing import Annotated

import typer

from objkv.cli.command import FINE, FOUND, Session, command
from objkv.cli.output import counted, size
from objkv.cli.upkeep import (
    MEMORY_BYTES,
    WORKERS,
    Deadline,
    MemoryBytes,
    OneNamespace,
    Restart,
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
        typer.Option(
            "--quarantine", help="Move bad payloads to quarantine/ (default: report only)."
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
    restart: Restart = False,
) -> int:
    """Verify stored payloads and their index records."""
    with upkeep(
        session,
        "verify",
        namespace,
        quarantine,
        writes=quarantine,
        workers=workers,
        deadline_s=deadline_s,
        restart=restart,
        resumable=every,
    ) as run:
        chosen_of, is_empty = None, False
        with run.interruptible():
            with session.out.waiting("reading namespaces"):
                found, parts, indexed = _places(run, run.pick(namespace))
            if quarantine and not force:
                refuse_wrong_bulk(run.view, indexed)
            work = Verify(
                run.view,
                found,
                quarantine=quarantine,
                force=force,
                budget=Budget(memory_bytes),
                workers=workers,
            )
            most = None if every else sample
            chosen_of = _check(
                run, work, (parts, indexed), most=most, seed=seed, quarantine=quarantine
            )
            is_empty = not parts and not indexed
        if is_empty and not session.out.machine:
            run.report_nothing()
        else:
            _show(run, chosen_of, every=every, quarantine=quarantine)
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
    quarantine: bool,
) -> int | None:
    """Check everything in these places, or a sample of ``most`` payloads; then return the number of
    payloads that the sample was chosen from."""
    parts, indexed = places
    chosen_of = None
    try:
        if most is None:
            run.run("checking payloads", work.parts(parts))
            run.run("looking for missing payloads", work.missing(indexed))
        else:
            with run.session.out.waiting("choosing a sample"):
                sample = choose_sample(run.view, indexed, parts, size=most, seed=seed)
            chosen_of = sample.chosen_of
            run.run("checking payloads", work.sample(sample.keys))
            run.run("looking for records", unindexed(run.view, parts))
        if quarantine and run.pool.ending == "complete":
            run.run("quarantining", work.settle(run.counters))
    except ConfigError:  # findings under wrong settings must not be resumed
        run.checkpoint.close(complete=True)
        raise
    return chosen_of


def _is_index_lost(counters: Counters) -> bool:
    """Whether most of the listed payloads have no record."""
    counts = counters.counts
    without = counts["unindexed"]
    checked = sum(counts[kind] for kind in ("ok", *_WRONG)) - counts["missing"]
    return without > (counts["listed"] - without if counts["listed"] else checked)


def _places(
    run: Upkeep, namespace: str | None
) -> tuple[dict[str, StoredNamespace], list[NamespacePart], list[str]]:
    view = run.view
    names = [name for name in stored_namespaces(view.bulk) if namespace in (None, name)]
    known = [] if view.is_own_index else view.index.namespaces()
    every = {name: read_namespace(view.bulk, name) for name in names}
    found = run.with_keys(every)
    skipped = every.keys() - found.keys()
    indexed = [name for name in known if namespace in (None, name) and name not in skipped]
    return found, stored_parts(view.bulk, list(found)), indexed


def _show(run: Upkeep, chosen_of: int | None, *, every: bool, quarantine: bool) -> None:
    """``chosen_of``: the number of payloads that a sample was chosen from."""
    counters, out = run.counters, run.session.out
    counts = counters.counts
    checked = sum(counts[kind] for kind in ("ok", *_WRONG))
    nbytes = sum(counters.nbytes[kind] for kind in ("ok", *_WRONG))
    if out.machine:
        document = run.report(
            "verify",
            every=every,
            quarantine=quarantine,
            chosen_of=chosen_of,
            checked=checked,
            checked_bytes=nbytes,
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
            "wrong; objkv rebuild restores the records",
            "yellow",
        )
    run.print_findings()
    done = [f"{counts[kind]:,} {words}" for kind, words in _DONE.items() if counts[kind]]
    if done:
        out.line(", ".join(done))
    elif wrong and not quarantine:
        out.line("nothing was changed: add --quarantine to move bad payloads to quarantine/")
    elif wrong:
        out.line("nothing was changed: quarantining starts only after everything is checked")
    if quarantine and counters.omitted:
        out.line(
            f"{counters.omitted:,} more bad payloads were found than one run handles: run the "
            "command again",
            "yellow",
        )
    run.report_end()
