"""Lists namespaces, and finds them by name.

Namespaces are found in the bulk store, which every role may list.
"""

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from objkv.errors import ConfigError, StoreError, UnclearName
from objkv.index.base import ReadIndex
from objkv.keys.identity import NAMESPACE_HEX, Identity, identity_path
from objkv.ops.backends_view import (
    StoredNamespace,
    read_identity,
    read_namespace,
    stored_namespaces,
)
from objkv.ops.formats import DASH, printable, size, span
from objkv.ops.inventory.file import Inventory
from objkv.ops.inventory.walk import WalkScope, is_fan
from objkv.stores.base import ReadStore

_NAMESPACES_MAX: Final = 100


@dataclass(frozen=True, slots=True)
class NamespaceSummary:
    """One namespace. Values from its identity document are None if it is unreadable."""

    namespace: str
    model: str | None
    tenant: str | None
    kv_dtype: str | None
    chunk_tokens: int | None
    payloads: int
    nbytes: int
    counted_s: int
    """When the totals were last counted exactly, in seconds since the epoch; 0 if never. Since then
    the index has kept them up to date."""
    chunks: int | None = None
    """None, as the next three, unless the bucket was counted (``--bulk``)."""
    tokens: int | None = None
    """Stored tokens; each chunk is counted once, however many shards it has."""
    oldest_s: int | None = None
    """Seconds since the epoch; None without payloads."""
    newest_s: int | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class TenantTotals:
    """The index's totals for one tenant."""

    tenant: str | None
    """None for namespaces without an identity document."""
    namespaces: int
    nbytes: int
    payloads: int
    counted_s: int
    """When its least recently counted total was counted, in seconds since the epoch; 0 if never."""


def list_namespaces(bulk: ReadStore, index: ReadIndex) -> list[NamespaceSummary]:
    """Return the namespaces with totals in the index. Reads no records."""
    return [
        _summary(read_namespace(bulk, one.namespace), one.payloads, one.nbytes, one.counted_s)
        for one in index.usage()
    ]


def payload_namespaces(bulk: ReadStore) -> list[str]:
    """Return the namespaces with payloads in the bulk store, of its first hundred, except those of
    an earlier format. Lists each and reads its identity document."""
    return [
        name
        for name in stored_namespaces(bulk)[:_NAMESPACES_MAX]
        if any(map(is_fan, bulk.folders(name))) and not read_namespace(bulk, name).is_old_format
    ]


_COUNTED = """
SELECT ns, count(*), sum(nbytes), count(DISTINCT hash), min(modified_s), max(modified_s)
FROM main.payloads WHERE nbytes IS NOT NULL GROUP BY ns
"""


def counted_namespaces(inventory: Inventory, scope: WalkScope) -> list[NamespaceSummary]:
    """Return the namespaces of the bulk store with their payloads, as an inventory found them."""
    names = inventory.names()
    found = {names[ns]: counts for ns, *counts in inventory.rows(_COUNTED)}
    summaries = []
    for name, known in sorted(scope.namespaces.items()):
        payloads, nbytes, chunks, oldest_s, newest_s = found.get(name, (0, 0, 0, None, None))
        summaries.append(
            _summary(
                known,
                payloads,
                nbytes,
                int(inventory.begun_s),
                chunks=chunks,
                tokens=chunks * known.chunk_tokens if known.chunk_tokens else None,
                oldest_s=None if oldest_s is None else int(oldest_s),
                newest_s=None if newest_s is None else int(newest_s),
            )
        )
    return summaries


def _summary(
    known: StoredNamespace, payloads: int, nbytes: int, counted_s: int, **more: int | None
) -> NamespaceSummary:
    return NamespaceSummary(
        namespace=known.name,
        model=known.model,
        tenant=known.tenant,
        kv_dtype=known.kv_dtype,
        chunk_tokens=known.chunk_tokens,
        payloads=payloads,
        nbytes=nbytes,
        counted_s=counted_s,
        problem=known.problem,
        **more,
    )


def list_tenants(namespaces: Iterable[NamespaceSummary]) -> list[TenantTotals]:
    """Return the totals by tenant."""
    found: defaultdict[str | None, list[NamespaceSummary]] = defaultdict(list)
    for one in namespaces:
        found[one.tenant].append(one)
    return [
        TenantTotals(
            tenant,
            len(every),
            sum(one.nbytes for one in every),
            sum(one.payloads for one in every),
            min(one.counted_s for one in every),
        )
        for tenant, every in sorted(found.items(), key=lambda item: item[0] or "")
    ]


_HEX: Final = re.compile(rf"[0-9a-f]{{1,{NAMESPACE_HEX}}}")
_CERTAIN: Final = 6
"""Hex digits that are taken for the start of a hash before any model is compared with them."""
_SHOWN: Final = 20
"""Namespaces that an error lists."""
_NOTHING: Final = (
    "the bulk store has no namespaces; either no replica has saved yet, or bulk_url is wrong"
)
_OLD: Final = (
    "of an earlier format that is not read any more; objkv sweep --apply deletes their payloads"
)


