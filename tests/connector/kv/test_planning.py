"""Which payloads a replica finds of those that replicas of any shape have stored, and which blocks
a load fills and a save reads."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objkv.cache.lookup import OtherShapesIndex, Records
from objkv.connector.kv.planning import (
    Computed,
    StoredPayloads,
    save_moves,
    states_after,
)
from objkv.connector.model.groups import DraftGroups, Geometry
from objkv.index.base import ChunkEntry, ShardRecord
from objkv.keys.chunk import parse_field
from objkv.keys.identity import GroupIdentity
from objkv.keys.prefix import PrefixChain, PromptExtras
from objkv.keys.topology import ALL_TOKENS, Shard, TokenPart
from tests.contracts.memory_index import MemoryIndex
from tests.support.plans import unpacked
from tests.support.steps import complete

NS = "0" * 32
HASHES = [bytes([i]) * 20 for i in range(1, 4)]
CHUNK = 64
SHARD = ShardRecord(100, 80, True, True, "0" * 32, 1)
FULL = GroupIdentity("full", None, ("a", "b", "c", "d"), heads=4, content=16, block_size=16)
WINDOW = GroupIdentity("sliding_window", 32, ("e",), heads=4, content=16, block_size=16)
LATENT = GroupIdentity("mla", None, ("f",), heads=1, content=16, block_size=16)


def geometry(*groups: GroupIdentity, tp_size: int = 1, **more: object) -> Geometry:
    return Geometry(groups, CHUNK, 16, tp_size=tp_size, canonical=True, **more)  # type: ignore[arg-type]


def found_by(reader: Geometry, *fields: str) -> tuple[StoredPayloads, Records]:
    """What a replica finds of chunks that have these payloads, all of them."""
    index, payloads = MemoryIndex(), StoredPayloads(reader)
    for number, prefix_hash in enumerate(HASHES):
        entry = ChunkEntry(NS, prefix_hash, bytes(20), number * CHUNK, (number + 1) * CHUNK)
        index.publish(entry, dict.fromkeys(fields, SHARD), ttl_s=3_600)
    parts = OtherShapesIndex(index, payloads.is_loadable)
    return payloads, tuple(complete(parts.find(NS, HASHES, sorted(reader.all_fields()))))


def test_a_division_of_its_own_is_all_that_some_read() -> None:
    odd = geometry(LATENT, tp_size=2, dcp_size=2, dcp_interleave=16, nodes=2)
    assert odd.reads(0, TokenPart(1, 2, 16))
    assert not any(odd.reads(0, tokens) for tokens in (ALL_TOKENS, TokenPart(0, 2)))
    payloads, found = found_by(odd, "0.L0-1_H0-1_T0of2", "0.L0-1_H0-1_T1of2")
    assert payloads.matched_end(found) == 0
    assert replace(odd, dcp_interleave=1).reads(0, TokenPart(0, 4))


LOCAL = GroupIdentity("chunked_local", CHUNK, ("g",), heads=4, content=16, block_size=16)
"""It has no payloads."""
PAIR = GroupIdentity("full", None, ("a", "b", "c", "d"), heads=2, content=16, block_size=16)
DRAFT = GroupIdentity("full", None, ("h", "i"), heads=2, content=16, block_size=16)
NUMBER = 70_000
MIXES = ((FULL,), (FULL, WINDOW), (LOCAL, FULL), (FULL, DRAFT))
DEALT = ((PAIR,), (LATENT,), (PAIR, replace(LATENT, layers=("f", "g"))))
"""Of which ranks of context parallelism divide the tokens."""
NONSENSE = ("", "x", "00", "0.", "0.x", "0.L0-4", "-1", "0.L0-4_H0-4_T0of1", "1.0")
Payload = tuple[int, Shard | None]
"""Number of its group, and what it has of it."""


def shapes(mix: tuple[GroupIdentity, ...], *, canonical: bool) -> st.SearchStrategy[Geometry]:
    """Replicas of one model, of any shape that it can have."""
    sizes = [(tp_size, 1, 1) for tp_size in (1, 2, 4, 8)]
    if mix in DEALT:
        sizes += [(4, 2, 1), (8, 2, 1), (8, 4, 1), (4, 2, 16), (8, 4, 2)]

    def made(size: tuple[int, int, int], nodes: int, *, has_stages: bool) -> Geometry:
        tp_size, dcp_size, interleave = size
        groups = tuple(replace(one, block_size=one.block_size * dcp_size) for one in mix)
        stages = tuple((len(one.layers) - 1, 1) for one in mix)
        return Geometry(
            groups,
            CHUNK,
            16 * dcp_size,
            tp_size=tp_size,
            stages=stages if has_stages else (),
            canonical=canonical,
            drafted=DraftGroups(1, NUMBER, lags=False) if DRAFT in mix else None,
            dcp_size=dcp_size,
            dcp_interleave=interleave,
            nodes=nodes,
        )

    return st.builds(
        made, st.sampled_from(sizes), st.sampled_from((1, 1, 2, 4)), has_stages=st.booleans()
    )


def written(writer: Geometry) -> list[Payload]:
    payloads: list[Payload] = []
    for group in range(len(writer.groups)):
        payloads += map(parse_field, sorted(writer.fields(group)))
    return payloads


@st.composite
def strange(draw: st.DrawFn) -> Payload:
    """A part that no replica has to have written, perhaps of more than the model."""
    layers, heads = (
        sorted(draw(st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(lambda n: n[0] != n[1])))
        for _ in range(2)
    )
    size = draw(st.sampled_from((1, 1, 2, 3, 4)))
    each = draw(st.sampled_from((1, 2))) if size > 1 else 1
    tokens = TokenPart(draw(st.integers(0, size - 1)), size, each)
    return draw(st.sampled_from((0, 1, NUMBER))), Shard(*layers, *heads, tokens)


def can_read(reader: Geometry, group: int, shard: Shard | None) -> bool:
    """Whether some payload of a group is of use to a replica."""
    identity = reader.groups[group]
    divides = reader.canonical and identity.kind in ("full", "mla")
    combines = reader.dcp_size == 1 or (divides and reader.dcp_interleave == 1)
    if shard is None:
        return combines
    if shard.layer_end > len(identity.layers) or shard.head_end > identity.heads:
        return False
    tokens = shard.tokens
    if (tokens.size, tokens.interleave) == (reader.dcp_size, reader.dcp_interleave):
        return True
    dealt = divides and tokens.interleave == 1 and tokens.size in (2, 4, 8, 16)
    return combines and (tokens == ALL_TOKENS or dealt)


def has_all(identity: GroupIdentity, shards: Collection[Shard | None]) -> bool:
    """Whether some payloads, which divide the tokens alike, have every head of every layer of each
    token."""
    cells = set(product(range(len(identity.layers)), range(identity.heads)))

    def has(token: int, form: tuple[int, int]) -> bool:
        held = set[tuple[int, int]]()
        for one in shards:
            assert one is not None
            part = one.tokens
            own = (part.size, part.interleave) == form
            if own and token // part.interleave % part.size == part.rank:
                layers = range(one.layer_start, one.layer_end)
                held |= set(product(layers, range(one.head_start, one.head_end)))
        return held >= cells

    if None in shards:
        return True
    forms = {(one.tokens.size, one.tokens.interleave) for one in shards if one is not None}
    return any(all(has(token, form) for token in range(CHUNK)) for form in forms)


@given(st.sampled_from(MIXES + DEALT), st.booleans(), st.data())
def test_payloads_are_chosen_where_those_of_a_replica_have_all_that_ranks_need(
    mix: tuple[GroupIdentity, ...], canonical: bool, data: st.DataObject
) -> None:
    reader, *writers = data.draw(st.lists(shapes(mix, canonical=canonical), min_size=1, max_size=4))
    there = {one: True for writer in writers for one in written(writer)}
    there |= dict.fromkeys(data.draw(st.lists(strange(), max_size=4)), True)
    lost = data.draw(st.sets(st.sampled_from(sorted(there, key=str)), max_size=2)) if there else ()
    stored = {
        str(number) if shard is None else f"{number}.{shard}": (number, shard)
        for number, shard in there
        if (number, shard) not in lost
    }
    records = {
        field: replace(SHARD, nbytes=1 << place, hot=data.draw(st.booleans()))
        for place, field in enumerate((*stored, *NONSENSE))
    }
    payloads = StoredPayloads(reader)
    readable, fetched = list[bool](), list[ShardRecord]()
    for group, identity in enumerate(reader.groups):
        if identity == replace(LOCAL, block_size=identity.block_size):
            readable.append(True)
            continue
        number = NUMBER if identity.layers == DRAFT.layers else group
        useful = [s for n, s in stored.values() if n == number and can_read(reader, group, s)]
        readable.append(payloads.is_readable(records, group))
        # Those of one replica suffice if they are all there; with some of others they may not.
        own = [{s for n, s in written(one) if n == number} for one in writers]
        assert readable[-1] or not any(some and some <= {*useful} for some in own)
        if not readable[-1]:
            with pytest.raises(LookupError):
                payloads.of(records, group)
            continue
        chosen = payloads.of(records, group)
        shards = [source.shard for source, _ in chosen]
        assert {source.group for source, _ in chosen} == {number}
        assert set(shards) <= set(useful)
        assert has_all(identity, shards)
        assert shards == [None] or None not in useful
        assert not any(has_all(identity, {*shards} - {one}) for one in shards)
        for source, record in chosen:
            name = str(number) if source.shard is None else f"{number}.{source.shard}"
            assert record == records[name]
            fetched.append(record)
    assert payloads.is_complete(records) == all(readable)
    assert payloads.is_loadable(records) == all(readable[: reader.target_count])
    assert payloads.size(records) == (
        sum(record.nbytes for record in fetched),
        all(record.hot for record in fetched),
    )


# The blocks of loads and saves.


BLOCK, CHUNKS = FULL.block_size, 5
PER_CHUNK = CHUNK // BLOCK
TABLE = [100 + i for i in range(CHUNKS * PER_CHUNK)]
TOKENS = list(range(CHUNKS * CHUNK))
STATE = GroupIdentity("mamba", None, ("d",), heads=1, content=16, block_size=BLOCK, state="s")


def chain() -> PrefixChain:
    chain = PrefixChain(NS, CHUNK, PromptExtras(), digests=True)
    chain.extend(TOKENS, len(TOKENS))
    return chain


@given(st.data())
def test_a_load_fills_exactly_the_blocks_of_its_tokens(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, CHUNKS * PER_CHUNK - 1)) * BLOCK
    end = data.draw(st.integers(start // BLOCK + 1, CHUNKS * PER_CHUNK)) * BLOCK
    shape, known = geometry(FULL), [{"0": SHARD}] * CHUNKS
    payloads = StoredPayloads(shape)
    loads, _ = payloads.load_moves(chain(), known, [TABLE], (start, end), end)
    moves = [load.move for load in unpacked(loads)]
    assert [i for move in moves for i in move.block_ids] == TABLE[start // BLOCK : end // BLOCK]
    for move in moves:
        first = TABLE.index(move.block_ids[0])
        assert first == move.chunk * PER_CHUNK + move.first_block
        assert move.prefix_hash == chain().hash(move.chunk)
        assert move.token_end - move.token_start == CHUNK


def saved(
    group: GroupIdentity, table: list[int], states: Mapping[tuple[int, int], int], **more: Any
) -> list[tuple[int, int, tuple[int, ...]]]:
    """Chunk, group and blocks of what is saved of two chunks, beside a group that has all."""
    computed = Computed(TOKENS, [TABLE, table], states)
    moves = save_moves(geometry(FULL, group), chain(), computed, [0, 1], keep_tokens=False, **more)
    assert all(save.tokens is None for save in moves)
    return [(save.move.chunk, save.move.group, save.move.block_ids) for save in moves]


def test_a_save_reads_the_blocks_that_a_group_still_has() -> None:
    full = [(n, 0, tuple(TABLE[n * PER_CHUNK : (n + 1) * PER_CHUNK])) for n in (0, 1)]
    passed = [0] * (PER_CHUNK - 1) + TABLE[PER_CHUNK - 1 :]
    assert saved(WINDOW, passed, {}) == [*full, (1, 1, tuple(TABLE[6:8]))], "a window has passed"
    # The table has blocks at other places too: of states that are not at a chunk's end.
    assert saved(STATE, TABLE, {(1, 2 * CHUNK): 55}) == [*full, (1, 1, (55,))]
    # A group that is stored is not saved again because another lacks.
    found = saved(WINDOW, TABLE, {}, is_stored=lambda *place: place == (1, 0))
    assert [one[:2] for one in found] == [(0, 0), (0, 1), (1, 1)]


def test_the_state_of_a_step_that_ends_within_a_block_is_nobodys() -> None:
    layout, tables = geometry(FULL, STATE), [TABLE, TABLE]
    assert states_after(layout, tables, CHUNK, ()) == {(1, CHUNK): TABLE[PER_CHUNK - 1]}
    assert states_after(layout, tables, CHUNK + 1, ()) == {}
    assert states_after(layout, tables, None, ()) == {}
    assert states_after(layout, [TABLE, [0, 5]], CHUNK, ()) == {}
    offered = [(1, 91, CHUNK), (1, 92, BLOCK)]  # counts more than the table
    assert states_after(layout, tables, CHUNK, offered) == {(1, CHUNK): 91, (1, BLOCK): 92}
