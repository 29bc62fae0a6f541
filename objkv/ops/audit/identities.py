"""The identities of an audit's namespaces, and why the namespaces do not share."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from objkv.errors import PayloadError
from objkv.ops.audit.report import FieldDifference, IdentityDifference
from objkv.ops.backends_view import StoredNamespace, identity_document, read_namespace
from objkv.ops.diff import Difference, diff
from objkv.stores.base import ReadStore

COMPARED_MAX = 40
"""Namespaces to compare with each other: 780 pairs."""
_TEXT_MAX = 200


@dataclass(frozen=True, slots=True)
class Facts:
    """One namespace, as described by its identity document. Its texts are untrusted."""

    namespace: StoredNamespace
    model: str | None = None
    kv_dtype: str | None = None
    chunk_tokens: int | None = None
    problem: str | None = None

    @property
    def tenant(self) -> str | None:
        """None if the document is unreadable."""
        return self.namespace.tenant if self.namespace.is_known else None


def read_facts(bulk: ReadStore, name: str) -> Facts:
    """Return the facts of the namespace ``name``. Raises ``StoreError``."""
    namespace = read_namespace(bulk, name)
    try:
        document = identity_document(bulk, name)
    except PayloadError as exc:
        return Facts(namespace, problem=str(exc))
    if document is None:
        return Facts(namespace, problem="no identity document")
    if not namespace.is_known:
        return Facts(namespace, problem="its identity document is damaged or of another namespace")
    values = _values(document)
    return Facts(
        namespace,
        _text(values.get("model")),
        _text(values.get("kv_dtype")),
        _number(values.get("chunk_tokens")),
    )


def compare(
    bulk: ReadStore, facts: Sequence[Facts], *, most: int
) -> tuple[tuple[IdentityDifference, ...], int]:
    """Return why the first ``COMPARED_MAX`` of ``facts`` do not share, and the omitted pairs.

    Returns at most ``most`` pairs, most similar first. Pairs of one tenant come first, because
    tenants never share.
    """
    known = [one for one in facts if one.namespace.is_known]
    documents = [
        (one, _values(document))
        for one in known[:COMPARED_MAX]
        if (document := identity_document(bulk, one.namespace.name)) is not None
    ]
    found = []
    for (a, x), (b, y) in combinations(documents, 2):
        report = diff(x, y)
        fields = tuple(_field(one) for one in report.causes or report.differences)
        pair = IdentityDifference(a.namespace.name, b.namespace.name, report.reason, fields)
        found.append((a.tenant != b.tenant, len(fields), pair))
    found.sort(key=lambda one: one[:2])  # stable: equally similar pairs stay largest first
    pairs = len(known) * (len(known) - 1) // 2
    shown = tuple(pair for _, _, pair in found[:most])
    return shown, pairs - len(shown)


def _field(one: Difference) -> FieldDifference:
    return FieldDifference(one.field, _shown(one.a), _shown(one.b), one.why, one.fix)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _TEXT_MAX else f"{text[:_TEXT_MAX]}…"


def _values(document: bytes) -> dict[str, Any]:
    """Return the values of a document that ``read_namespace`` has parsed."""
    values = json.loads(document)
    return values if isinstance(values, dict) else {}


def _text(value: object) -> str | None:
    return value[:_TEXT_MAX] if isinstance(value, str) else None


def _number(value: object) -> int | None:
    return value if type(value) is int and 0 < value < 1 << 40 else None
