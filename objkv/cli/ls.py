"""``objkv ls``: namespaces, or the prefixes stored in one."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from objkv.cli.command import FINE, Session, command
from objkv.cli.output import Printer, age, counted, plain, size
from objkv.errors import ConfigError
from objkv.ops.listing import (
    Branch,
    BulkCount,
    NamespaceSummary,
    PrefixSummary,
    TenantTotals,
    count_bulk,
    find_namespace,
    list_namespaces,
    list_prefixes,
    list_tenants,
    list_tree,
)

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
        str | None,
        typer.Option("--namespace", "-n", help="The same as NAMESPACE.", metavar="NS"),
    ] = None,
    prefixes: Annotated[
        bool,
        typer.Option("--prefixes", help="List prefixes, in all namespaces if none is given."),
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
    session.has_bulk()
    if bulk:
        _show_namespaces(session, _counted(session, namespace), None, limit)
        return FINE
    if namespace is None and not (prefixes or tree):
        _show_namespaces(session, *_indexed(session), limit)
        return FINE
    with session.backends() as backends, session.out.waiting("reading the index"):
        if namespace is None:
            names = backends.index.namespaces()
            _check_bucket(session, backends, names)
        else:
            names = [find_namespace(backends.bulk, backends.index, namespace)]
        if tree:
            branches = [(n, branch) for n in names for branch in list_tree(backends.index, n)]
        else:
            found = [(n, prefix) for n in names for prefix in list_prefixes(backends.index, n)]
    if tree:
        _show_tree(session, branches, limit)
    else:
        _show_prefixes(session, found, limit)
    return FINE


def _indexed(session: Session) -> tuple[BulkCount, list[TenantTotals]]:
    with session.backends() as backends, session.out.waiting("reading the index"):
        found = tuple(list_namespaces(backends.bulk, backends.index))
        _check_bucket(session, backends, found)
        return BulkCount(found, 0, 0), list_tenants(backends.bulk, backends.index)


def _check_bucket(session: Session, backends: "Backends", found: Sequence[object]) -> None:
    """Raise ``StoreError`` if nothing was found and the bucket does not exist or is closed to this
    command: "nothing is stored" would hide a wrong bulk_url."""
    if not found and session.config.bulk_url.startswith("s3:"):
        backends.bulk.check()


def _counted(session: Session, namespace: str | None) -> BulkCount:
    with session.backends() as backends, session.out.counting("entries counted") as progress:
        name = ""
        if namespace is not None:
            name = find_namespace(backends.bulk, backends.index, namespace)
        return count_bulk(backends.bulk, namespace=name, progress=progress)


def _show_namespaces(
    session: Session, count: BulkCount, tenants: list[TenantTotals] | None, limit: int
) -> None:
    """Print the namespaces. ``tenants`` are the index's totals; None if ``--bulk`` counted."""
    out, source = session.out, "bulk" if tenants is None else "index"
    shown, omitted = _cut(count.namespaces, limit)
    if out.machine:
        document = {
            "source": source,
            "namespaces": shown,
            "omitted": omitted,
            "other_entries": count.other_entries,
            "other_bytes": count.other_bytes,
        }
        if tenants is not None:
            document |= {"tenants": tenants, "quota_bytes": session.config.quota_bytes}
        out.document(document)
        return
    if not shown:
        out.line(f"nothing is stored in {session.config.public()[f'{source}_url']} yet")
    else:
        columns = (
            "namespace", "model", "tenant", ">chunks", ">bytes", ">hits", ">newest", ">oldest",
            ">tokens", ">chunk", "kv dtype",
        )  # fmt: skip
        out.table(columns, [_namespace_row(summary) for summary in shown])
    for summary in shown:
        if summary.problem:
            out.line(f"{summary.namespace}: {summary.problem}", "yellow")
    for tenant in tenants or ():
        out.line(_tenant_line(tenant, session.config.quota_bytes))
    if count.other_entries:
        others = counted(count.other_entries, "other entry", "other entries")
        out.line(f"{others}, {size(count.other_bytes)}")
    _print_omitted(out, omitted)


