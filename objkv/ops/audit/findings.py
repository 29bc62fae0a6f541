"""What is wrong in what an audit has seen: counted by kind and namespace, the first few named."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from objkv.ops.audit.figures import namespace_names
from objkv.ops.audit.report import (
    AuditFinding,
    AuditReport,
    FindingCount,
    FindingKind,
    FindingsAudit,
)
from objkv.ops.audit.spool import AuditSpool
from objkv.ops.backends_view import QUARANTINE
from objkv.ops.formats import noun, span

FIRST_MAX = 100
"""Named, of each kind."""
HEADER_BYTES_MIN = 4_096
"""No payload is shorter: its header alone takes as much."""
REMEDIES: dict[FindingKind, str] = {
    "ghost": "objkv sweep --apply forgets them; until then each costs a failed load",
    "orphan": "objkv rebuild gives them their records, objkv sweep --apply removes them",
    "stranger": "objkv sweep --apply --strangers removes them",
    "corrupt": "objkv verify --all --quarantine takes them out of use",
    "expired": "objkv sweep --apply removes them: nobody used them for ttl_s",
    "old_epoch": "of an earlier weights_epoch: objkv sweep --apply removes them",
    "leftover": "objkv sweep --apply removes what killed writers left and what is in quarantine",
}
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
# What a header that is not right makes corrupt is named by its path, as payload_path makes it.
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
SELECT p.ns, p.hash, p.field, p.nbytes, p.modified_s, 'of an earlier weights_epoch'
FROM main.payloads p LEFT JOIN main.shards s USING (ns, hash, field)
JOIN temp.walked w ON w.ns = p.ns
WHERE w.is_known AND w.is_old AND p.nbytes >= 4096 AND p.nbytes = ifnull(s.nbytes, p.nbytes)
"""
    + _NOT_CORRUPT
)
# What this finds is corrupt, and nothing else besides: one payload is one finding.
_SIZES = """
SELECT p.ns, p.hash, p.field, p.nbytes, p.modified_s,
  CASE WHEN p.nbytes < 4096 THEN 'shorter than any header'
    ELSE 'its record says ' || s.nbytes || ' bytes' END
FROM main.payloads p LEFT JOIN main.shards s USING (ns, hash, field)
WHERE p.nbytes < 4096 OR p.nbytes <> s.nbytes
"""
_FOUND = "SELECT ns, key, nbytes, modified_s, detail FROM main.found WHERE kind = ?"


@dataclass(frozen=True, slots=True)
class Walked:
    """How far one namespace was looked at, and what is known of it."""

    has_records: bool
    """Whether all its records and all its payloads were seen, and it has an index."""
    is_known: bool
    is_old: bool
    """Whether there is one with a later epoch, and no other difference."""


@dataclass(slots=True)
class _Seen:
    counts: Counter[FindingKind] = field(default_factory=Counter)
    nbytes: Counter[FindingKind] = field(default_factory=Counter)
    young: Counter[FindingKind] = field(default_factory=Counter)
    wrong: Counter[tuple[str, str]] = field(default_factory=Counter)
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
    """All that is wrong, and how many there are by kind and namespace.

    A payload without a record is expired if it was written before ``expired_s``, and young if it
    was after ``young_s``: what replicas save after the index was read has its record all the same.
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
        # Only of these will some become right by themselves: what else seemed wrong was looked at
        # twice, and puts are whole.
        seen.add(finding, name, is_young=kind == "orphan" and modified_s > young_s)
    kinds: tuple[FindingKind, ...] = get_args(FindingKind)
    counts = tuple(
        FindingCount(kind, seen.counts[kind], seen.nbytes[kind], seen.young[kind], REMEDIES[kind])
        for kind in kinds
    )
    first = tuple(one for kind in kinds for one in seen.first.get(kind, ()))
    return FindingsAudit(counts, first, seen.counts.total() - len(first)), seen.wrong


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
        # What is too short for a header has been told above.
        for ns, key, nbytes, modified_s, detail in spool.rows(_FOUND, (kind,)):
            if kind == "leftover" or nbytes >= HEADER_BYTES_MIN:
                yield kind, names.get(ns, ""), key, nbytes, modified_s, detail


def payload_path(namespace: str, prefix_hash: bytes, text: str) -> str:
    """Where the payload of a shard field lies."""
    digest = prefix_hash.hex()
    return f"{namespace}/{digest[:2]}/{digest}/{text}.safetensors"


_NAMES_SHOWN = 3
_MOST = 0.5
_FEW = 20
"""Payloads of which most may be wrong by chance."""


def problems(
    report: AuditReport,
    walked: dict[str, Walked],
    *,
    others: Sequence[str],
    met: Sequence[str],
    namespaces_omitted: int,
) -> tuple[str, ...]:
    """Of ``report``, which has none yet. ``others``: folders that are not objkv's; ``met``: what
    could not be looked at; ``namespaces_omitted``: by the tree."""
    has_index = report.totals.records is not None
    found = [*_early(report), *_resumed(report), *(_mismatched(report) if has_index else ())]
    found += [*_namespaces(report, walked), *met]
    if namespaces_omitted:
        found.append(
            f"the tree leaves out the {namespaces_omitted} smallest "
            f"{noun(namespaces_omitted, 'namespace')}"
        )
    if not has_index and report.totals.payloads:
        found.append(
            "the bulk store is its own index: nothing expires, hits are not counted, and what is "
            "told of chunks was read from the headers of payloads"
        )
    if others:
        found.append(f"{_listed(others)}: not of objkv, and not looked at")
    return tuple(found)


def foreign_folders(folders: Sequence[str], namespaces: Sequence[str]) -> list[str]:
    """Those of the bulk store's folders that are not of objkv."""
    return [name for name in folders if name not in namespaces and name != QUARANTINE]


