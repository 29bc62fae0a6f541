"""The identities of an audit's namespaces."""

import json
from dataclasses import dataclass
from typing import Any

from objkv.errors import PayloadError
from objkv.ops.backends_view import StoredNamespace, identity_document, read_namespace
from objkv.stores.base import ReadStore

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


def _values(document: bytes) -> dict[str, Any]:
    """Return the values of a document that ``read_namespace`` has parsed."""
    values = json.loads(document)
    return values if isinstance(values, dict) else {}


def _text(value: object) -> str | None:
    return value[:_TEXT_MAX] if isinstance(value, str) else None


def _number(value: object) -> int | None:
    return value if type(value) is int and 0 < value < 1 << 40 else None