def _tenant_line(usage: TenantTotals, quota_bytes: int) -> str:
    of = f" of {size(quota_bytes)}" if quota_bytes else ""
    when = f"counted {age(usage.counted_s)} ago" if usage.counted_s else "never counted"
    name = "unknown tenant" if usage.tenant is None else f"tenant {usage.tenant}"
    return f"{name}: {size(usage.nbytes)}{of}, {counted(usage.payloads, 'payload')}; {when}"


def _namespace_row(summary: NamespaceSummary) -> Sequence[object]:
    return (
        summary.namespace,
        summary.model,
        summary.tenant,
        summary.chunks,
        size(summary.nbytes),
        summary.hits,
        age(summary.newest_s),
        age(summary.oldest_s),
        summary.tokens,
        summary.chunk_tokens,
        summary.kv_dtype,
    )


def _show_prefixes(
    session: Session, found: Sequence[tuple[str, PrefixSummary]], limit: int
) -> None:
    out = session.out
    shown, omitted = _cut(found, limit)
    if out.machine:
        rows: list[Any] = [{"namespace": name, **plain(prefix)} for name, prefix in shown]
        out.document({"prefixes": rows, "omitted": omitted})
        return
    if not shown:
        out.line(f"nothing is stored in {session.config.public()['index_url']} yet")
        return
    columns = (
        "namespace", "leaf", ">tokens", ">bytes", ">hits", "~notes", ">newest", ">chunks", "root",
        ">oldest",
    )  # fmt: skip
    out.table(columns, [_prefix_row(name, prefix) for name, prefix in shown])
    _print_omitted(out, omitted)


def _prefix_row(namespace: str, prefix: PrefixSummary) -> Sequence[object]:
    notes = ["pinned"] if prefix.pinned else []
    if prefix.token_start:
        notes.append(f"unusable: tokens before {prefix.token_start:,} are gone")
    return (
        namespace,
        prefix.leaf.hex(),
        prefix.token_end - prefix.token_start,
        size(prefix.nbytes),
        prefix.hits,
        ", ".join(notes),
        age(prefix.newest_s),
        prefix.chunks,
        prefix.root.hex(),
        age(prefix.oldest_s),
    )


def _show_tree(session: Session, found: Sequence[tuple[str, Branch]], limit: int) -> None:
    out = session.out
    shown, omitted = _cut(found, limit)
    if out.machine:
        rows: list[Any] = [{"namespace": name, **plain(branch)} for name, branch in shown]
        out.document({"branches": rows, "omitted": omitted})
        return
    if not shown:
        out.line(f"nothing is stored in {session.config.public()['index_url']} yet")
        return
    columns = (
        "prefix", ">tokens", ">chunks", ">with all below", ">hits", "~notes", ">newest", ">ends",
    )  # fmt: skip
    rows, name, open_levels = [], "", list[bool]()
    for namespace, branch in shown:
        if namespace != name:
            name = namespace
            rows.append((name, *[""] * (len(columns) - 1)))
        open_levels[branch.level :] = [not branch.is_last]
        rows.append(_branch_row(branch, open_levels))
    out.table(columns, rows)
    _print_omitted(out, omitted)


def _branch_row(branch: Branch, open_levels: Sequence[bool]) -> tuple[object, ...]:
    """``open_levels``: for each level down to this branch's, whether more siblings follow."""
    above = "".join("│  " if more else "   " for more in open_levels[:-1])
    notes = ["pinned"] if branch.pinned else []
    if branch.level == 0 and branch.token_start:
        notes.append(f"unusable: tokens before {branch.token_start:,} are gone")
    return (
        f"{above}{'├─ ' if open_levels[-1] else '└─ '}{branch.last.hex()}",
        f"{branch.token_start:,}-{branch.token_end:,}",
        branch.chunks,
        size(branch.tree_bytes),
        branch.hits,
        ", ".join(notes),
        age(branch.newest_s),
        branch.leaves,
    )


def _cut(rows: Sequence[Any], limit: int) -> tuple[Sequence[Any], int]:
    return rows[:limit], max(0, len(rows) - limit)


def _print_omitted(out: Printer, omitted: int) -> None:
    if omitted:
        out.line(f"{omitted:,} more; raise --limit to list them")
