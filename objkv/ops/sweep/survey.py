"""What a sweep looks at before it removes anything: what every namespace stands for, and whether
both ends belong together."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from objkv.cache.pins import read_pins
from objkv.errors import ConfigError
from objkv.index.shapes import is_shapes
from objkv.ops.backends_view import (
    BackendsView,
    NamespacePart,
    StoredNamespace,
    read_namespace,
    record_keys,
    stored_namespaces,
    stored_parts,
    stored_payloads,
)
from objkv.stores.base import ReadStore

_SAMPLE = 2_000
"""Payloads, or records, by which an end is judged."""
_YOUNG_MIN = 4
_MOST = 0.5


@dataclass(frozen=True, slots=True)
class Survey:
    """What is stored, by name."""

    namespaces: Mapping[str, StoredNamespace]
    """Those that the bulk store has folders of."""
    parts: Sequence[NamespacePart]
    indexed: Sequence[str]
    """Namespaces that the index has records of."""
    counted: Sequence[str]
    """Namespaces of which there may be totals: also those whose records have all expired."""
    pins: Mapping[str, frozenset[bytes]]
    """By namespace, the chunks that are pinned now."""
    old: frozenset[str]
    """Namespaces of which there is one with a later epoch, and no other difference."""
    only: str | None = None
    """The one namespace that is looked at; None for all."""


def survey(
    view: BackendsView, only: str | None = None, *, clock: Callable[[], float] = time.time
) -> Survey:
    """Read the names, documents and pins of everything, or of the namespace ``only``."""
    every = {name: read_namespace(view.bulk, name) for name in stored_namespaces(view.bulk)}
    old = old_epochs(every.values())
    indexed: Sequence[str] = () if view.is_own_index else view.index.namespaces()
    counted: set[str] = set()
    if not view.is_own_index:
        counted = {*indexed, *every, *(usage.namespace for usage in view.index.usage())}
    if only is not None:
        every = {name: found for name, found in every.items() if name == only}
        indexed = [name for name in indexed if name == only]
        counted &= {only}
    now_s = clock()
    return Survey(
        namespaces=every,
        parts=stored_parts(view.bulk, list(every)),
        indexed=indexed,
        counted=sorted(counted),
        pins={name: _pinned(view.bulk, name, now_s) for name in every},
        old=old & every.keys(),
        only=only,
    )


def old_epochs(namespaces: Iterable[StoredNamespace]) -> frozenset[str]:
    """Those whose documents are equal to another's but for a lower epoch."""
    alike: defaultdict[bytes, list[StoredNamespace]] = defaultdict(list)
    for namespace in namespaces:
        if namespace.is_known:
            alike[namespace.rest].append(namespace)
    return frozenset(
        one.name
        for group in alike.values()
        for one in group
        if one.weights_epoch < max(other.weights_epoch for other in group)
    )


def refuse_mismatch(
    view: BackendsView, found: Survey, *, clock: Callable[[], float] = time.time
) -> None:
    """Raises ``ConfigError`` where removing what the other end does not know would remove most:
    that end was wiped, or it is not the one that belongs here.

    A payload that is younger than a record's life has a record, unless its writer was killed.
    """
    if view.is_own_index:
        return
    seen = known = 0
    for name in found.namespaces:
        if name in found.old:
            continue
        parts = [part for part in found.parts if part.namespace == name]
        count = _count(view, parts, clock())
        seen, known = seen + count.seen, known + count.known
        if count.young >= _YOUNG_MIN and count.young_lost > _MOST * count.young:
            raise ConfigError(
                f"the index has no record of most payloads in {name} that are younger than a "
                "record's life: it looks wiped, or is not the one of this bucket. Run objkv "
                "rebuild, or sweep with --force if they are to go"
            )
    if seen and not known:
        raise ConfigError(
            "the index has no record of any payload: it was wiped, is not the one of this bucket, "
            "or nothing was used for long. Run objkv rebuild, or sweep with --force if all is to go"
        )
    refuse_wrong_bulk(view, [name for name in found.indexed if name not in found.old])


@dataclass(slots=True)
class _Count:
    seen: int = 0
    known: int = 0
    young: int = 0
    young_lost: int = 0


def _count(view: BackendsView, parts: Sequence[NamespacePart], now_s: float) -> _Count:
    """Of some hundreds or thousands of payloads, which hashes choose."""
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
    """Raises ``ConfigError`` where the bulk store has none of the payloads that the index knows in
    the namespaces ``names``."""
    keys = [
        key.path()
        for name in names
        for record in islice(
            (one for one in view.index.scan(name) if not is_shapes(one)), _SAMPLE // len(names) + 1
        )
        for key in record_keys(name, record)
    ]
    if keys and not any(view.bulk.head(path) for path in _spread(keys, _YOUNG_MIN * 16)):
        raise ConfigError(
            "none of the payloads that the index knows is in the bulk store: it is not the one of "
            "this index, or was emptied. With --force the records go all the same"
        )


def _spread(keys: Sequence[str], most: int) -> Sequence[str]:
    return keys[:: max(1, len(keys) // most)]


def _pinned(bulk: ReadStore, namespace: str, now_s: float) -> frozenset[bytes]:
    pins = read_pins(bulk, namespace)
    return frozenset(prefix_hash for prefix_hash, until_s in pins.items() if until_s > now_s)
