"""What a replica can be served from, of what replicas of any shape saved."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objkv.connector.kv import coverage as coverage_module
from objkv.connector.kv.coverage import Coverage
from objkv.connector.model.groups import Geometry
from objkv.index.base import ShardRecord
from objkv.keys.identity import GroupIdentity

LAYERS, HEADS = 4, 8
GROUP = GroupIdentity(
    "full", None, tuple(f"l{i}" for i in range(LAYERS)), heads=HEADS, content=8, block_size=32
)


def geometry(tp: int, pp: int = 1, groups: int = 1) -> Geometry:
    stages = ((LAYERS // pp,) * pp,) * groups if pp > 1 else ()
    return Geometry((GROUP,) * groups, 64, 32, tp_size=tp, stages=stages)


def coverage(tp: int, pp: int = 1, groups: int = 1) -> Coverage:
    return Coverage(geometry(tp, pp, groups), is_mixed=lambda: True)


RECORD = ShardRecord(100, 100, "none", False, "0" * 32, 1)


def stored(tp: int, pp: int = 1, groups: int = 1) -> dict[str, ShardRecord]:
    return dict.fromkeys(sorted(geometry(tp, pp, groups).all_fields()), RECORD)


sizes = st.tuples(st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 4]))


@given(sizes, sizes, st.data())
def test_a_chunk_is_complete_exactly_when_every_head_of_every_layer_is_stored(
    reader: tuple[int, int], writer: tuple[int, int], data: st.DataObject
) -> None:
    shards = stored(*writer)
    kept = data.draw(st.sets(st.sampled_from(sorted(shards))))
    some = {field: shards[field] for field in kept}
    assert coverage(*reader).is_complete(some) == (len(some) == len(shards))
    assert coverage(*reader).is_readable(some, 0) == (len(some) == len(shards))


ONE_HEAD = GroupIdentity("mla", None, ("l0", "l1"), heads=1, content=8, block_size=32)
divisions = st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 2), (8, 8)])
"""TP size and DCP size."""


def dealt(tp_size: int, dcp_size: int, *, canonical: bool = True) -> Geometry:
    group = replace(ONE_HEAD, block_size=16 * dcp_size)
    sizes = {"chunk_tokens": 128, "block_tokens": 16 * dcp_size, "tp_size": tp_size}
    return Geometry((group,), **sizes, canonical=canonical, dcp_size=dcp_size)


@given(divisions, divisions, st.data())
def test_with_dcp_a_chunk_is_readable_exactly_when_all_its_tokens_are(
    reader: tuple[int, int], writer: tuple[int, int], data: st.DataObject
) -> None:
    one = Coverage(dealt(*reader), is_mixed=lambda: True)
    shards = dict.fromkeys(sorted(dealt(*writer).all_fields()), RECORD)
    kept = data.draw(st.sets(st.sampled_from(sorted(shards))))
    some = {field: shards[field] for field in kept}
    assert one.is_readable(some, 0) == one.is_complete(some) == (len(some) == len(shards))
    if some == shards:
        ranks = min(writer[1], max(1, writer[1] // reader[1]))
        assert len(one.fetched_fields(some)) == ranks


def test_too_many_shards_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler calls this, and the index may contain any number of fields."""
    one = Coverage(dealt(2, 2), is_mixed=lambda: True)
    stored = dealt(1, 1).all_fields() | dealt(2, 2).all_fields()
    assert set(one.fetched_fields(stored)) < stored
    monkeypatch.setattr(coverage_module, "_CHOOSABLE_MAX", len(stored) - 1)
    again = Coverage(dealt(2, 2), is_mixed=lambda: True)
    assert set(again.fetched_fields(stored)) == stored


def test_pages_that_are_not_canonical_are_readable_with_the_same_dcp_size_only() -> None:
    for size, readable in ((2, True), (4, False), (1, False)):
        one = Coverage(dealt(4, 2, canonical=False), is_mixed=lambda: True)
        shards = dict.fromkeys(dealt(4, size).all_fields(), RECORD)
        assert one.is_readable(shards, 0) is readable


def test_of_several_groups_one_may_be_readable_alone() -> None:
    one = coverage(2, groups=2)
    shards = {f: r for f, r in stored(4, groups=2).items() if f.startswith("1.")}
    assert not one.is_readable(shards, 0)
    assert one.is_readable(shards, 1)
    assert not one.is_complete(shards)


def test_bytes_are_those_of_the_rank_that_fetches_most() -> None:
    assert coverage(2).size(stored(1)) == (100, False)
    assert coverage(1).size(stored(2)) == (200, False)
    assert coverage(2).size(stored(2)) == (100, False)
    assert coverage(2).size(stored(1) | stored(2)) == (100, False)
    assert coverage(1, groups=2).size(stored(2, groups=2)) == (400, False)


def test_without_other_shapes_shards_are_counted() -> None:
    own = Coverage(geometry(2))
    assert own.is_complete(stored(2))
    assert own.is_readable(stored(2), 0)
    assert own.size(stored(2)) == (100, False)
    assert not own.is_complete(stored(1))


def test_what_cannot_be_a_shard_of_the_model_is_known() -> None:
    one = coverage(1)
    assert one.is_possible("0.L0-4_H0-8")
    for field in ("1.L0-4_H0-8", "0.L0-5_H0-8", "0.L0-4_H0-9", "0.x", "x", "00.L0-4_H0-8"):
        assert not one.is_possible(field)