def namespaces_called(
    known: Iterable[tuple[str, str | None, str | None]], wanted: str
) -> list[str]:
    """Return the namespaces called ``wanted``; if there is none, those with a name that begins so.
    ``known``: name, model and tenant of each."""
    names = {}
    for name, model, tenant in known:
        short = (model or "").rstrip("/").rpartition("/")[2]
        called = (model, short, f"{tenant}/{model}", f"{tenant}/{short}")
        names[name] = () if model is None else called
    return [name for name, called in names.items() if wanted in called] or [
        name
        for name, called in names.items()
        if any(str(one).startswith(wanted) for one in (name, *called))
    ]


def find_identity(bulk: ReadStore, index: ReadIndex, wanted: str | None) -> Identity:
    """Return the identity of the namespace called ``wanted``; for None, of the only one with KV.
    Raises ``ConfigError``, ``PayloadError`` and ``StoreError``."""
    name = find_namespace(bulk, index, wanted)
    identity = read_identity(bulk, name)
    if identity is None:
        why = "either no replica has saved there, or bulk_url and index_url do not belong together"
        if name in stored_namespaces(bulk):
            why = "a replica of that model writes it again when it starts"
        raise ConfigError(f"the bulk store has no {name}/identity.json; {why}")
    return identity


def find_namespace(
    bulk: ReadStore, index: ReadIndex, wanted: str | None, *, must_exist: bool = False
) -> str:
    """Return the one namespace called ``wanted``; for None, the only one with KV chunks.

    ``wanted`` is the name's hex digits, ``MODEL`` or ``TENANT/MODEL``, or any unambiguous beginning
    of one. A complete name of 32 hex digits is returned without a request, unless it
    ``must_exist``. Hex digits also find a namespace that is only in the index. Namespaces of an
    earlier format are no choice besides current ones, unless the namespace ``must_exist``: what
    changes a namespace leaves the choice to the user. Raises ``UnclearName`` with the choices and
    ``StoreError``.
    """
    if wanted is None:
        return _only_namespace(bulk, index)
    is_hex = _HEX.fullmatch(wanted) is not None
    if is_hex and len(wanted) == NAMESPACE_HEX and not must_exist:
        return wanted
    if not wanted:
        raise UnclearName("the name of the namespace is empty")
    names = stored_namespaces(bulk)
    if is_hex:
        names = sorted({*names, *index.namespaces()})
    if not names:
        raise UnclearName(_NOTHING)
    if is_hex and len(wanted) >= _CERTAIN:
        # Most names are given this way, and listing is cheaper than reading every document.
        found = [name for name in names if name.startswith(wanted)]
        if len(found) == 1:
            return found[0]
    known = [read_namespace(bulk, name) for name in names]
    matching = namespaces_called([(one.name, one.model, one.tenant) for one in known], wanted)
    if not must_exist:
        old = {one.name for one in known if one.is_old_format}
        matching = [name for name in matching if name not in old] or matching
    if len(matching) == 1:
        return matching[0]
    if matching:
        what = f"{len(matching)} namespaces match {wanted}; choose one"
        raise _choose(what, bulk, index, matching)
    raise _choose(f"no namespace matches {wanted}; choose one of", bulk, index, names)


def _only_namespace(bulk: ReadStore, index: ReadIndex) -> str:
    names = index.namespaces() or stored_namespaces(bulk)
    if not names:
        raise UnclearName(_NOTHING)
    if len(names) > 1:
        every = [read_namespace(bulk, name) for name in names]
        # No prompt matches encoder outputs, hand-offs and earlier formats, nor a namespace without
        # its document, which is a choice only if nothing else is.
        names = [one.name for one in every if one.has_chunks and not one.is_old_format]
        names = names or [one.name for one in every if not one.is_known]
        if not names and all(one.is_old_format for one in every):
            raise UnclearName(f"{len(every)} namespaces, all {_OLD}")
        if not names:
            raise UnclearName(f"{len(every)} namespaces, but none holds chunks that prompts match")
    if len(names) == 1:
        return names[0]
    raise _choose(f"{len(names)} namespaces; choose one", bulk, index, names)


def _choose(what: str, bulk: ReadStore, index: ReadIndex, names: Sequence[str]) -> UnclearName:
    """Return an error that lists model, tenant, age and size of the choices."""
    nbytes: dict[str, int] = {}
    with suppress(StoreError):  # sizes are only a help
        nbytes = {usage.namespace: usage.nbytes for usage in index.usage()}
    lines = []
    for name in names[:_SHOWN]:
        one, document = read_namespace(bulk, name), bulk.head(identity_path(name))
        age = DASH if document is None else f"{span(time.time() - document.modified_s)} old"
        model = printable(one.model) if one.model else "unknown model"
        tenant = printable(one.tenant) if one.tenant else DASH
        lines.append(f"{name}  {model}  tenant {tenant}  {age}  {size(nbytes.get(name))}")
    if len(names) > _SHOWN:
        lines.append(f"and {len(names) - _SHOWN:,} more: objkv ls")
    return UnclearName(what, lines)
