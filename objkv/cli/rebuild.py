"""``objkv rebuild``: rebuild the index from the bulk store alone."""

from typing import Annotated

import typer

from objkv.cli.command import FINE, FOUND, Session, command
from objkv.cli.output import counted, size
from objkv.cli.upkeep import (
    WORKERS,
    OneNamespace,
    Upkeep,
    Workers,
    upkeep,
)
from objkv.ops.backends_view import StoredNamespace, read_namespace, stored_namespaces, stored_parts
from objkv.ops.rebuild import Rebuild

_COUNTS = ("restored", "corrected", "present", "written", "unreadable", "foreign", "other")
_MEANS = {
    "restored": "had no record",
    "corrected": "had a wrong record",
    "present": "had a correct record",
    "written": "were being written by others",
    "unreadable": "are damaged or not from objkv; objkv sweep removes them without a record",
    "foreign": "belong to another key; objkv sweep removes them without a record",
    "other": "entries are not payloads",
}


@command
def rebuild(
    session: Session,
    namespace: OneNamespace = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Write the index (default: count only).")
    ] = False,
    workers: Workers = WORKERS,
) -> int:
    """Rebuild the index from the bulk store.

    Counts only; --apply writes the index.
    """
    if session.config.index_url.startswith("bulk:"):
        return _nothing_to_do(session)
    with upkeep(
        session,
        "rebuild",
        writes=apply,
        workers=workers,
        namespace=namespace,
    ) as run:
        bulk, found, is_empty = run.view.bulk, dict[str, StoredNamespace](), False
        with run.interruptible():
            with session.out.waiting("reading namespaces"):
                names = [one for one in stored_namespaces(bulk) if run.namespace in (None, one)]
                is_empty = not names
                found = run.with_keys({name: read_namespace(bulk, name) for name in names})
                # If the index has lost records, its totals say little.
                parts = stored_parts(bulk, list(found))
            work = Rebuild(run.view, apply=apply)
            run.run("restoring records", work.parts(parts, found))
            run.run("looking for records lost since", work.lost(parts, found))
            run.run("restoring pins and totals", work.namespaces(found))
        if is_empty and not session.out.machine:
            run.report_nothing()
        else:
            _show(run, len(found), apply=apply)
        counts = run.counters.counts
        is_left = not apply and (counts["restored"] or counts["corrected"])
        return run.code(FOUND if is_left or counts["unreadable"] or counts["foreign"] else FINE)


def _nothing_to_do(session: Session) -> int:
    if session.out.machine:
        document = {"command": "rebuild", "ending": "complete", "complete": True, "own_index": True}
        session.out.document(document)
    else:
        session.out.line("the bulk folder is its own index; no rebuild is needed")
    return FINE


def _show(run: Upkeep, namespaces: int, *, apply: bool) -> None:
    counters, out = run.counters, run.session.out
    numbers = {kind: counters.counts[kind] for kind in _COUNTS}
    if out.machine:
        document = run.report(
            "rebuild",
            applied=apply,
            own_index=False,
            namespaces=namespaces,
            **numbers,
            pins=counters.counts["pins"],
        )
        out.document(document)
        return
    rows = [
        (kind, numbers[kind], size(counters.nbytes[kind]), _MEANS[kind])
        for kind in _COUNTS
        if numbers[kind] or kind == "restored"
    ]
    out.table(("", ">payloads", ">bytes", "~"), rows)
    did = f"; {counted(counters.counts['pins'], 'chunk')} pinned"
    out.line(f"{counted(namespaces, 'namespace')}{did if apply else ''}")
    for finding in counters.findings:
        out.line(f"{finding.kind} {finding.key}: {finding.detail}", "yellow")
    if not apply:
        out.line("nothing was written: add --apply to write the index")
    run.report_end()
