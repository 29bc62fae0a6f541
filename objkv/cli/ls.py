"""``objkv ls``: namespaces, or the prefixes stored in one."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from objkv.cli.command import FINE, Session, command
from objkv.cli.output import Printer, age, counted, plain, size
from objkv.errors import ConfigError
from objkv.keys.identity import NAMESPACE_HEX
from objkv.ops.backends_view import pick_namespace
from objkv.ops.listing import (
    Branch,
    BulkCount,
    NamespaceSummary,
    PrefixSummary,
    TenantTotals,
    count_bulk,
    list_namespaces,
    list_prefixes,
    list_tenants,
    list_tree,
)

_LIMIT = 50


@command
def ls(
    session: Session,
    namespace: Annotated[
        str | None,
        typer.Argument(
            help="List the prefixes of this namespace, given whole or by its first digits.",
            metavar="NAMESPACE",
        ),
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
    session.has_bulk()
    if bulk:
        _show_namespaces(session, _counted(session, namespace), None, limit)
        return FINE
    if namespace is None and not (prefixes or tree):
        _show_namespaces(session, *_indexed(session), limit)
        return FINE
    with session.backends() as backends, session.out.waiting("reading the index"):
        names = backends.index.namespaces()
        if namespace is not None:
            names = [pick_namespace(names, namespace)]
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
        return BulkCount(found, 0, 0), list_tenants(backends.bulk, backends.index)


def _counted(session: Session, namespace: str | None) -> BulkCount:
    with session.backends() as backends, session.out.counting("entries counted") as progress:
        name = ""
        if namespace is not None:
            complete = len(namespace) == NAMESPACE_HEX
            known = () if complete else backends.index.namespaces()
            name = pick_namespace(known, namespace)
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
            "namespace", "model", "tenant", "kv dtype", ">chunk", ">chunks", ">tokens", ">bytes",
            ">newest", ">oldest", ">hits",
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
        summary.kv_dtype,
        summary.chunk_tokens,
        summary.chunks,
        summary.tokens,
        size(summary.nbytes),
        age(summary.newest_s),
        age(summary.oldest_s),
        summary.hits,
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
        "namespace", "root", "leaf", ">tokens", ">chunks", ">bytes", ">newest", ">oldest", ">hits",
        "notes",
    )  # fmt: skip
    out.table(columns, [_prefix_row(name, prefix) for name, prefix in shown])
    _print_omitted(out, omitted)


def _prefix_row(namespace: str, prefix: PrefixSummary) -> Sequence[object]:
    notes = ["pinned"] if prefix.pinned else []
    if prefix.token_start:
        notes.append(f"unusable: tokens before {prefix.token_start:,} are gone")
    return (
        namespace[:8],
        prefix.root.hex()[:12],
        prefix.leaf.hex(),
        prefix.token_end - prefix.token_start,
        prefix.chunks,
        size(prefix.nbytes),
        age(prefix.newest_s),
        age(prefix.oldest_s),
        prefix.hits,
        ", ".join(notes),
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
        "prefix", ">tokens", ">chunks", ">with all below", ">ends", ">hits", ">newest", "notes",
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
        f"{above}{'├─ ' if open_levels[-1] else '└─ '}{branch.last.hex()[:12]}",
        f"{branch.token_start:,}-{branch.token_end:,}",
        branch.chunks,
        size(branch.tree_bytes),
        branch.leaves,
        branch.hits,
        age(branch.newest_s),
        ", ".join(notes),
    )


def _cut(rows: Sequence[Any], limit: int) -> tuple[Sequence[Any], int]:
    return rows[:limit], max(0, len(rows) - limit)


def _print_omitted(out: Printer, omitted: int) -> None:
    if omitted:
        out.line(f"{omitted:,} more; raise --limit to list them")
