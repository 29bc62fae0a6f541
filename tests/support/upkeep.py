"""What ``verify``, ``sweep`` and ``rebuild`` do to stores whose defects are known, on any place."""

from collections import defaultdict
from typing import Any

from objkv.assembly.backends import Backends
from objkv.index.base import Record
from objkv.keys.identity import identity_path
from tests.cli.conftest import Run
from tests.contracts.damage import IDENTITY, DamagedStore, Defects, Planted

ALL = Defects(
    good=40, orphan=3, missing=4, old_epoch=5, unidentified=2, header=2, frame=3, short=2, empty=1,
    foreign=2, mismatch=3, hot=2,
)  # fmt: skip
CORRUPT = ("header", "frame", "short", "empty")
NAMESPACE = IDENTITY.namespace()


def found(document: Any) -> dict[str, list[str]]:
    by_kind = defaultdict(list)
    for finding in document["findings"]:
        by_kind[finding["kind"]].append(finding["key"])
    assert document["omitted"] == 0
    assert document["ending"] == "complete"
    return {kind: sorted(keys) for kind, keys in by_kind.items()}


def planted_as(planted: Planted, **kinds: tuple[str, ...]) -> dict[str, list[str]]:
    merged = {
        kind: sorted(path for one in of for path in planted[one]) for kind, of in kinds.items()
    }
    return {kind: paths for kind, paths in merged.items() if paths}


def records(ends: Backends, namespace: str) -> dict[bytes, Record]:
    """All of a namespace, as far as a rebuilt index is equal."""
    return {one.prefix_hash: one for one in ends.index.scan(namespace)}


def check_that_all_is_found_and_mended(run: Run, ends: Backends) -> None:
    """The whole story; both ends are empty, and where ``run`` finds them."""
    planted = DamagedStore(ends).plant(ALL)
    ends.index.usage()  # so that this process keeps back nothing of what it has added
    wrong = planted_as(
        planted, corrupt=(*CORRUPT, "foreign"), missing=("missing",), mismatch=("mismatch",),
        hot=("hot",),
    )  # fmt: skip
    verified = run("verify", "--all", "--json")
    assert found(verified.document) == wrong
    assert verified.code == 1
    assert (verified.document["orphan"], verified.document["expired"]) == (ALL.orphan, 0)
    assert verified.document["ok"] == ALL.good + ALL.old_epoch

    useless = planted_as(
        planted, orphan=("orphan",), missing=("missing",), old_epoch=("old_epoch",),
        unidentified=("unidentified",),
    )  # fmt: skip
    swept = run("sweep", "--grace", "0", "--json")
    assert found(swept.document) == useless
    assert (swept.code, swept.document["removed"]) == (1, 0)

    rebuilt = run("rebuild", "--json")
    unreadable = planted_as(planted, corrupt=("header", "short", "empty", "foreign"))
    assert found(rebuilt.document) == unreadable
    counted = {kind: rebuilt.document[kind] for kind in ("restored", "corrected", "present")}
    assert counted == {
        "restored": ALL.orphan,
        "corrected": ALL.mismatch,
        "present": ALL.good + ALL.old_epoch + ALL.frame + len(planted["hot"]),
    }

    mended = run("verify", "--all", "--quarantine", "--apply", "--json")
    assert (mended.code, found(mended.document)) == (0, wrong)
    right = run("verify", "--all", "--json")
    assert (right.code, found(right.document)) == (0, {})
    removed = run("sweep", "--apply", "--unidentified", "--grace", "0", "--json")
    taken_away = sorted(path for kind in (*CORRUPT, "foreign") for path in planted[kind])
    del useless["missing"]  # verify has forgotten them
    useless["quarantined"] = [f"quarantine/{path}" for path in taken_away]
    assert found(removed.document) == useless
    nothing = run("sweep", "--grace", "0", "--json")
    assert (nothing.code, found(nothing.document)) == (0, {})

    kept = sorted(planted["good"] + planted["mismatch"] + planted["hot"])
    left = [entry.key for entry in ends.bulk.scan("")]
    assert sorted(left) == sorted([*kept, identity_path(NAMESPACE)])
    assert run("verify", "--all", "--json").document["ok"] == len(kept)
    totals = {one.namespace: (one.payloads, one.nbytes) for one in ends.index.usage()}
    nbytes = sum(one.nbytes for one in records(ends, NAMESPACE).values())
    assert totals[NAMESPACE] == (len(kept), nbytes)


def check_that_a_wiped_index_is_restored(run: Run, ends: Backends) -> None:
    """``ends`` hold what the story above left, or anything right."""
    before = records(ends, NAMESPACE)
    for prefix_hash in before:
        ends.admin.drop(NAMESPACE, prefix_hash)
    kept = run("sweep", "--apply", "--grace", "0", "--json")
    assert (kept.code, kept.document["applied"], kept.document["removed"]) == (1, False, 0)
    assert "objkv rebuild" in kept.document["doubts"][0]["why"]
    restored = run("rebuild", "--apply", "--json").document
    assert restored["restored"] == sum(len(one.shards) for one in before.values())
    assert records(ends, NAMESPACE) == before
    assert run("rebuild", "--apply", "--json").document["restored"] == 0
