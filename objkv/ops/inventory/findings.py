"""What is wrong in an inventory: one word (of ``found`` in ``file``) and one remedy per finding."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from objkv.keys.chunk import payload_path
from objkv.ops.formats import span
from objkv.ops.inventory.file import Inventory
from objkv.ops.inventory.walk import WalkScope, with_old_epochs
from objkv.ops.runs import Finding

FindingKind = Literal[
    "missing", "orphan", "unidentified", "corrupt", "expired", "old_epoch", "temporary",
    "quarantined", "other",
]  # fmt: skip
"""The last five are ordinary: the next sweep removes them, except for ``other``."""
FAULTS: Final[tuple[FindingKind, ...]] = ("missing", "orphan", "unidentified", "corrupt")
"""Findings that should not exist. An orphan that is ``young`` is none yet."""
MEANINGS: Final[dict[FindingKind, str]] = {
    "missing": "records without a payload",
    "orphan": "payloads without a record, which no reader can find",
    "unidentified": "payloads of namespaces without a valid identity document",
    "corrupt": "payloads with a wrong length or header",
    "expired": "payloads that were not used for ttl_s, so their records ran out",
    "old_epoch": "payloads of an earlier weights_epoch or format",
    "temporary": "files of killed writers",
    "quarantined": "payloads that objkv verify moved to quarantine",
    "other": "files that are not objkv's",
}
REMEDIES: Final[dict[FindingKind, str]] = {
    "missing": "objkv sweep --apply forgets them; until then each one costs a failed load",
    "orphan": "objkv rebuild --apply restores their records, or objkv sweep --apply deletes them",
    "unidentified": "a replica of that model writes the document again when it starts, unless a "
    "damaged one is there; objkv sweep --apply --unidentified -n NS deletes those of namespace NS",
    "corrupt": "objkv verify --all --quarantine --apply quarantines them",
    "expired": "objkv sweep --apply deletes them",
    "old_epoch": "objkv sweep --apply deletes them",
    "temporary": "objkv sweep --apply deletes them",
    "quarantined": "objkv sweep --apply deletes them",
    "other": "objkv leaves them alone",
}
FIRST_MAX: Final = 100
"""Findings listed by name, per kind."""
_DOUBTED: Final[tuple[FindingKind, ...]] = ("orphan", "expired", "old_epoch")
"""Kinds that a sweep keeps in a namespace that seems to have lost its records."""
_GRACED: Final[tuple[FindingKind, ...]] = (
    "orphan", "unidentified", "old_epoch", "temporary", "quarantined",
)  # fmt: skip
"""Kinds that a sweep keeps until they are older than ``sweep_grace_s``."""
_PINNABLE: Final[tuple[FindingKind, ...]] = ("orphan", "unidentified", "expired", "old_epoch")
"""Kinds that a sweep keeps while they are pinned."""
_COUNTS = """
SELECT kind, ns, count(*), sum(size), sum(at_s > ?1), sum((at_s > ?1) * size), max(at_s),
  sum(is_pinned) FROM (
  SELECT kind, ns, ifnull(nbytes, recorded) AS size, ifnull(modified_s, created_s) AS at_s,
    is_pinned AND nbytes IS NOT NULL AS is_pinned
    FROM temp.found WHERE kind NOT IN ('sound', 'gone')
  UNION ALL SELECT kind, ns, nbytes, modified_s, 0 FROM main.others)
GROUP BY kind, ns
"""
_FIRST = """
SELECT ns, hash, field, ifnull(nbytes, recorded), problem, nbytes, recorded FROM temp.found
WHERE kind = ? LIMIT ?
"""
_OTHERS = "SELECT key, name, nbytes, detail FROM main.others WHERE kind = ? LIMIT ?"
# By what a sweep judges a namespace: what was there before the walk began, and is not superseded.
_KNOWN = """
SELECT n.name, count(*), count(p.recorded), sum(young), sum(young AND p.recorded IS NULL)
FROM (SELECT *, modified_s > ? AND modified_s <= ? AS young FROM main.payloads
    WHERE nbytes IS NOT NULL) p
