"""Why two replicas do not share: what differs between their identity documents, and what to do.

Works on any JSON documents, so that it also explains those of other versions: a field that it has
never heard of is told with a plain sentence. Nothing here touches a store.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from objkv.errors import ConfigError
from objkv.keys.identity import NAMESPACE_HEX, canonical_json
from objkv.ops.reasons import explain, root_of

Document = Mapping[str, Any]

_NAMES_SHOWN = 3
ABSENT = "(absent)"


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that is not the same in both documents."""

    field: str
    """``kv_dtype``, ``groups[0].block_size``, ``extra.dtype``."""
    a: Any
    """As in the document; lists in few words; ``ABSENT`` where the document does not have it."""
    b: Any
    why: str
    """What the field is about, and why KV is not shared across it."""
    fix: str
    """What makes it the same, if that is wanted."""
    follows_from: str | None = None
    """The differing field that this one differs because of, if any."""


@dataclass(frozen=True, slots=True)
class DiffReport:
    """What came of comparing two documents."""

    share: bool
    reason: str
    """One sentence."""
    differences: tuple[Difference, ...]

    @property
    def causes(self) -> tuple[Difference, ...]:
        """Those that do not follow from others: what there is to change."""
        return tuple(d for d in self.differences if d.follows_from is None)


def namespace_of(document: Document) -> str:
    """The namespace that replicas with this document share."""
    return hashlib.sha256(canonical_json(document)).hexdigest()[:NAMESPACE_HEX]


def parse_document(text: str, name: str) -> Document:
    """An identity document: JSON, or a replica's log with a line that ends ``document={…}``; of
    several lines the last. Raises ``ConfigError``, which calls the text ``name``."""
    found = _loaded(text)
    if found is None:
        for line in text.splitlines():
            _, mark, rest = line.partition("document={")
            if mark and (one := _loaded("{" + rest)) is not None:
                found = one
    if found is None:
        raise ConfigError(
            f"{name}: no identity document: give identity.json, or a log with 'objkv identity'"
        )
    return found


def diff(a: Document, b: Document) -> DiffReport:
    """Compare two documents field by field.

    >>> diff({"kv_dtype": "bfloat16"}, {"kv_dtype": "fp8"}).reason
    'they do not share: kv_dtype differs'
    """
    pairs = {field: (x, y) for field, x, y in _differing(a, b)}
    roots = {field: root_of(field, pairs) for field in pairs}
    found = []
    for field, (x, y) in pairs.items():
        why, fix = explain(field, x, y, pairs)
        found.append(Difference(field, _short(x), _short(y), why, fix, roots[field]))
    found.sort(key=lambda one: one.follows_from is not None)
    report = DiffReport(not found, "", tuple(found))
    return replace(report, reason=_reason(report))


def _reason(report: DiffReport) -> str:
    if report.share:
        return "they share: whatever one has saved, the other can load"
    # Of fields that follow from each other in a circle none would be left.
    causes = report.causes or report.differences
    names = [_name(cause) for cause in causes[:_NAMES_SHOWN]]
    more = len(causes) - len(names)
    listed = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    if more:
        listed = f"{', '.join(names)} and {more} more"
    verb = "differs" if len(causes) == 1 else "differ"
    return f"they do not share: {listed} {verb}"


def _name(cause: Difference) -> str:
    group, dot, rest = cause.field.partition("].")
    name = f"{rest} of group {group.removeprefix('groups[')}" if dot else cause.field
    return name.removeprefix("extra.")


def _differing(a: Document, b: Document) -> Iterator[tuple[str, Any, Any]]:
    for field in [*a, *(name for name in b if name not in a)]:
        x, y = a.get(field, ABSENT), b.get(field, ABSENT)
        if _same(x, y):
            continue
        if field == "groups" and _are_groups(x, y):
            yield from _in_groups(x, y)
        elif _is_pairs(x) and _is_pairs(y):
            yield from _within(field, dict(x), dict(y))
        else:
            yield from _within_value(field, x, y)


def _in_groups(a: Sequence[Any], b: Sequence[Any]) -> Iterator[tuple[str, Any, Any]]:
    if len(a) != len(b):
        yield "groups", a, b
        return
    for number, (x, y) in enumerate(zip(a, b, strict=True)):
        yield from _within(f"groups[{number}]", x, y)


def _within(name: str, a: Document, b: Document) -> Iterator[tuple[str, Any, Any]]:
    for field in sorted({*a, *b}):
        x, y = a.get(field, ABSENT), b.get(field, ABSENT)
        if not _same(x, y):
            yield from _within_value(f"{name}.{field}", x, y)


def _within_value(name: str, a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    """Where both are objects, also as text, what differs within them."""
    x, y = _object(a), _object(b)
    if x is not None and y is not None and not _same(x, y):
        yield from _within(name, x, y)
    else:
        yield name, a, b


def _object(value: Any) -> Document | None:
    if isinstance(value, dict):
        return value
    return _loaded(value) if isinstance(value, str) and value.startswith("{") else None


def _loaded(text: str) -> Document | None:
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _refuse(constant: str) -> Any:
    """No document has ``NaN`` or an infinity, nor has JSON."""
    raise ValueError(constant)


def _same(a: Any, b: Any) -> bool:
    """As the namespace sees it: 1 is not true, and not 1.0."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def _are_groups(*values: Any) -> bool:
    return all(isinstance(v, list) and all(isinstance(g, dict) for g in v) for v in values)


def _is_pairs(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    pairs = [p for p in value if isinstance(p, list) and len(p) == 2 and isinstance(p[0], str)]
    return len(pairs) == len({name for name, _ in pairs}) == len(value)


def _short(value: Any) -> Any:
    """``value``, lists in few words."""
    if not isinstance(value, list):
        return value
    if _are_groups(value) and value:
        return f"{len(value)}: " + ", ".join(
            f"{group.get('kind', '?')} of {_count(group.get('layers'))}" for group in value
        )
    if len(value) > _NAMES_SHOWN:
        return f"{len(value)}: {value[0]} … {value[-1]}"
    return ", ".join(map(str, value))


def _count(layers: Any) -> str:
    if not isinstance(layers, list):
        return "unknown layers"
    return "1 layer" if len(layers) == 1 else f"{len(layers)} layers"
