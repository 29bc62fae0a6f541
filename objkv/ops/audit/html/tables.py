"""The page's tables: every cell with what it is sorted by, so that sizes sort as numbers."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from objkv.ops.audit.html.figures import (
    DASH,
    ago,
    count,
    dollars,
    moment,
    noun,
    share,
    size,
    times,
    tokens,
)
from objkv.ops.audit.report import AuditReport

_UNKNOWN: Final = "(unknown)"
_WORDS_CHARS: Final = 52
"""Of a prefix's text: two lines."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What is shown, what it is sorted by, and what is told on hovering."""

    text: str
    sort: str | float | None = None
    """None: the text."""
    title: str = ""
    mono: bool = False
    part: float | None = None
    """Length of a bar behind it, of 0 to 1."""
    tone: str = ""
    """``bad``, ``muted`` or ``words``, which needs room."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column's head."""

    name: str
    is_number: bool = False
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """One table; ``id`` is its anchor's."""

    id: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


def text(value: str | None, *, mono: bool = False, cut: int = 0) -> Cell:
    """A word of somebody else's."""
    if value is None:
        return Cell(DASH, "", tone="muted")
    shown = value[:cut] if cut else value
    return Cell(shown, value, title=value if shown != value else "", mono=mono)


def number(value: float | None, shown: str | None = None, *, part: float | None = None) -> Cell:
    """A number, by default as a count; what is not known sorts below all that is."""
    if value is None:
        return Cell(DASH, -1, tone="muted")
    return Cell(count(value) if shown is None else shown, value, part=part)


def nbytes(value: int | None, largest: int = 0) -> Cell:
    """Bytes, with a bar if ``largest`` is given."""
    part = value / largest if value is not None and largest else None
    return number(value, size(value), part=part)


def when(moment_s: int | None, now_s: int) -> Cell:
    """How long ago."""
    if moment_s is None:
        return Cell(DASH, -1, tone="muted")
    return Cell(ago(moment_s, now_s), moment_s, title=moment(moment_s))


def _head(*names: str) -> tuple[Column, ...]:
    """A name that begins with ``>`` is a number's; what follows a ``|`` is its hint."""
    heads = []
    for name in names:
        words, _, hint = name.removeprefix(">").partition("|")
        heads.append(Column(words, name.startswith(">"), hint))
    return tuple(heads)


def _largest(values: Iterable[int | None]) -> int:
    return max((value or 0 for value in values), default=0)


def namespaces(report: AuditReport) -> Table:
    """All namespaces."""
    most = _largest(one.nbytes for one in report.namespaces)
    rows = []
    for one in report.namespaces:
        told = (
            f"{one.ghosts} {noun(one.ghosts, 'ghost')}, "
            f"{one.orphans - one.expired} {noun(one.orphans - one.expired, 'orphan')}, "
            f"{one.corrupt} corrupt, {one.strangers} {noun(one.strangers, 'stranger')}; "
            f"{one.expired} more {noun(one.expired, 'has', 'have')} expired"
        )
        name = text(one.namespace, mono=True, cut=8)
        epoch = "" if one.weights_epoch is None else f"weights epoch {one.weights_epoch}"
        model = replace(text(one.model), title=epoch)
        if not one.is_known:
            model = Cell(_UNKNOWN, "", title=one.problem or "", tone="bad")
        rows.append(
            (
                name,
                model,
                text(one.tenant),
                text(one.kv_dtype),
                number(one.roots),
                number(one.chunks),
                number(one.tokens),
                nbytes(one.nbytes, most),
                number(one.hits),
                _used(one.used_chunks, one.chunks),
                nbytes(one.unused_bytes),
                when(one.newest_s, report.made_s),
                when(one.last_used_s, report.made_s),
                Cell(count(one.to_mend), one.to_mend, told, tone="bad" if one.to_mend else "muted"),
            )
        )
    columns = _head(
        "Namespace", "Model", "Tenant", "KV type",
        ">Roots|Chunks at which a prefix begins", ">Chunks", ">Tokens", ">Bytes", ">Hits",
        ">Used|Chunks that were hit at least once", ">Unused|Bytes of chunks that never were hit",
        ">Newest", ">Last used", ">To mend|Ghosts, orphans, corrupt payloads and strangers",
    )  # fmt: skip
    return Table("namespaces", "Namespaces", columns, tuple(rows))


