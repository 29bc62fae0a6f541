"""``objkv rebuild``: rebuild the index from the bulk store alone."""

from collections.abc import Mapping
from typing import Annotated

import typer

from objkv.cli.command import FINE, FOUND, Session, command
from objkv.cli.options import Namespace
from objkv.cli.output import counted
from objkv.cli.upkeep import Upkeep, upkeep
from objkv.ops.backends_view import StoredNamespace
from objkv.ops.formats import size
from objkv.ops.rebuild import Rebuild

_MEANS = {
    "restored": "had no record",
    "corrected": "had a wrong record",
    "present": "had a correct record",
    "written": "were being written by others",
    "corrupt": "are unreadable or of another key; verify --all --quarantine --apply (or a sweep, "
    "without a record) removes them",
}


@command
def rebuild(
    session: Session,
    namespace: Namespace = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Write the index (default: count only).")
    ] = False,
) -> int:
    """Rebuild the index from the bulk store.

    Counts only; --apply writes the index.
    """
    if session.config.index_url.startswith("bulk:"):
        session.has_bulk()
        document = {"command": "rebuild", "ending": "complete", "complete": True, "own_index": True}
        if not session.out.document(document):
            session.out.line("the bulk folder is its own index; no rebuild is needed")
        return FINE
    with upkeep(session, "rebuild", writes=apply, namespace=namespace) as run:
        found: Mapping[str, StoredNamespace] = {}
        with run.interruptible():
            walk = run.walk(only_sealed_here=True)
            found = walk.scope.namespaces
            run.run("listing payloads", walk.payloads())
            work = Rebuild(run.view, apply=apply)
            run.run("restoring records", work.parts(run.inventory, found))
            if apply:
                parts = work.parts(run.inventory, found, lost=True)
                run.run("restoring records lost since", parts)
            run.run("restoring pins and totals", work.namespaces(found))
        if not found and run.pool.ending == "complete" and not session.out.machine:
            run.report_nothing()
        else:
            _show(run, found, apply=apply)
        counts = run.counters.counts
        is_left = not apply and (counts["restored"] or counts["corrected"])
        return run.code(FOUND if is_left or counts["corrupt"] else FINE)


def _show(run: Upkeep, found: Mapping[str, StoredNamespace], *, apply: bool) -> None:
    counters, out = run.counters, run.session.out
    numbers = {kind: counters.counts[kind] for kind in _MEANS}
    if out.machine:
        run.report(
            "rebuild",
            applied=apply,
            own_index=False,
            namespaces=len(found),
            left_out={one.name: one.problem for one in _left_out(found)},
            **numbers,
            pins=counters.counts["pins"],
        )
        return
    rows = [
        (kind, numbers[kind], size(counters.nbytes[kind]), _MEANS[kind])
        for kind in _MEANS
        if numbers[kind] or kind == "restored"
    ]
    out.table(("", ">payloads", ">bytes", "~"), rows)
    did = f"; {counted(counters.counts['pins'], 'chunk')} pinned"
    out.line(f"{counted(len(found), 'namespace')}{did if apply else ''}")
    for one in _left_out(found):
        out.line(
            f"{one.name} was left out: {one.problem}; a replica of that model writes it when it "
            "starts (delete a damaged one first); then rebuild again",
            "yellow",
        )
    for finding in counters.findings:
        out.line(f"{finding.kind} {finding.key}: {finding.detail}", "yellow")
    if not apply:
        out.line("nothing was written: add --apply to write the index")
    run.report_end()


def _left_out(found: Mapping[str, StoredNamespace]) -> list[StoredNamespace]:
    """Return the namespaces that cannot be restored without their documents."""
    return [one for one in found.values() if not one.is_known]
