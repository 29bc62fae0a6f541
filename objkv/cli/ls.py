"""``objkv ls``: namespaces, or the prefixes stored in one."""

from collections.abc import Iterable, Sequence, Set
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from objkv.cli.command import FINE, Session, command
from objkv.cli.output import Printer, counted
from objkv.cli.upkeep import WORKERS
from objkv.errors import ConfigError
from objkv.ops.backends_view import BackendsView, stored_namespaces
from objkv.ops.formats import age, size
from objkv.ops.inventory.file import Inventory
from objkv.ops.inventory.tree import Branch, PrefixSummary, branches, make_tree
from objkv.ops.inventory.tree import prefixes as list_prefixes
from objkv.ops.inventory.walk import Walk, WalkScope, find_scope
from objkv.ops.listing import (
    NamespaceSummary,
    TenantTotals,
    counted_namespaces,
    find_namespace,
    list_namespaces,
    list_tenants,
    payload_namespaces,
)
from objkv.ops.runs import Unit, WorkPool

if TYPE_CHECKING:
    from objkv.assembly.backends import Backends

_LIMIT = 50


@command
def ls(
    session: Session,
    namespace: Annotated[
        str | None,
        typer.Argument(
            help="List the prefixes of this namespace: its hex digits, MODEL or TENANT/MODEL, "
            "or a beginning.",
            metavar="NAMESPACE",
        ),
    ] = None,
    namespace_option: Annotated[
        str | None, typer.Option("--namespace", "-n", help="The same as NAMESPACE.", metavar="NS")
    ] = None,
    prefixes: Annotated[
        bool, typer.Option("--prefixes", help="List prefixes, in all namespaces if none is given.")
    ] = False,
    tree: Annotated[
        bool, typer.Option("--tree", help="Draw prefixes as a tree of shared chunks.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, help="Rows to print.", metavar="N")] = _LIMIT,
    bulk: Annotated[
        bool, typer.Option("--bulk", help="Count payloads in the bulk store, not index records.")
    ] = False,
) -> int:
    """List namespaces, or the prefixes stored in one."""
    if bulk and (prefixes or tree):
        raise ConfigError("--bulk counts namespaces; only the index can list prefixes")
    if prefixes and tree:
        raise ConfigError("give either --prefixes or --tree")
    if namespace_option is not None:
        if namespace is not None:
            raise ConfigError("give the namespace once: as NAMESPACE or with -n")
        namespace = namespace_option
    with session.backends() as backends:
        if bulk:
            _show_namespaces(session, _counted(session, backends, namespace), limit, source="bulk")
        elif namespace is None and not (prefixes or tree):
            with session.out.waiting("reading the index"):
                found = list_namespaces(backends.bulk, backends.index)
            _note_mismatch(session, backends, {one.namespace for one in found})
            _show_namespaces(session, found, limit, source="index")
        else:
            _show_chunks(session, backends, namespace, limit, tree=tree)
    return FINE


def _note_mismatch(
    session: Session, backends: "Backends", recorded: Set[str], only: str | None = None
) -> None:
    """Print a note if index and bulk store seem to lack what the other has, of namespace ``only``
    if it is given: "nothing is stored" alone would hide a lost index or a wrong URL. Raises
    ``StoreError`` if the bulk store cannot be listed."""
    if session.config.index_url.startswith("bulk:"):
        return
    if not recorded:
        stored = [one for one in payload_namespaces(backends.bulk) if only in (None, one)]
        of = f" of {only}" if only else ""
        if stored:
            session.out.note(
                f"the index has no records{of}, but the bulk store has payloads of "
                f"{counted(len(stored), 'namespace')}, which expired or lost their records: "
                "objkv audit compares them"
            )
    elif only is None and not recorded & {*stored_namespaces(backends.bulk)}:
        session.out.note(
            "the bulk store has none of the namespaces in the index: check bulk_url, index_url and "
            "redis_prefix"
        )


def _view(backends: "Backends", *, is_own_index: bool) -> BackendsView:
    """Return a view for reading, without retries."""
    return BackendsView(backends.bulk, None, backends.index, is_own_index, ttl_s=0, owner="ls")


def _counted(
    session: Session, backends: "Backends", namespace: str | None
) -> list[NamespaceSummary]:
    """Count the payloads in the bulk store, whatever the index knows."""
    view = _view(backends, is_own_index=True)
    if namespace is not None:
        namespace = find_namespace(view.bulk, view.index, namespace)
    with closing(Inventory()) as inventory:
        walk = Walk(view, inventory, find_scope(view, namespace))
        _walked(session, "counting payloads", walk.payloads())
        return counted_namespaces(inventory, walk.scope)


def _walked(session: Session, what: str, units: Iterable[Unit]) -> None:
    pool = WorkPool(workers=WORKERS)
    with session.out.steps(what) as on_progress:
        pool.run(units, on_progress)
    if pool.ending != "complete":
        raise KeyboardInterrupt


def _show_namespaces(
    session: Session, found: Sequence[NamespaceSummary], limit: int, *, source: str
) -> None:
    out, shown, omitted = session.out, found[:limit], max(0, len(found) - limit)
    tenants, quota_bytes = list_tenants(found), session.config.quota_bytes
    document = {"source": source, "namespaces": shown, "omitted": omitted, "tenants": tenants}
    if out.document({**document, "quota_bytes": quota_bytes}):
        return
    columns = ["namespace", "model", "tenant", ">bytes", ">payloads", ">chunk", "kv dtype"]
    if source == "bulk":
        columns += [">chunks", ">tokens", ">newest", ">oldest"]
    rows = [
        (one.namespace, one.model, one.tenant, size(one.nbytes), one.payloads, one.chunk_tokens,
         one.kv_dtype, one.chunks, one.tokens, age(one.newest_s), age(one.oldest_s))
        for one in shown
    ]  # fmt: skip
    _print(session, columns, [row[: len(columns)] for row in rows], source)
    for summary in shown:
        if summary.problem:
            out.line(f"{summary.namespace}: {summary.problem}", "yellow")
    for tenant in tenants:
        out.line(_tenant_line(tenant, quota_bytes))
    _print_omitted(out, omitted)


def _tenant_line(usage: TenantTotals, quota_bytes: int) -> str:
    has_quota = quota_bytes and usage.tenant is not None
    of = f" of {size(quota_bytes)}" if has_quota else ""
    when = f"counted {age(usage.counted_s)} ago" if usage.counted_s else "never counted"
    name = "unknown tenant" if usage.tenant is None else f"tenant {usage.tenant}"
    return f"{name}: {size(usage.nbytes)}{of}, {counted(usage.payloads, 'payload')}; {when}"


def _show_chunks(
    session: Session, backends: "Backends", namespace: str | None, limit: int, *, tree: bool
) -> None:
    """Show the tree of prefixes, or its chains, of one namespace or of all."""
    if namespace is None:
        names = backends.index.namespaces()
    else:
        names = [find_namespace(backends.bulk, backends.index, namespace)]
    # The index of a folder that is its own counts no hits.
    view = _view(backends, is_own_index=session.config.index_url.startswith("bulk:"))
    scope = WalkScope(namespaces={}, old=frozenset(), indexed=names)
    with closing(Inventory()) as inventory:
        _walked(session, "reading the index", Walk(view, inventory, scope).records())
        with session.out.waiting("joining chunks"):
            make_tree(inventory, "recorded")
        [(every, ends)] = inventory.run(
            "SELECT count(*), count(CASE branches WHEN 0 THEN 1 END) FROM temp.branches"
        )
        only = None if namespace is None else names[0]
        _note_mismatch(session, backends, {*names} if every else set(), only)
        if tree:
            found = (one for name in names for one in branches(inventory, name))
            drawn = list(islice(found, limit))
            key, omitted, table = "branches", every - len(drawn), _tree(drawn)
        else:
            chains = (one for name in names for one in list_prefixes(inventory, name))
            some = list(islice(chains, limit))
            key, omitted, table = "prefixes", ends - len(some), _prefixes(some)
    if not session.out.document({key: drawn if tree else some, "omitted": omitted}):
        _print(session, *table, "index")
        _print_omitted(session.out, omitted)


def _prefixes(shown: Sequence[PrefixSummary]) -> tuple[Sequence[str], list[tuple[object, ...]]]:
    columns = (
        "namespace", "leaf", ">tokens", ">bytes", ">hits", "~notes", ">newest", ">chunks", "root",
        ">oldest",
    )  # fmt: skip
    return columns, [
        (one.namespace, one.leaf, one.token_end - one.token_start, size(one.nbytes), one.hits,
         _notes(one.pinned, one.token_start), age(one.newest_s), one.chunks, one.root,
         age(one.oldest_s))
        for one in shown
    ]  # fmt: skip


def _tree(shown: Sequence[Branch]) -> tuple[Sequence[str], list[tuple[object, ...]]]:
    columns = (
        "=prefix", ">tokens", ">chunks", ">with all below", ">hits", "~notes", ">newest", ">ends",
    )  # fmt: skip
    last = {(one.namespace, one.parent): one.id for one in shown}
    rows, name, lines = list[tuple[object, ...]](), "", dict[int | None, str]()
    for one in shown:
        if one.namespace != name:
            name, lines = one.namespace, {None: ""}
            rows.append((name, *[""] * (len(columns) - 1)))
        is_last = last[name, one.parent] == one.id
        lines[one.id] = lines[one.parent] + ("   " if is_last else "│  ")
        drawn = lines[one.parent] + ("└─ " if is_last else "├─ ")
        notes = _notes(one.pinned, one.token_start if one.parent is None else 0)
        rows.append(
            (f"{drawn}{one.hash}", f"{one.token_start:,}-{one.token_end:,}", one.chunks,
             size(one.tree_bytes), one.hits, notes, age(one.newest_s), one.leaves)
        )  # fmt: skip
    return columns, rows


def _notes(pinned: bool, gone: int) -> str:
    """``gone``: tokens before the first stored chunk."""
    notes = ["pinned"] * pinned + [f"unusable: tokens before {gone:,} are gone"] * bool(gone)
    return ", ".join(notes)


def _print(
    session: Session, columns: Sequence[str], rows: Sequence[Sequence[object]], source: str
) -> None:
    urls = session.config.public()
    if rows:
        session.out.table(columns, rows)
    else:
        own = urls["index_url"] == "bulk:"
        url = urls["bulk_url" if own else f"{source}_url"]
        session.out.line(f"nothing is stored in {url} yet")


def _print_omitted(out: Printer, omitted: int) -> None:
    if omitted:
        out.line(f"{omitted:,} more; raise --limit to list them")
