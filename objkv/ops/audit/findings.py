"""The faults that an audit found: counts by kind and namespace, and the first few by name."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

from objkv.cache.switch import OPERATOR_FOLDER
from objkv.ops.audit.figures import namespace_names
from objkv.ops.audit.report import (
    AuditFinding,
    AuditReport,
    AuditTotals,
    FindingCount,
    FindingKind,
    FindingsAudit,
)
from objkv.ops.audit.spool import AuditSpool
from objkv.ops.backends_view import QUARANTINE
from objkv.ops.formats import noun, span
from objkv.ops.sweep.survey import looks_lost

FIRST_MAX = 100
"""Findings listed by name, per kind."""
HEADER_BYTES_MIN = 4_096
"""The shortest header. A shorter payload is corrupt."""
REMEDIES: dict[FindingKind, str] = {
    "ghost": "objkv sweep --apply forgets them; until then each one costs a failed load",
    "orphan": "objkv rebuild --apply restores their records, or objkv sweep --apply deletes them",
    "stranger": "objkv sweep --apply --strangers deletes them",
    "corrupt": "objkv verify --all --quarantine --apply quarantines them",
    "expired": "objkv sweep --apply deletes them; they were not used for ttl_s",
    "old_epoch": "objkv sweep --apply deletes them; they are of an earlier weights_epoch or format",
    "leftover": "objkv sweep --apply deletes files of killed writers and quarantined payloads",
}
_DOUBTED: tuple[FindingKind, ...] = ("orphan", "expired", "old_epoch")
"""Kinds that a sweep keeps in a namespace that seems to have lost its records."""
_GRACED: tuple[FindingKind, ...] = ("orphan", "stranger", "old_epoch", "leftover")
"""Kinds that a sweep keeps until they are older than ``sweep_grace_s``."""
_GHOSTS = """
SELECT s.ns, s.hash, s.field, s.nbytes, s.created_s, 'a record without a payload'
FROM main.shards s LEFT JOIN main.payloads p USING (ns, hash, field)
WHERE p.nbytes IS NULL AND s.ns IN (SELECT ns FROM temp.walked WHERE has_records)
"""
_UNRECORDED = """
SELECT p.ns, p.hash, p.field, p.nbytes, p.modified_s, 'without a record'
FROM main.payloads p LEFT JOIN main.shards s USING (ns, hash, field)
JOIN temp.walked w ON w.ns = p.ns
WHERE s.nbytes IS NULL AND p.nbytes >= 4096 AND w.has_records AND w.is_known AND NOT w.is_old
"""
# A payload with a bad header is listed by its path, built as in payload_path.
_NOT_CORRUPT = """
AND NOT EXISTS (
  SELECT 1 FROM main.found f JOIN main.namespaces n ON n.id = p.ns
  WHERE f.kind = 'corrupt' AND f.key = n.name || '/' || lower(substr(hex(p.hash), 1, 2)) || '/'
    || lower(hex(p.hash)) || '/' || p.field || '.safetensors')
"""
_STRANGERS = (
    """
SELECT p.ns, p.hash, p.field, p.nbytes, p.modified_s, 'its namespace has no identity document'
FROM main.payloads p LEFT JOIN main.shards s USING (ns, hash, field)
JOIN temp.walked w ON w.ns = p.ns
WHERE NOT w.is_known AND p.nbytes >= 4096 AND p.nbytes = ifnull(s.nbytes, p.nbytes)
"""
    + _NOT_CORRUPT
)
_OLD = (
    """
SELECT p.ns, p.hash, p.field, p.nbytes, p.modified_s, 'from an earlier weights_epoch or format'
FROM main.payloads p LEFT JOIN main.shards s USING (ns, hash, field)
JOIN temp.walked w ON w.ns = p.ns
WHERE w.is_known AND w.is_old AND p.nbytes >= 4096 AND p.nbytes = ifnull(s.nbytes, p.nbytes)
"""
    + _NOT_CORRUPT
)
# A payload found here is reported as corrupt only: one payload is one finding.
_SIZES = """
SELECT p.ns, p.hash, p.field, p.nbytes, p.modified_s,
  CASE WHEN p.nbytes < 4096 THEN 'shorter than any header'
    ELSE 'its record states ' || s.nbytes || ' bytes' END
