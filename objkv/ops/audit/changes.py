"""The changes since an earlier audit: its JSON document compared with this report."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from objkv.errors import ConfigError
from objkv.ops.audit.report import (
    JSON_FORMAT,
    AuditReport,
    ChangeKind,
    ChangesAudit,
    FindingChange,
    FindingKind,
    NamespaceChange,
    verdict,
)

_LOGIN = re.compile("//[^/]*@")
_BYTES_MAX = 1 << 30
"""An audit of the most namespaces and tree nodes is a few MiB."""


def read_earlier(file: Path) -> AuditReport:
    """Return the report that ``objkv audit --json`` printed into ``file``. Raises
    ``ConfigError``."""
    not_one = f"--since {file}: this is not the output of objkv audit --json"
    try:
        if file.stat().st_size > _BYTES_MAX:
            raise ConfigError(not_one)
        document = json.loads(file.read_bytes())
    except OSError as exc:
        raise ConfigError(f"--since {file}: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:
        raise ConfigError(not_one) from exc
    if not isinstance(document, dict) or document.get("command") != "audit":
        raise ConfigError(not_one)
    if document.get("format") != JSON_FORMAT:
        raise ConfigError(
            f"--since {file}: its format is {document.get('format')}, this version reads "
            f"{JSON_FORMAT}: audit once more and compare with that"
        )
    try:
        return _report(document)
    except ValidationError as exc:
        raise ConfigError(f"{not_one}, or it is incomplete") from exc


def _report(document: Mapping[str, Any]) -> AuditReport:
    """Return the report in ``document``. Values that earlier versions did not report are unknown.

    Raises ``ValidationError``.
    """
    unknown = dict.fromkeys(
        ("first_month", "loads", "tokens", "timed_tokens", "compute_gpu_s", "load_gpu_s", "gpu_s")
    )
    added: dict[str, object] = {
        "namespace": None,
        "savings": {**unknown, "usd": None, "months": []},
        "provenance": [],
        "pins": [],
        "lifecycle": None,
        "changes": None,
    }
    return TypeAdapter(AuditReport).validate_python({**added, **document, "changes": None})


def changes_since(
    then: AuditReport | None, now: AuditReport
) -> tuple[ChangesAudit | None, list[str]]:
    """Return the changes, None without an earlier report, and what makes them doubtful, in
    sentences."""
    if then is None:
        return None, []
    hits = (then.totals.hits, now.totals.hits)
    changes = ChangesAudit(
        made_s=then.made_s,
        verdict_then=verdict(then),
        verdict=verdict(now),
        chunks=now.totals.chunks - then.totals.chunks,
        payloads=now.totals.payloads - then.totals.payloads,
        nbytes=now.totals.nbytes - then.totals.nbytes,
        hits=None if hits[0] is None or hits[1] is None else hits[1] - hits[0],
        namespaces=_namespaces(then, now),
        findings=_findings(then, now),
    )
    return changes, _doubts(then, now)


def _doubts(then: AuditReport, now: AuditReport) -> list[str]:
    doubts = []
    urls = [(one.bulk_url, _LOGIN.sub("//", one.index_url)) for one in (then, now)]
    if urls[0] != urls[1]:
        doubts.append(
            f"the earlier audit is of another store or index ({then.bulk_url}, {then.index_url}), "
            "so the changes mean little"
        )
    if then.namespace != now.namespace:
        scope = then.namespace or "all namespaces"
        doubts.append(f"the earlier audit covers {scope}, so the changes compare different scopes")
    if then.ending != "complete" or now.ending != "complete":
        which = "earlier audit" if then.ending != "complete" else "audit"
        doubts.append(f"the {which} is not complete, so the changes are not either")
    return doubts


def _namespaces(then: AuditReport, now: AuditReport) -> tuple[NamespaceChange, ...]:
    before = {one.namespace: one for one in then.namespaces}
    after = {one.namespace: one for one in now.namespaces}
    changes = []
    for name in before.keys() | after.keys():
        a, b = before.get(name), after.get(name)
        known = b or a
        assert known is not None
        change = NamespaceChange(
            namespace=name,
            model=known.model,
            kind=_kind(a.nbytes if a else None, b.nbytes if b else None),
            chunks_then=a.chunks if a else 0,
            chunks=b.chunks if b else 0,
            nbytes_then=a.nbytes if a else 0,
            nbytes=b.nbytes if b else 0,
        )
        if change.kind != "same" or change.chunks != change.chunks_then:
            changes.append(change)
    changes.sort(key=lambda one: (-abs(one.nbytes - one.nbytes_then), one.namespace))
    return tuple(changes)


def _kind(then: int | None, now: int | None) -> ChangeKind:
    if then is None:
        return "new"
    if now is None:
        return "gone"
    if now == then:
        return "same"
    return "grown" if now > then else "shrunk"


def _findings(then: AuditReport, now: AuditReport) -> tuple[FindingChange, ...]:
    kinds: tuple[FindingKind, ...] = get_args(FindingKind)
    changes = []
    for kind in kinds:
        (a, before), (b, after) = _named(then, kind), _named(now, kind)
        if not (a or b):
            continue
        are_listed = len(before) == a and len(after) == b
        changes.append(
            FindingChange(
                kind=kind,
                count_then=a,
                count=b,
                new=len(after - before) if are_listed else None,
                fixed=len(before - after) if are_listed else None,
            )
        )
    return tuple(changes)


def _named(report: AuditReport, kind: FindingKind) -> tuple[int, set[str]]:
    """Return the number of findings of ``kind``, and the keys of those that are listed."""
    count = sum(one.count for one in report.findings.counts if one.kind == kind)
    return count, {one.key for one in report.findings.first if one.kind == kind}
