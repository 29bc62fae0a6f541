"""``objkv verify``: verify stored payloads and their index records."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from objkv.cache.bulk_index import MISSING_UNSEEN, is_listed
from objkv.cli.command import FINE, FOUND, Session, command
from objkv.cli.options import Namespace
from objkv.cli.output import counted, plain
from objkv.cli.upkeep import Upkeep, upkeep
from objkv.errors import ConfigError
from objkv.ops.backends_view import without_retries
from objkv.ops.formats import size
from objkv.ops.inventory.file import Inventory
from objkv.ops.inventory.findings import find_doubts
from objkv.ops.runs import Counters
from objkv.ops.verify import PAYLOADS, RECORDED, Budget, Verify, choose_sample

SAMPLE = 200
_MEMORY_BYTES = 1 << 30
"""For all payloads in flight."""
_WRONG = ("missing", "corrupt", "mismatch", "hot")
_UNRECORDED = ("orphan", "expired", "unidentified")
_DONE = {
    "quarantined": "quarantined",
    "forgotten": "removed from the index (payload missing)",
    "mended": "repaired",
}
"""Repairs by JSON key, and the words that are printed for them."""


@command
def verify(
    session: Session,
    namespace: Namespace = None,
    sample: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Check this many payloads, chosen at random. Default: {SAMPLE}.",
            metavar="N",
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Check all payloads that have a record.")
    ] = False,
    one_of: Annotated[
        str | None,
        typer.Option(
            "--part",
            help="With --all: check only this part of the payloads, such as 1/7, 2/7, … 7/7.",
            metavar="I/N",
        ),
    ] = None,
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
        bool,
        typer.Option(
            "--force",
            help="Quarantine even if most payloads are bad (20 or more) or sealed with other keys.",
        ),
    ] = False,
) -> int:
    """Verify stored payloads and their index records."""
    if apply and not quarantine:
        raise ConfigError("--apply needs --quarantine")
    if every and sample is not None:
        raise ConfigError("give only one of --all and --sample")
    if one_of is not None and not every:
        raise ConfigError("--part needs --all")
    number, of = _part(one_of or "1/1")
    shown = _Shown(None, one_of, quarantine, apply, None)
    with upkeep(session, "verify", writes=apply, namespace=namespace) as run:
        inventory, is_empty = run.inventory, False
        with run.interruptible():
            walk = run.walk(only_sealed_here=True, only_read=True)
            is_empty = not walk.scope.every and not walk.scope.old
            run.run("reading records", walk.records())
            run.run("listing payloads", walk.payloads())
            run.run("reading pins", walk.pins())
            if run.pool.ending == "complete":
                walk.judge(ttl_s=run.view.ttl_s)
                _count_unrecorded(run, inventory)
                work = Verify(
                    run.view,
                    walk.scope.namespaces,
                    quarantine=apply,
                    force=force,
                    budget=Budget(_MEMORY_BYTES),
                )
                doubts = find_doubts(inventory, walk.scope, ttl_s=run.view.ttl_s)
                wrong_bulk = next((one.why for one in doubts if one.is_of_bulk), None)
                if wrong_bulk is not None and apply and not force:
                    raise ConfigError(wrong_bulk)
                where = PAYLOADS if run.view.is_own_index else RECORDED
                if every:
                    work.refuse_missing(inventory.count(where), inventory.count("kind = 'missing'"))
                    parts = [p for p in inventory.slices(where) if p.fan[0] % of == number - 1]
                    units = work.parts(inventory, parts, where)
                else:
                    shown = replace(shown, chosen_of=inventory.count(where))
                    units = work.sample(choose_sample(inventory, where, sample or SAMPLE))
                run.run("checking payloads", units)
                if apply and run.pool.ending == "complete":
                    run.run("quarantining", work.settle(run.counters))
                if not apply and not force:
                    refusal = work.refusal or wrong_bulk or work.other_keys(run.counters)
                    shown = replace(shown, refusal=refusal)
        if is_empty and not session.out.machine:
            run.report_nothing()
        else:
            _show(run, shown, every=every)
        is_left = _is_bad_left(run.counters) or _is_index_lost(run.counters)
        return run.code(FOUND if is_left else FINE)


@dataclass(frozen=True, slots=True)
class _Shown:
    """What the report says besides the counts."""

    chosen_of: int | None
    """The number of payloads that a sample was chosen from."""
    part: str | None
    """The part of all payloads that was checked, such as 2/7."""
    quarantine: bool
    applied: bool
    refusal: str | None
    """Why --apply would be refused."""


def _count_unrecorded(run: Upkeep, inventory: Inventory) -> None:
    for kind in () if run.view.is_own_index else _UNRECORDED:
        # The records of newer ones may have been published after the records were read.
        old = f"kind = '{kind}' AND recorded IS NULL AND modified_s <= {inventory.begun_s}"
        run.counters.counts[kind] = inventory.count(old)
    run.counters.counts["recorded"] = inventory.count(f"{PAYLOADS} AND {RECORDED}")


def _part(text: str) -> tuple[int, int]:
    """Read ``2/7``. Raises ``ConfigError``."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of) <= 256):
        raise ConfigError(f"--part {text}: must be I/N, with I from 1 to N, and N at most 256")
    return int(number), int(of)