FROM main.payloads p LEFT JOIN main.shards s USING (ns, hash, field)
WHERE p.nbytes < 4096 OR p.nbytes <> s.nbytes
"""
# Payloads that a sweep judges a namespace by: younger than ttl_s, and not superseded.
_YOUNG = """
SELECT p.ns, count(*), sum(s.nbytes IS NULL)
FROM main.payloads p LEFT JOIN main.shards s USING (ns, hash, field)
JOIN temp.walked w ON w.ns = p.ns
WHERE p.modified_s > ? AND w.has_records AND w.is_known AND NOT w.is_old
GROUP BY p.ns
"""
_FOUND = "SELECT ns, key, nbytes, modified_s, detail FROM main.found WHERE kind = ?"


@dataclass(frozen=True, slots=True)
class Walked:
    """How much of one namespace the walk covered, and the state of its identity."""

    has_records: bool
    """Whether the index is separate and the walk covered all records and all payloads."""
    is_known: bool
    is_old: bool
    """Whether its format is not read any more, or another namespace differs only by a later
    weights_epoch."""


@dataclass(slots=True)
class _Seen:
    counts: Counter[FindingKind] = field(default_factory=Counter)
    nbytes: Counter[FindingKind] = field(default_factory=Counter)
    young: Counter[FindingKind] = field(default_factory=Counter)
    wrong: Counter[tuple[str, str]] = field(default_factory=Counter)
    graced: Counter[FindingKind] = field(default_factory=Counter)
    """Findings that a sweep keeps for now, because they are younger than the grace time."""
    newest_s: dict[FindingKind, float] = field(default_factory=dict)
    first: dict[FindingKind, list[AuditFinding]] = field(default_factory=dict)

    def add(self, finding: AuditFinding, namespace: str, *, is_young: bool) -> None:
        kind = finding.kind
        self.counts[kind] += 1
        self.nbytes[kind] += finding.nbytes
        self.young[kind] += is_young
        self.wrong[kind, namespace] += 1
        named = self.first.setdefault(kind, [])
        if len(named) < FIRST_MAX:
            named.append(finding)


def read_findings(
    spool: AuditSpool, walked: Mapping[str, Walked], *, expired_s: float, young_s: float
) -> tuple[FindingsAudit, Mapping[tuple[str, str], int]]:
    """Return all findings, and their number by kind and namespace.

    A payload without a record is expired if it was written before ``expired_s``, and young if it
    was written after ``young_s``: a chunk saved after the index was read may have a record by now.
    """
    spool.run("DROP TABLE IF EXISTS temp.walked")
    spool.run(
        "CREATE TEMP TABLE walked (ns INTEGER PRIMARY KEY, has_records INTEGER, is_known INTEGER,"
        " is_old INTEGER)"
    )
    for name, one in walked.items():
        row = (spool.namespace(name), one.has_records, one.is_known, one.is_old)
        spool.run("INSERT INTO temp.walked VALUES (?, ?, ?, ?)", row)
    seen = _Seen()
    for kind, name, key, nbytes, modified_s, detail in _every(spool, min(expired_s, young_s)):
        finding = AuditFinding(kind, key, nbytes, detail)
        # Only orphans can be young. Other findings were rechecked, and puts are atomic.
        seen.add(finding, name, is_young=kind == "orphan" and modified_s > young_s)
        if kind in _GRACED and modified_s > young_s:
            seen.graced[kind] += 1
            seen.newest_s[kind] = max(modified_s, seen.newest_s.get(kind, 0))
    kinds: tuple[FindingKind, ...] = get_args(FindingKind)
    counts = tuple(
        FindingCount(
            kind,
            seen.counts[kind],
            seen.nbytes[kind],
            seen.young[kind],
            _remedy(kind, seen, young_s=young_s),
        )
        for kind in kinds
    )
    first = tuple(one for kind in kinds for one in seen.first.get(kind, ()))
    return FindingsAudit(counts, first, seen.counts.total() - len(first)), seen.wrong


def lost_namespaces(spool: AuditSpool, *, expired_s: float) -> set[str]:
    """Return the namespaces whose payloads a sweep keeps, because most of those written after
    ``expired_s`` have no record. Needs the table of ``read_findings``."""
    names = namespace_names(spool)
    rows = spool.rows(_YOUNG, (expired_s,))
    return {names[ns] for ns, young, lost in rows if looks_lost(young, lost)}


def with_force(
    findings: FindingsAudit,
    totals: AuditTotals,
    wrong: Mapping[tuple[str, str], int],
    kept: Collection[str],
) -> FindingsAudit:
    """Return ``findings`` with advice that a sweep follows, although index and bulk store do not
    match at all, or not in the namespaces ``kept``. ``wrong``: number of findings by kind and
    namespace."""
    counts = {one.kind: one.count for one in findings.counts}
    is_index_empty = totals.payloads and totals.records == 0
    is_mismatch = is_index_empty and counts["orphan"] + counts["expired"]
    if not (is_mismatch or (counts["ghost"] and not totals.payloads)):
        by_kind = (
            _with_kept(one, {name: wrong.get((one.kind, name), 0) for name in sorted(kept)})
            for one in findings.counts
        )
        return replace(findings, counts=tuple(by_kind))
    forced = (
        replace(one, remedy=one.remedy.replace("sweep --apply", "sweep --apply --force"))
        for one in findings.counts
    )
    return replace(findings, counts=tuple(forced))


def _with_kept(found: FindingCount, kept: Mapping[str, int]) -> FindingCount:
    """Return ``found`` with the command that also deletes what a sweep keeps. ``kept``: findings
    of this kind by namespace."""
    names = [name for name, number in kept.items() if number]
    if found.kind not in _DOUBTED or not names:
        return found
    command = f"sweep --apply --force -n {names[0]}"
    if kept[names[0]] == found.count:
        return replace(found, remedy=found.remedy.replace("sweep --apply", command))
    others = f" (and so for {_listed(names[1:])})" if len(names) > 1 else ""
    number = sum(kept.values())
    return replace(
        found,
        remedy=f"{found.remedy}; a sweep keeps {number:,} of them, because most young payloads of "
        f"their namespace have no record: objkv {command} deletes them{others}",
    )


def _remedy(kind: FindingKind, seen: _Seen, *, young_s: float) -> str:
    """Return the advice, with the end of the grace time for data that a sweep would still keep."""
    graced = seen.graced[kind]
    if not graced:
        return REMEDIES[kind]
    number = "all" if graced == seen.counts[kind] else f"{graced:,}"
    # One minute more, because spans are rounded down.
    wait = span(max(60, seen.newest_s[kind] - young_s + 60))
    are = "is" if graced == 1 and number != "all" else "are"
    return (
        f"{REMEDIES[kind]}; {number} {are} younger than sweep_grace_s, so a sweep keeps them "
        f"for up to {wait} more"
    )


def _every(
    spool: AuditSpool, expired_s: float
) -> Iterator[tuple[FindingKind, str, str, int, int, str]]:
    names = namespace_names(spool)
    plain: tuple[tuple[FindingKind, str], ...] = (
        ("ghost", _GHOSTS),
        ("orphan", _UNRECORDED),
        ("stranger", _STRANGERS),
        ("corrupt", _SIZES),
        ("old_epoch", _OLD),
    )
    for kind, statement in plain:
        for ns, prefix_hash, text, nbytes, modified_s, detail in spool.rows(statement):
            is_expired = kind == "orphan" and modified_s <= expired_s
            key = payload_path(names[ns], prefix_hash, text)
            yield "expired" if is_expired else kind, names[ns], key, nbytes, modified_s, detail
    others: tuple[FindingKind, ...] = ("corrupt", "leftover")
    for kind in others:
        # Payloads too short for a header are already in _SIZES.
        for ns, key, nbytes, modified_s, detail in spool.rows(_FOUND, (kind,)):
            if kind == "leftover" or nbytes >= HEADER_BYTES_MIN:
                yield kind, names.get(ns, ""), key, nbytes, modified_s, detail


def payload_path(namespace: str, prefix_hash: bytes, text: str) -> str:
    """Return the path of the payload of a shard field."""
    digest = prefix_hash.hex()
    return f"{namespace}/{digest[:2]}/{digest}/{text}.safetensors"


_NAMES_SHOWN = 3
_MOST = 0.5
_FEW = 20
"""Up to this many findings may be chance even if they are the majority."""


def problems(
    report: AuditReport,
    walked: dict[str, Walked],
    *,
    others: Sequence[str],
    met: Sequence[str],
    namespaces_omitted: int,
) -> tuple[str, ...]:
    """Return the problems of ``report`` in sentences, worst first.

    Args:
        others: folders that objkv did not create.
        met: parts that the walk could not read, in sentences.
        namespaces_omitted: number of namespaces that the tree omits.
    """
    has_index = report.totals.records is not None
    found = [*_early(report), *(_mismatched(report) if has_index else ())]
    found += [*_namespaces(report, walked), *met]
    if namespaces_omitted:
        found.append(
            f"the tree omits the {namespaces_omitted} smallest "
            f"{noun(namespaces_omitted, 'namespace')}"
        )
    if not has_index and report.totals.payloads:
        found.append(
            "the bulk store is its own index: nothing expires, hits are not counted, and chunks "
            "are described by the headers of their payloads"
        )
    if others:
        found.append(f"{_listed(others)}: not created by objkv, not included")
    return tuple(found)


def foreign_folders(folders: Sequence[str], namespaces: Sequence[str]) -> list[str]:
    """Return the folders of the bulk store that objkv did not create."""
    return [name for name in folders if name not in (*namespaces, QUARANTINE, OPERATOR_FOLDER)]


def _early(report: AuditReport) -> Iterator[str]:
    if report.ending == "complete":
        return
    why = "it was interrupted" if report.ending == "interrupted" else "the deadline had passed"
    yield (
        f"the audit read only {report.parts_done:,} of {report.parts:,} parts because {why}; all "
        "numbers cover only these"
    )


def _mismatched(report: AuditReport) -> Iterator[str]:
    """Yield signs that the index and the bulk store do not belong together."""
    totals = report.totals
    counts = {one.kind: one.count for one in report.findings.counts}
    lost = sum(one.count - one.young for one in report.findings.counts if one.kind == "orphan")
    if report.ending != "complete":
        return
    if totals.payloads and not totals.records and counts["orphan"] + counts["expired"]:
        yield (
            "the index has no record of any payload: either it was lost, index_url or redis_prefix "
            "belongs to another bucket, or all records have expired; objkv rebuild --apply "
            "restores it"
        )
    elif lost > _FEW and lost > _MOST * totals.payloads:
        yield (
            f"{lost:,} of {totals.payloads:,} payloads have no record although they are younger "
            "than ttl_s: either most of the index was lost, or it belongs to another bucket; "
            "objkv rebuild --apply restores it"
        )
    if counts["ghost"] and not totals.payloads:
        yield (
            "the bulk store has none of the payloads in the index: either bulk_url belongs to "
            "another index, or the bulk store was emptied"
        )
    elif counts["ghost"] > _FEW and counts["ghost"] > totals.payloads:
        yield (
            f"{counts['ghost']:,} records have no payload, more than there are payloads: check "
            "whether a lifecycle rule empties the bucket"
        )


def _namespaces(report: AuditReport, walked: dict[str, Walked]) -> Iterator[str]:
    strangers = [one.namespace for one in report.namespaces if not one.is_known and one.payloads]
    if strangers:
        yield f"{_listed(strangers)}: payloads without a valid identity document"
    old = [name for name, one in walked.items() if one.is_old]
    if old:
        yield (
            f"{_listed(old)}: from an earlier weights_epoch or format; objkv sweep --apply deletes "
            f"{noun(len(old), 'it', 'them')}"
        )
    gone = sum(one.token_start > 0 for one in report.roots)
    if gone:
        yield (
            f"{gone} of the largest {len(report.roots)} "
            f"{noun(len(report.roots), 'prefix', 'prefixes')} "
            f"{noun(gone, 'has lost its', 'have lost their')} first chunks, so the remaining "
            "chunks cannot be loaded"
        )
    for tenant in report.tenants:
        if tenant.quota_bytes is not None and tenant.nbytes > tenant.quota_bytes:
            yield f"tenant {tenant.tenant} exceeds its quota"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    shown = ", ".join(names[:_NAMES_SHOWN])
    return f"{shown} and {more:,} more" if more > 0 else shown
