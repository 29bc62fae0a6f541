"""``objkv verify``: stored payloads, checked to the last byte."""

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
_DONE = ("quarantined", "forgotten", "mended")


@command
def verify(
    session: Session,
    namespace: OneNamespace = None,
    sample: Annotated[
        int, typer.Option(min=1, help="Check so many, chosen by chance.", metavar="N")
    ] = SAMPLE,
    every: Annotated[bool, typer.Option("--all", help="Check all of them.")] = False,
    quarantine: Annotated[
        bool,
        typer.Option("--quarantine", help="Take what is wrong out of use. Without it: only say."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Quarantine, although most of all is wrong.")
    ] = False,
    seed: Annotated[int | None, typer.Option(help="Of the sample.", metavar="N")] = None,
    deadline_s: Deadline = None,
    memory_bytes: MemoryBytes = MEMORY_BYTES,
    workers: Workers = WORKERS,
    restart: Restart = False,
) -> int:
    """Check stored payloads: every byte, claim and record."""
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
        is_wrong = any(run.counters.counts[kind] for kind in _WRONG) or _is_index_lost(run.counters)
        return run.code(FOUND if is_wrong else FINE)


def _check(
    run: Upkeep,
    work: Verify,
    places: tuple[list[NamespacePart], list[str]],
    *,
    most: int | None,
    seed: int | None,
    quarantine: bool,
) -> int | None:
    """All that is in these places, or a sample of ``most``; then tells of how many."""
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
            run.run("taking out of use", work.settle(run.counters))
    except ConfigError:  # what was found by wrong settings is not to be gone on from
        run.checkpoint.close(complete=True)
        raise
    return chosen_of


def _is_index_lost(counters: Counters) -> bool:
    """Whether most of the payloads that were listed have no record."""
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
    """``chosen_of``: payloads that a sample was chosen from."""
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
    told = counted(checked, "payload")
    if chosen_of is not None and chosen_of > checked:
        told = f"{checked:,} of about {counted(chosen_of, 'payload')}, chosen by chance"
    out.line(f"checked {told}, {size(nbytes)}: {wrong:,} wrong")
    if chosen_of is not None and chosen_of > checked:
        out.line("--all checks all of them")
    if counts["unindexed"]:
        out.line(f"{counts['unindexed']:,} more have no record: objkv sweep lists them")
    if _is_index_lost(counters):
        out.line(
            "that is most: the index was lost, or index_url or redis_prefix is not theirs; objkv "
            "rebuild gives them their records",
            "yellow",
        )
    run.print_findings()
    done = [f"{counts[kind]:,} {kind}" for kind in _DONE if counts[kind]]
    if done:
        out.line(", ".join(done))
    elif wrong and not quarantine:
        out.line("nothing was changed: --quarantine takes them out of use")
    elif wrong:
        out.line("nothing was changed: that comes after all has been judged")
    if quarantine and counters.omitted:
        out.line(
            f"{counters.omitted:,} more were found than are taken at once: run it again", "yellow"
        )
    run.report_end()
