"""The namespaces of a bulk store, and finding one by model, tenant or the first hex digits.

Namespaces are listed from the bulk store, which every role may list; only the sweeper may scan the
keys of Redis.
"""

import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from objkv.errors import StoreError, UnclearName
from objkv.index.base import ReadIndex
from objkv.keys.identity import NAMESPACE_HEX, identity_path
from objkv.ops.backends_view import DOCUMENT_BYTES_MAX, stored_namespaces
from objkv.ops.formats import DASH, printable, size, span
from objkv.stores.base import ReadStore

_WHOLE: Final = re.compile(rf"[0-9a-f]{{{NAMESPACE_HEX}}}")
_HEX: Final = re.compile(rf"[0-9a-f]{{1,{NAMESPACE_HEX}}}")
_SHOWN: Final = 20
"""Namespaces that an error lists."""


@dataclass(frozen=True, slots=True)
class NamedNamespace:
    """One namespace of the bulk store, with the names that people know it by."""

    name: str
    """32 hex digits."""
    model: str | None
    """None if its identity document is missing or unreadable."""
    tenant: str | None

    def is_called(self, text: str) -> bool:
        """Whether ``text`` is its model, the last part of that, or either after its tenant."""
        return text in self._names()

    def is_abbreviated(self, text: str) -> bool:
        """Whether its name in hex digits or one of its other names starts with ``text``."""
        return any(name.startswith(text) for name in (self.name, *self._names()))

    def _names(self) -> tuple[str, ...]:
        if self.model is None:
            return ()
        short = self.model.rstrip("/").rpartition("/")[2]
        return (self.model, short, f"{self.tenant}/{self.model}", f"{self.tenant}/{short}")


def named_namespaces(bulk: ReadStore) -> list[NamedNamespace]:
    """Return the namespaces of ``bulk``. Takes one listing, and one get per namespace.

    Raises ``StoreError``.
    """
    return [_named(bulk, name) for name in stored_namespaces(bulk)]


def find_namespace(bulk: ReadStore, index: ReadIndex, wanted: str | None) -> str:
    """Return the one namespace called ``wanted``; for None, the only namespace.

    ``wanted`` is the name's hex digits, ``MODEL`` or ``TENANT/MODEL``, or any unambiguous beginning
    of one. A complete name of 32 hex digits is returned unchecked, without a request. ``index``
    only supplies sizes for the choices in an error. Raises ``UnclearName`` with the choices and
    ``StoreError``.
    """
    if wanted is not None and _WHOLE.fullmatch(wanted):
        return wanted
    names = stored_namespaces(bulk)
    if not names:
        raise UnclearName(
            "the bulk store has no namespaces; either no replica has saved yet, or bulk_url is "
            "wrong"
        )
    if wanted is None:
        if len(names) == 1:
            return names[0]
        raise _choose(f"{len(names)} namespaces; choose one with --namespace", bulk, index, names)
    if wanted and len(wanted) >= 6 and _HEX.fullmatch(wanted):
        # Most names are given this way, and listing is cheaper than reading every document.
        found = [name for name in names if name.startswith(wanted)]
        if len(found) == 1:
            return found[0]
    known = [_named(bulk, name) for name in names]
    tests: tuple[Callable[[NamedNamespace], bool], ...] = (
        lambda one: one.is_called(wanted),
        lambda one: one.is_abbreviated(wanted),
    )
    for test in tests:
        matching = [one.name for one in known if test(one)]
        if len(matching) == 1:
            return matching[0]
        if matching:
            what = f"{len(matching)} namespaces match {wanted}; choose one with --namespace"
            raise _choose(what, bulk, index, matching)
    raise _choose(f"no namespace matches {wanted}; choose one of", bulk, index, names)


def _choose(what: str, bulk: ReadStore, index: ReadIndex, names: Sequence[str]) -> UnclearName:
    """Return an error that lists model, tenant, age and size of the choices."""
    nbytes: dict[str, int] = {}
    with suppress(StoreError):  # sizes are only a help
        nbytes = {usage.namespace: usage.nbytes for usage in index.usage()}
    lines = []
    for name in names[:_SHOWN]:
        one, document = _named(bulk, name), bulk.head(identity_path(name))
        age = DASH if document is None else f"{span(time.time() - document.modified_s)} old"
        model = printable(one.model) if one.model else "unknown model"
        tenant = printable(one.tenant) if one.tenant else DASH
        lines.append(f"{name}  {model}  tenant {tenant}  {age}  {size(nbytes.get(name))}")
    if len(names) > _SHOWN:
        lines.append(f"and {len(names) - _SHOWN:,} more: objkv ls")
    return UnclearName(what, lines)


def _named(bulk: ReadStore, name: str) -> NamedNamespace:
    document = bulk.get_range(identity_path(name), 0, DOCUMENT_BYTES_MAX)
    try:
        values = json.loads(document or b"")
        model, tenant = values["model"], values["tenant"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return NamedNamespace(name, None, None)
    if not isinstance(model, str) or not isinstance(tenant, str):
        return NamedNamespace(name, None, None)
    return NamedNamespace(name, model, tenant)