def tenants(report: AuditReport) -> Table:
    """All tenants, with what they cost."""
    most = _largest(one.nbytes for one in report.tenants)
    costs = {cost.tenant: cost for cost in report.cost.tenants}
    rows = []
    for one in report.tenants:
        cost = costs.get(one.tenant)
        quota = number(one.quota_bytes, share(one.nbytes, one.quota_bytes))
        if one.quota_bytes:
            part = one.nbytes / one.quota_bytes
            quota = Cell(quota.text, part, f"of {size(one.quota_bytes)}")
        rows.append(
            (
                text(one.tenant) if one.tenant is not None else Cell(_UNKNOWN, "", tone="muted"),
                number(one.namespaces),
                number(one.roots),
                number(one.chunks),
                number(one.tokens),
                nbytes(one.nbytes, most),
                quota,
                number(one.hits),
                _used(one.used_chunks, one.chunks),
                nbytes(one.unused_bytes),
                when(one.last_used_s, report.made_s),
                number(cost.month if cost else None, dollars(cost.month if cost else None)),
            )
        )
    columns = _head(
        "Tenant", ">Namespaces", ">Roots", ">Chunks", ">Tokens", ">Bytes",
        ">Quota|How much of it is used", ">Hits", ">Used", ">Unused", ">Last used",
        ">A month|Storage and requests, in US dollars",
    )  # fmt: skip
    return Table("tenants", "Tenants", columns, tuple(rows))


def roots(report: AuditReport) -> Table:
    """The largest prefixes."""
    most = _largest(one.nbytes for one in report.roots)
    rows: list[tuple[Cell, ...]] = []
    for one in report.roots:
        begin = Cell(one.hash[:12], one.hash, one.hash, mono=True)
        if one.token_start:
            told = f"tokens before {one.token_start:,} are gone: nobody can use it"
            begin = Cell(f"{one.hash[:12]} …", one.hash, told, mono=True, tone="bad")
        rows.append(
            (
                begin,
                text(one.namespace, mono=True, cut=8),
                text(one.tenant),
                _words(one.label),
                number(one.shared_tokens),
                number(one.leaves),
                number(one.branches),
                number(one.token_end_max),
                number(one.chunks),
                nbytes(one.nbytes, most),
                number(one.hits),
                number(one.reuse, times(one.reuse)),
                when(one.last_used_s, report.made_s),
            )
        )
    columns = _head(
        "First chunk", "Namespace", "Tenant", "Text", ">Shared|Tokens that are common to all below",
        ">Ends|At least so many different prompts", ">Forks", ">Longest|Tokens", ">Chunks",
        ">Bytes", ">Hits", ">Reuse|Bytes loaded by bytes stored", ">Last used",
    )  # fmt: skip
    note = ""
    if report.roots_omitted:
        are = noun(report.roots_omitted, "one is", "ones are")
        note = f"{count(report.roots_omitted)} smaller {are} not listed."
    if not any(one.label for one in report.roots):
        at = [column.name for column in columns].index("Text")
        columns = columns[:at] + columns[at + 1 :]
        rows = [row[:at] + row[at + 1 :] for row in rows]
    return Table("roots", "Largest prefixes", columns, tuple(rows), note)


def depths(report: AuditReport) -> Table:
    """Chunks by their place in prompts."""
    rows = [
        (
            text(one.namespace, mono=True, cut=8),
            Cell(tokens(one.depth + 1, one.depth_end).replace(",", ""), one.depth)
            if one.depth_end - one.depth > 1
            else number(one.depth + 1),
            number(one.chunks),
            number(one.tokens),
            nbytes(one.nbytes),
            number(one.hits),
            _used(one.used_chunks, one.chunks),
            number(one.branches),
            number(one.leaves),
        )
        for one in report.depths
    ]
    columns = _head(
        "Namespace", ">Chunk of the prompt", ">Chunks", ">Tokens", ">Bytes", ">Hits", ">Used",
        ">Forks", ">Ends",
    )  # fmt: skip
    return Table("depths", "By place in the prompt", columns, tuple(rows))


def findings(report: AuditReport) -> Table:
    """The first of what is wrong."""
    rows = [
        (
            Cell(one.kind, one.kind, tone="bad" if one.kind == "corrupt" else ""),
            text(one.key, mono=True),
            nbytes(one.nbytes),
            text(one.detail),
        )
        for one in report.findings.first
    ]
    note = ""
    if report.findings.omitted:
        note = f"{count(report.findings.omitted)} more are counted above, and not named here."
    return Table(
        "findings", "By name", _head("Kind", "Where", ">Bytes", "Detail"), tuple(rows), note
    )


def _words(label: str | None) -> Cell:
    if label is None:
        return text(None)
    shown = f"{label[:_WORDS_CHARS].rstrip()}…" if len(label) > _WORDS_CHARS else label
    return Cell(shown, label, title=label if shown != label else "", tone="words")


def _used(used: int | None, chunks: int) -> Cell:
    if used is None:
        return Cell(DASH, -1, tone="muted")
    return Cell(share(used, chunks), used / chunks if chunks else 0, f"{used:,} of {chunks:,}")