def _is_bad_left(counters: Counters) -> bool:
    """Whether bad payloads were found that this run did not repair."""
    counts = counters.counts
    return sum(counts[kind] for kind in _WRONG) > sum(counts[kind] for kind in _DONE)


def _is_index_lost(counters: Counters) -> bool:
    """Whether most of the listed payloads have no record."""
    return counters.counts["orphan"] > counters.counts["recorded"]


def _plan(counts: Mapping[str, int]) -> str:
    """Describe what --apply would do."""
    steps = (
        (counts["corrupt"], "payload", "quarantine {}"),
        (counts["missing"], "record", "remove {} of missing payloads"),
        (counts["mismatch"] + counts["hot"], "record", "repair {}"),
    )
    return ", ".join(words.format(counted(n, what)) for n, what, words in steps if n)


def _show(run: Upkeep, shown: _Shown, *, every: bool) -> None:
    chosen_of = shown.chosen_of
    counters, out = run.counters, run.session.out
    counts = counters.counts
    checked = sum(counts[kind] for kind in ("ok", *_WRONG))
    nbytes = sum(counters.nbytes[kind] for kind in ("ok", *_WRONG))
    if out.machine:
        run.report(
            "verify",
            every=every,
            **plain(shown),
            checked=checked,
            checked_bytes=nbytes,
            missing_seen=not is_listed(without_retries(run.view.index)),
            **{kind: counts[kind] for kind in ("ok", *_WRONG, *_UNRECORDED, "changed", *_DONE)},
        )
        return
    wrong = sum(counts[kind] for kind in _WRONG)
    number = counted(checked, "payload")
    if chosen_of is not None and chosen_of > checked:
        number = f"{checked:,} of {counted(chosen_of, 'payload')}, chosen at random"
    elif shown.part is not None:
        number = f"{number} of part {shown.part}"
    out.line(f"checked {number}, {size(nbytes)}: {wrong:,} bad")
    if chosen_of is not None and chosen_of > checked:
        out.line("--all checks all payloads that have a record")
    if unrecorded := sum(counts[kind] for kind in _UNRECORDED):
        out.line(f"{unrecorded:,} more have no record: objkv audit lists them")
    if _is_index_lost(counters):
        out.line(
            "most payloads have no record: the index was lost, or index_url or redis_prefix is "
            "wrong; objkv rebuild --apply restores the records",
            "yellow",
        )
    if is_listed(without_retries(run.view.index)):
        out.line(MISSING_UNSEEN, "yellow")
    out.table(("", "", "~"), [(one.kind, one.key, one.detail) for one in counters.findings])
    done = [f"{counts[kind]:,} {words}" for kind, words in _DONE.items() if counts[kind]]
    if done:
        out.line(", ".join(done))
    elif wrong and not shown.applied:
        options = "--apply" if shown.quarantine else "--quarantine --apply"
        if shown.refusal:
            out.line(
                f"nothing was changed, and {options} would be refused: {shown.refusal}", "yellow"
            )
        else:
            out.line(f"nothing was changed: {options} would {_plan(counts)}")
    elif wrong:
        out.line("nothing was changed: quarantining starts only after everything is checked")
    if shown.applied and counters.omitted:
        out.line(
            f"{counters.omitted:,} more bad payloads were found than one run handles: run the "
            "command again",
            "yellow",
        )
    run.report_end()
