"""``objkv verify``: verify stored payloads and their index records."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from objkv.cache.bulk_index import MISSING_UNSEEN, is_listed
from objkv.cli.command import FINE, FOUND, Session, command
from objkv.cli.output import counted, plain
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
from objkv.ops.formats import size
from objkv.ops.inventory.file import Inventory
from objkv.ops.inventory.findings import find_doubts
from objkv.ops.inventory.walk import Walk
from objkv.ops.retrying import once
from objkv.ops.runs import Counters
from objkv.ops.verify import PAYLOADS, RECORDED, Verify, choose_sample
from objkv.ops.verify_payload import Budget

SAMPLE = 200
_WRONG = ("missing", "corrupt", "mismatch", "hot")
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
    if one_of is not None and not every:
        raise ConfigError("--part needs --all")
    part = _part(one_of or "1/1")
    with (
        upkeep(
            session,
            "verify",
            writes=apply,
            workers=workers,
            namespace=namespace,
            deadline_s=deadline_s,
        ) as run,
        closing(Inventory()) as inventory,
    ):
        shown = _Shown(None, quarantine, apply, None)
        is_empty = False
        with run.interruptible():
            walk = run.walk(inventory, only_sealed_here=True)
            is_empty = not walk.places.every
            run.run("reading records", walk.records())
            run.run("listing payloads", walk.payloads())
            if run.pool.ending == "complete":
                work = Verify(
                    run.view,
                    walk.places.namespaces,
                    quarantine=apply,
                    force=force,
                    budget=Budget(memory_bytes),
                )
                chosen = _Chosen(None if every else sample, seed, part)
                shown = _verify(run, walk, work, chosen, shown, is_forced=force)
        if is_empty and not session.out.machine:
            run.report_nothing()
        else:
            _show(run, shown, every=every)
        is_left = _is_bad_left(run.counters) or _is_index_lost(run.counters)
        return run.code(FOUND if is_left else FINE)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The payloads to check."""

    most: int | None
    """None for all."""
    seed: int | None
    part: tuple[int, int]
    """Which of how many parts of the payloads, from 1."""


@dataclass(frozen=True, slots=True)
class _Shown:
    """What the report says besides the counts."""

    chosen_of: int | None
    """The number of payloads that a sample was chosen from."""
    quarantine: bool
    applied: bool
    refusal: str | None
    """Why --apply would be refused."""


def _verify(
    run: Upkeep, walk: Walk, work: Verify, chosen: _Chosen, shown: _Shown, *, is_forced: bool
) -> _Shown:
    """Check what the walk found, then quarantine or repair on request."""
    inventory, applied = walk.inventory, shown.applied
    walk.judge(ttl_s=run.view.ttl_s)
    where = PAYLOADS if run.view.is_own_index else RECORDED
    doubts = find_doubts(inventory, ttl_s=run.view.ttl_s) if not run.view.is_own_index else ()
    wrong_bulk = next((one.why for one in doubts if one.is_of_bulk), None)
    if applied and not is_forced and wrong_bulk:
        raise ConfigError(wrong_bulk)
    for kind in ("orphan", "expired"):
        # The records of newer ones may have been published after the records were read.
        old = f"kind = '{kind}' AND modified_s <= {inventory.begun_s}"
        run.counters.counts[kind] = inventory.count(old)
    run.counters.counts["recorded"] = inventory.count(f"{PAYLOADS} AND {RECORDED}")
    if chosen.most is None:
        number, of = chosen.part
        parts = [one for one in inventory.slices(where) if one.fan[0] % of == number - 1]
        work.refuse_missing(inventory.count(where), inventory.count("kind = 'missing'"))
        run.run("checking payloads", work.parts(inventory, parts, where))
    else:
        keys, every = choose_sample(inventory, where, size=chosen.most, seed=chosen.seed)
        shown = replace(shown, chosen_of=every)
        run.run("checking payloads", work.sample(keys))
    if applied and run.pool.ending == "complete":
        run.run("quarantining", work.settle(run.counters))
    if shown.quarantine and not applied and not is_forced:
        shown = replace(shown, refusal=work.refusal or wrong_bulk or _other_keys(run, work))
    return shown


def _other_keys(run: Upkeep, work: Verify) -> str | None:
    try:
        work.refuse_doubtful(run.counters)
    except ConfigError as exc:
        return str(exc)
    return None


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
        document = run.report(
            "verify",
            every=every,
            **plain(shown),
            checked=checked,
            checked_bytes=nbytes,
            missing_seen=not is_listed(once(run.view.index)),
            **{
                kind: counts[kind]
                for kind in ("ok", *_WRONG, "orphan", "expired", "changed", *_DONE)
            },
        )
        out.document(document)
        return
    wrong = sum(counts[kind] for kind in _WRONG)
    number = counted(checked, "payload")
    if chosen_of is not None and chosen_of > checked:
        number = f"{checked:,} of {counted(chosen_of, 'payload')}, chosen at random"
    out.line(f"checked {number}, {size(nbytes)}: {wrong:,} bad")
    if chosen_of is not None and chosen_of > checked:
        out.line("--all checks all payloads")
    if unrecorded := counts["orphan"] + counts["expired"]:
        out.line(f"{unrecorded:,} more have no record: objkv sweep lists them")
    if _is_index_lost(counters):
        out.line(
            "most payloads have no record: the index was lost, or index_url or redis_prefix is "
            "wrong; objkv rebuild --apply restores the records",
            "yellow",
        )
    if is_listed(once(run.view.index)):
        out.line(MISSING_UNSEEN, "yellow")
    run.print_findings()
    done = [f"{counts[kind]:,} {words}" for kind, words in _DONE.items() if counts[kind]]
    if done:
        out.line(", ".join(done))
    elif wrong and not shown.quarantine:
        out.line("nothing was changed: --quarantine --apply moves bad payloads to quarantine/")
    elif wrong and shown.refusal:
        out.line(f"nothing was changed, and --apply would be refused: {shown.refusal}", "yellow")
    elif wrong and not shown.applied:
        out.line(f"nothing was changed: --apply would {_plan(counts)}")
    elif wrong:
        out.line("nothing was changed: quarantining starts only after everything is checked")
    if shown.applied and counters.omitted:
        out.line(
            f"{counters.omitted:,} more bad payloads were found than one run handles: run the "
            "command again",
            "yellow",
        )
    run.report_end()