JOIN main.namespaces n ON n.id = p.ns WHERE n.is_known AND NOT n.is_old GROUP BY p.ns
"""
_STORED = """
SELECT count(*), count(p.nbytes) FROM main.payloads p JOIN main.namespaces n ON n.id = p.ns
WHERE p.recorded IS NOT NULL AND NOT n.is_old
"""
_YOUNG_MIN = 4
_MOST = 0.5
_NAMES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Doubt:
    """Why some data looks unreachable by mistake, so that a sweep keeps it unless forced."""

    namespace: str | None
    """None if index and bulk store do not match at all: then a sweep deletes nothing."""
    why: str
    is_of_bulk: bool = False
    """Whether it is the bulk store that looks emptied or wrong, and not the index."""


_IF_RIGHT = "check bulk_url, index_url and redis_prefix; if they are right"
"""The remedy if bulk store and index do not match, since a sweep deletes what it is given."""


def find_doubts(inventory: Inventory, scope: WalkScope, *, ttl_s: float) -> tuple[Doubt, ...]:
    """Return what seems useless only because the other backend lacks most of it: that was probably
    wiped, or is the wrong one. Common names prove nothing: fleets with the same models have the
    same. A payload younger than ``ttl_s`` has a record, unless its writer was killed. Needs an
    index that was read, which does not judge unidentified namespaces."""
    begun_s = inventory.begun_s
    of = f" of {scope.only}" if scope.only else ""
    doubts, seen, known = [], 0, 0
    for name, payloads, recorded, young, lost in inventory.rows(_KNOWN, (begun_s - ttl_s, begun_s)):
        seen, known = seen + payloads, known + recorded
        if young >= _YOUNG_MIN and lost > _MOST * young:
            why = (
                f"the index has no record of most payloads in {name} that are younger than ttl_s "
                f"({lost:,} of {young:,}): it looks wiped, or belongs to another bucket; "
                "run objkv rebuild --apply, or objkv sweep --apply --force to delete them"
            )
            doubts.append(Doubt(name, why))
    if seen and not known:
        why = (
            f"the index has no record of any payload{of}: it was wiped, belongs to another "
            f"bucket, or all records have expired; {_IF_RIGHT}, run objkv rebuild --apply, or "
            "objkv sweep --apply --force to delete all"
        )
        doubts = [Doubt(None, why)]
    [(records, stored)] = inventory.run(_STORED)
    if records and not stored:
        why = (
            f"the bulk store has none of the payloads{of} in the index: it belongs to another "
            f"index, or was emptied; {_IF_RIGHT}, objkv sweep --apply --force removes the records"
        )
        doubts.append(Doubt(None, why, is_of_bulk=True))
    return tuple(doubts)


def doubted(doubts: Collection[Doubt], scope: WalkScope) -> frozenset[str]:
    """Return the doubted namespaces, with their earlier epochs."""
    return with_old_epochs({one.namespace for one in doubts if one.namespace is not None}, scope)


@dataclass(frozen=True, slots=True)
class FindingCount:
    """The findings of one kind."""

    kind: FindingKind
    count: int
    nbytes: int
    young: int
    """Orphans written since ``sweep_grace_s`` before the walk: their records may yet come."""
    remedy: str

    @property
    def faults(self) -> int:
        """Those that should not exist."""
        return self.count - self.young if self.kind in FAULTS else 0


@dataclass(frozen=True, slots=True)
class Findings:
    """Findings by kind, in the order of ``FindingKind``, and the first few by name."""

    counts: tuple[FindingCount, ...]
    first: tuple[Finding, ...]
    omitted: int
    """Findings that are counted but not in ``first``."""


@dataclass(frozen=True, slots=True)
class FindingTotals:
    """The findings of one kind, in one namespace or in all."""

    kind: str
    count: int = 0
    nbytes: int = 0
    recent: int = 0
    """Those younger than ``sweep_grace_s``."""
    recent_bytes: int = 0
    newest_s: float = 0.0
    pinned: int = 0

    def __add__(self, other: "FindingTotals") -> "FindingTotals":
        names = ("count", "nbytes", "recent", "recent_bytes", "pinned")
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return FindingTotals(self.kind, newest_s=max(self.newest_s, other.newest_s), **sums)

    @property
    def young(self) -> int:
        """Orphans whose records may still be published."""
        return self.recent if self.kind == "orphan" else 0

    @property
    def young_bytes(self) -> int:
        return self.recent_bytes if self.kind == "orphan" else 0


NamespaceFindings = Mapping[tuple[str, str], FindingTotals]
"""Findings by kind and namespace; the latter is empty for what belongs to none."""


def count_findings(inventory: Inventory, *, grace_s: float) -> NamespaceFindings:
    """Return the numbers of all findings."""
    names = inventory.names()
    rows = inventory.rows(_COUNTS, (inventory.begun_s - grace_s,))
    return {(kind, names.get(ns, "")): FindingTotals(kind, *values) for kind, ns, *values in rows}


def read_findings(
    inventory: Inventory,
    scope: WalkScope,
    doubts: Collection[Doubt],
    wrong: NamespaceFindings,
    grace_s: float,
) -> Findings:
    """Return all findings with their remedies. ``wrong``: their numbers."""
    young_s = inventory.begun_s - grace_s
    counts, first = list[FindingCount](), list[Finding]()
    for kind in get_args(FindingKind):
        alike = (found for (of, _), found in wrong.items() if of == kind)
        one = sum(alike, start=FindingTotals(kind))
        remedy = _remedy(kind, one, doubts, scope, wrong, young_s)
        counts.append(FindingCount(kind, one.count, one.nbytes, one.young, remedy))
        if one.count:
            first += _first(inventory, kind)
    return Findings(tuple(counts), tuple(first), sum(one.count for one in counts) - len(first))


def _first(inventory: Inventory, kind: FindingKind) -> list[Finding]:
    names = inventory.names()
    found = [
        Finding(
            kind, payload_path(names[ns], prefix_hash, field), size, problem or _why(kind, *sizes)
        )
        for ns, prefix_hash, field, size, problem, *sizes in inventory.run(
            _FIRST, (kind, FIRST_MAX)
        )
    ]
    return found + [
        Finding(kind, f"{key} ({name})" if name else key, nbytes, detail)
        for key, name, nbytes, detail in inventory.run(_OTHERS, (kind, FIRST_MAX))
    ]


def _why(kind: FindingKind, nbytes: int | None, recorded: int | None) -> str:
    if kind != "corrupt":
        return MEANINGS[kind].replace("payloads", "payload", 1).replace("records", "record", 1)
    if recorded is not None and nbytes != recorded:
        return f"{nbytes} bytes, but its record states {recorded}"
    return "shorter than any header"


def _remedy(
    kind: FindingKind,
    found: FindingTotals,
    doubts: Collection[Doubt],
    scope: WalkScope,
    wrong: NamespaceFindings,
    young_s: float,
) -> str:
    """Return the advice that a sweep follows, also on what it would keep."""
    remedy = REMEDIES[kind]
    if any(one.namespace is None for one in doubts):
        if "sweep --apply" in remedy:
            remedy = f"{_IF_RIGHT}, {remedy.replace('sweep --apply', 'sweep --apply --force')}"
    elif kind in _DOUBTED:
        kept = {
            name: wrong[kind, name].count
            for name in sorted(doubted(doubts, scope))
            if (kind, name) in wrong
        }
        remedy = _with_kept(remedy, found.count, kept)
    if kind in _PINNABLE and found.pinned:
        are = f"{_number(found.pinned, found.count)} pinned"
        remedy = f"{remedy}; {are}, so a sweep keeps them until their pin ends"
    if kind in _GRACED and found.recent:
        # One minute more, because spans are rounded down.
        wait = span(max(60, found.newest_s - young_s + 60))
        are = f"{_number(found.recent, found.count)} younger than sweep_grace_s"
        remedy = f"{remedy}; {are}, so a sweep keeps them for up to {wait} more"
    return remedy


def _number(part: int, whole: int) -> str:
    if part == whole:
        return "all are"
    return "1 is" if part == 1 else f"{part:,} are"


def _with_kept(remedy: str, count: int, kept: Mapping[str, int]) -> str:
    """Add the command that also deletes what a sweep keeps: findings by namespace."""
    if not kept:
        return remedy
    names = list(kept)
    command = f"sweep --apply --force -n {names[0]}"
    if kept[names[0]] == count:
        return remedy.replace("sweep --apply", command)
    others = f" (and so for {listed(names[1:])})" if names[1:] else ""
    return (
        f"{remedy}; a sweep keeps {sum(kept.values()):,} of them, because most young payloads of "
        f"their namespace have no record: objkv {command} deletes them{others}"
    )


def listed(names: Collection[str]) -> str:
    """Return the first names, and how many more there are."""
    shown = ", ".join(list(names)[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    return f"{shown} and {more:,} more" if more > 0 else shown
