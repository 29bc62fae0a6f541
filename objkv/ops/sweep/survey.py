"""Read before a sweep removes anything: the namespaces with their documents and pins, and whether
store and index belong together."""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from objkv.cache.pins import read_pins
from objkv.errors import ConfigError
from objkv.ops.backends_view import (
    BackendsView,
    NamespacePart,
    StoredNamespace,
    expected_payloads,
    read_namespace,
    record_keys,
    stored_namespaces,
    stored_parts,
    stored_payloads,
)
from objkv.stores.base import ReadStore

_SAMPLE = 2_000
"""Payloads or records sampled to judge a backend."""
_YOUNG_MIN = 4
_MOST = 0.5


@dataclass(frozen=True, slots=True)
class Survey:
    """The stored namespaces."""

    namespaces: Mapping[str, StoredNamespace]
    """Namespaces with a folder in the bulk store."""
    parts: Sequence[NamespacePart]
    indexed: Sequence[str]
    """Namespaces with records in the index."""
    counted: Sequence[str]
    """Namespaces that may have totals, including those whose records have all expired."""
    pins: Mapping[str, frozenset[bytes]]
    """Chunks pinned now, by namespace."""
    old: frozenset[str]
    """Namespaces of an earlier epoch or format, see ``old_epochs``."""
    only: str | None = None
    """The only namespace swept; None for all."""
    totals: Mapping[str, int] = field(default_factory=dict)
    """The expected number of payloads per namespace."""


def survey(
    view: BackendsView, only: str | None = None, *, clock: Callable[[], float] = time.time
) -> Survey:
    """Read the names, documents and pins of everything, or of the namespace ``only``."""
    every = {name: read_namespace(view.bulk, name) for name in stored_namespaces(view.bulk)}
    old = old_epochs(every.values())
    indexed: Sequence[str] = () if view.is_own_index else view.index.namespaces()
    counted, totals = set[str](), expected_payloads(view.index, is_own_index=view.is_own_index)
    if not view.is_own_index:
        counted = {*indexed, *every, *totals}
    if only is not None:
        every = {name: found for name, found in every.items() if name == only}
        indexed = [name for name in indexed if name == only]
        counted &= {only}
    now_s = clock()
    return Survey(
        namespaces=every,
        parts=stored_parts(view.bulk, list(every), totals),
        indexed=indexed,
        counted=sorted(counted),
        pins={name: _pinned(view.bulk, name, now_s) for name in every},
        old=old & every.keys(),
        only=only,
        totals=totals,
    )


def old_epochs(namespaces: Iterable[StoredNamespace]) -> frozenset[str]:
    """Return the namespaces whose document differs from another one only by a lower epoch, or names
    a format that is not read any more."""
    alike: defaultdict[bytes, list[StoredNamespace]] = defaultdict(list)
    for namespace in namespaces:
        if namespace.is_known:
            alike[namespace.rest].append(namespace)
    return frozenset(
        one.name
        for group in alike.values()
        for one in group
        if one.is_old_format or one.weights_epoch < max(other.weights_epoch for other in group)
    )


@dataclass(frozen=True, slots=True)
class Doubt:
    """Why some data looks unreachable by mistake, so that a sweep keeps it unless forced."""

    namespace: str | None
    """None if index and bulk store do not match at all: then a sweep deletes nothing."""
    why: str


def find_doubts(
    view: BackendsView, found: Survey, *, clock: Callable[[], float] = time.time
) -> tuple[Doubt, ...]:
    """Return the data that the sweep would remove only because the other backend lacks most of it:
    that backend was probably wiped, or is the wrong one.

    A payload younger than a record's lifetime has a record, unless its writer was killed. Payloads
    of strangers are not judged by the index; they need ``--strangers``.
    """
    if view.is_own_index:
        return ()
    seen = known = 0
    doubts = []
    for name, namespace in found.namespaces.items():
        if name in found.old or not namespace.is_known:
            continue
        parts = [part for part in found.parts if part.namespace == name]
        count = _count(view, parts, clock())
        seen, known = seen + count.seen, known + count.known
        if looks_lost(count.young, count.young_lost):
            doubts.append(
                Doubt(
                    name,
                    f"the index has no record of most payloads in {name} that are younger than "
                    "ttl_s: it looks wiped, or belongs to another bucket; run objkv rebuild "
                    "--apply, or sweep with --force to delete them",
                )
            )
    if seen and not known:
        doubts = [
            Doubt(
                None,
                "the index has no record of any payload: it was wiped, belongs to another bucket, "
                "or all records have expired; run objkv rebuild --apply, or sweep with --force to "
                "delete all",
            )
        ]
    try:
        refuse_wrong_bulk(view, [name for name in found.indexed if name not in found.old])
    except ConfigError as exc:
        doubts.append(Doubt(None, str(exc)))
    return tuple(doubts)


def looks_lost(young: int, lost: int) -> bool:
    """Whether so many of the ``young`` payloads of a namespace are ``lost``, without a record, that
    a sweep keeps them."""
    return young >= _YOUNG_MIN and lost > _MOST * young


def with_earlier(
    names: Collection[str], namespaces: Mapping[str, StoredNamespace], old: Collection[str]
) -> frozenset[str]:
    """Return the namespaces ``names`` with their earlier epochs among ``old``: records show whether
    those are still in use."""
    rests = {one.rest for name, one in namespaces.items() if name in names}
    return frozenset(
        name
        for name, one in namespaces.items()
        if one.is_known and one.rest in rests and (name in names or name in old)
    )


def doubted(found: Survey, doubts: Iterable[Doubt]) -> frozenset[str]:
    """Return the doubted namespaces, with their earlier epochs."""
    names = {one.namespace for one in doubts if one.namespace is not None}
    return with_earlier(names, found.namespaces, found.old)


@dataclass(slots=True)
class _Count:
    seen: int = 0
    known: int = 0
    young: int = 0
    young_lost: int = 0


def _count(view: BackendsView, parts: Sequence[NamespacePart], now_s: float) -> _Count:
    """Count some hundreds or thousands of payloads, selected by their hashes."""
    count = _Count()
    for part in parts:
        for batch in stored_payloads(view, part):
            for stored in batch:
                is_known = stored.shard is not None
                is_young = now_s - stored.entry.modified_s < view.ttl_s
                count.seen += 1
                count.known += is_known
                count.young += is_young
                count.young_lost += is_young and not is_known
        if count.seen >= _SAMPLE:
            break
    return count


def refuse_wrong_bulk(view: BackendsView, names: Sequence[str]) -> None:
    """Raise ``ConfigError`` if the bulk store has none of the payloads recorded in the index for
    the namespaces ``names``."""
    keys = [
        key.path()
        for name in names
        for record in islice(view.index.scan(name), _SAMPLE // len(names) + 1)
        for key in record_keys(name, record)
    ]
    if keys and not any(view.bulk.head(path) for path in _spread(keys, _YOUNG_MIN * 16)):
        raise ConfigError(
            "the bulk store has none of the payloads recorded in the index: it belongs to another "
            "index, or was emptied; use --force to remove the records anyway"
        )


def _spread(keys: Sequence[str], most: int) -> Sequence[str]:
    return keys[:: max(1, len(keys) // most)]


def _pinned(bulk: ReadStore, namespace: str, now_s: float) -> frozenset[bytes]:
    pins = read_pins(bulk, namespace)
    return frozenset(prefix_hash for prefix_hash, until_s in pins.items() if until_s > now_s)