def _early(report: AuditReport) -> Iterator[str]:
    if report.ending == "complete":
        return
    why = "it was interrupted" if report.ending == "interrupted" else "the time was over"
    yield (
        f"{report.parts_done:,} of {report.parts:,} parts were looked at, because {why}: all "
        "numbers are of these; the same command goes on from there"
    )


def _resumed(report: AuditReport) -> Iterator[str]:
    if report.resumed:
        ago = span(report.made_s - report.begun_s)
        yield (
            f"an earlier walk was continued, which began {ago} ago: what it had seen by then is "
            "told as it was, and may have changed or gone since; --restart looks at all anew"
        )


def _mismatched(report: AuditReport) -> Iterator[str]:
    """Where both ends do not seem to belong together."""
    totals = report.totals
    counts = {one.kind: one.count for one in report.findings.counts}
    lost = sum(one.count - one.young for one in report.findings.counts if one.kind == "orphan")
    if report.ending != "complete":
        return
    if totals.payloads and not totals.records and counts["orphan"] + counts["expired"]:
        yield (
            "the index has no record of any payload: it was lost, index_url or redis_prefix is "
            "not the one of this bucket, or nothing was used for long; objkv rebuild restores it"
        )
    elif lost > _FEW and lost > _MOST * totals.payloads:
        yield (
            f"{lost:,} of {totals.payloads:,} payloads have no record, although they "
            "are younger than a record's life: most of the index was lost, or it is another's; "
            "objkv rebuild restores it"
        )
    if counts["ghost"] and not totals.payloads:
        yield (
            "the bulk store has none of the payloads that the index knows: bulk_url is not the "
            "one of this index, or it was emptied"
        )
    elif counts["ghost"] > _FEW and counts["ghost"] > totals.payloads:
        yield (
            f"{counts['ghost']:,} records have no payload, more than there are payloads: was the "
            "bucket emptied, by a lifecycle rule for example?"
        )


def _namespaces(report: AuditReport, walked: dict[str, Walked]) -> Iterator[str]:
    strangers = [one.namespace for one in report.namespaces if not one.is_known and one.payloads]
    if strangers:
        yield f"{_listed(strangers)}: payloads without a valid identity document"
    old = [name for name, one in walked.items() if one.is_old]
    if old:
        yield f"{_listed(old)}: of an earlier weights_epoch; objkv sweep removes it"
    gone = sum(one.token_start > 0 for one in report.roots)
    if gone:
        yield (
            f"{gone} of the largest {len(report.roots)} "
            f"{noun(len(report.roots), 'prefix', 'prefixes')} "
            f"{noun(gone, 'has lost its', 'have lost their')} beginning: what "
            "follows it can not be loaded"
        )
    for tenant in report.tenants:
        if tenant.quota_bytes is not None and tenant.nbytes > tenant.quota_bytes:
            yield f"tenant {tenant.tenant} is above its quota"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    shown = ", ".join(names[:_NAMES_SHOWN])
    return f"{shown} and {more:,} more" if more > 0 else shown
