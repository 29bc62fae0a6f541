"""Where matches end and what payloads hold for replicas with a draft, over random prompts.

The draft's "KV" of a token names all tokens before it, and the next one if the draft continues
hidden states. Chunks are stored once, by whichever replica comes first, so a reader gets payloads
of prompts that go on differently.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objkv.cache.match import ends_within, needed_from
from objkv.connector.kv.planning import (
    Computed,
    StoredPayloads,
    save_moves,
)
from objkv.connector.model.groups import DraftGroups, Geometry
from objkv.index.base import ShardRecord
from objkv.keys.identity import GroupIdentity
from objkv.keys.prefix import PrefixChain, PromptExtras
from tests.support.plans import unpacked

BLOCK, CHUNK = 2, 8
NUMBER = 70_000
NAMESPACE = "0" * 32
RECORD = ShardRecord(1, 1, True, False, "", 0)
WINDOWS = (3, 4, 5, 8, 9, 17)


def group(window: int | None, name: str) -> GroupIdentity:
    kind: Any = "full" if window is None else "sliding_window"
    return GroupIdentity(kind, window, (name,), heads=1, content=1, block_size=BLOCK)


def geometry(window: int | None, *, draft: bool, lags: bool = True) -> Geometry:
    tables = {group(None, "full"): 0}
    if window is not None:
        tables[group(window, "window")] = 1
    if draft:
        tables[group(None, "draft")] = 0
    return Geometry(
        tuple(tables),
        CHUNK,
        BLOCK,
        tp_size=1,
        tables=tuple(tables.values()),
        table_count=1 if window is None else 2,
        drafted=DraftGroups(1, NUMBER, lags) if draft else None,
    )


def cell(shape: Geometry, g: int, tokens: list[int], at: int) -> tuple[Any, ...]:
    """What a group's cache holds of one token."""
    last = at + 2 if shape.is_draft(g) and shape.draft_lag_tokens else at + 1
    return (shape.groups[g].layers[0], *tokens[:last])


@dataclass
class Store:
    """Payloads by prefix hash and group number: one list of cells per block."""

    payloads: dict[tuple[bytes, int], list[list[Any]]] = field(default_factory=dict)

    def records(self, chain: PrefixChain, shape: Geometry) -> list[Any]:
        found: list[Any] = []
        for chunk in range(len(chain)):
            fields: dict[str, ShardRecord] = {}
            for g in range(len(shape.groups)):
                if (chain.hash(chunk), shape.number(g)) in self.payloads:
                    fields |= dict.fromkeys(shape.fields(g), RECORD)
            found.append(fields or None)
        return found

    def save(self, shape: Geometry, tokens: list[int]) -> None:
        """As a replica that computed the whole prompt, whose next token is 99."""
        chain = chained(tokens)
        blocks = [list(range(1, len(tokens) // BLOCK + 1))] * shape.table_count
        computed = Computed(tokens, blocks)
        for save in save_moves(shape, chain, computed, range(len(chain)), keep_tokens=False):
            move = save.move
            g = shape.position(move.group)
            assert g is not None
            cells = [
                [cell(shape, g, [*tokens, 99], at) for at in range((b - 1) * BLOCK, b * BLOCK)]
                for b in move.block_ids
            ]
            self.payloads.setdefault((move.prefix_hash, move.group), cells)


def chained(tokens: list[int]) -> PrefixChain:
    chain = PrefixChain(NAMESPACE, CHUNK, PromptExtras(), digests=True)
    chain.extend(tokens, len(tokens) // CHUNK * CHUNK)
    return chain


def load(store: Store, shape: Geometry, tokens: list[int], local: int) -> tuple[int, int]:
    """Load what follows ``local`` tokens and check every cell. Returns the ends of the match and of
    the draft's KV."""
    chain = chained(tokens)
    records = store.records(chain, shape)
    payloads = StoredPayloads(shape)
    if shape.windowed:
        records = records[: (len(tokens) - 1) // CHUNK]
    end = min(payloads.matched_end(records), len(tokens))
    if end <= local:
        return local, local
    span = (local, end)
    draft_end = payloads.stored_draft_end(records, span)
    count = -(-len(tokens) // BLOCK)
    blocks = [[1000 * table + b + 1 for b in range(count)] for table in range(shape.table_count)]
    for g, identity in enumerate(shape.groups):
        if identity.kind == "sliding_window":  # vLLM gives these null blocks
            for b in range(needed_from(identity, end) // BLOCK):
                blocks[shape.table(g)][b] = 0
    moves, _ = payloads.load_moves(chain, records, blocks, span, draft_end)
    filled: dict[tuple[int, int], Any] = {}
    for one in unpacked(moves):
        g = shape.position(one.move.group)
        assert g is not None
        payload = store.payloads[one.move.prefix_hash, one.move.group]
        for i, block in enumerate(one.move.block_ids):
            assert (g, block) not in filled
            filled[g, block] = payload[one.move.first_block + i]
    for blank in payloads.draft_blocks_to_zero(blocks, (draft_end, end)):
        at = shape.position(blank.group)
        assert at is not None
        for block in blank.block_ids:
            assert (at, block) not in filled
            filled[at, block] = None
    for g, identity in enumerate(shape.groups):
        table = blocks[shape.table(g)]
        own = {b for b in range(len(table)) if (g, table[b]) in filled}
        assert all(local // BLOCK <= b < end // BLOCK for b in own)
        first = max(local, needed_from(identity, end)) // BLOCK
        assert own >= set(range(first, end // BLOCK))
        for b in own:
            cells = filled[g, table[b]]
            if shape.is_draft(g) and b * BLOCK >= draft_end:
                assert cells is None
                continue
            expected = [cell(shape, g, tokens, at) for at in range(b * BLOCK, (b + 1) * BLOCK)]
            assert cells == expected
    return end, draft_end


LONGEST = 5 * CHUNK + 3


@st.composite
def prompts(draw: st.DrawFn) -> list[list[int]]:
    """Prompts that begin alike, often up to the end of a chunk."""
    known: list[list[int]] = [[]]
    for value in range(draw(st.integers(1, 5))):
        before = draw(st.sampled_from(known))
        kept = draw(st.one_of(st.integers(0, 5).map(lambda n: n * CHUNK), st.integers(0, LONGEST)))
        kept = min(kept, len(before))
        length = draw(st.integers(max(1, kept), LONGEST))
        known.append(before[:kept] + [value] * (length - kept))
    return [*known[1:], draw(st.sampled_from(known[1:]))]


windows = st.sampled_from((None, *WINDOWS))


@given(
    windows,
    st.booleans(),
    prompts(),
    st.one_of(st.just([True] * 5), st.lists(st.booleans(), min_size=5, max_size=5)),
    st.integers(0, 8),
    st.sampled_from((True, True, True, False)),
)
def test_a_draft_gets_the_cells_that_it_would_compute(
    window: int | None,
    lags: bool,
    asked: list[list[int]],
    with_draft: list[bool],
    local: int,
    drafted: bool,
) -> None:
    store = Store()
    *written, prompt = asked
    for tokens, draft in zip(written, with_draft, strict=False):
        store.save(geometry(window, draft=draft, lags=lags), tokens)
    shape = geometry(window, draft=drafted, lags=lags)
    end, draft_end = load(store, shape, prompt, min(local, len(prompt) // BLOCK) * BLOCK)
    if all(with_draft):
        assert draft_end == end


@pytest.mark.parametrize("window", [None, *WINDOWS])
@pytest.mark.parametrize("length", range(CHUNK, 4 * CHUNK + 3))
def test_a_match_is_as_long_as_without_a_draft_less_one_block(
    window: int | None, length: int
) -> None:
    """Or one chunk, if the payloads of a window are shorter than that needs."""
    tokens = [i % 7 for i in range(length)]
    store, plain = Store(), geometry(window, draft=False)
    shape = geometry(window, draft=True)
    store.save(shape, tokens)
    without, _ = load(store, plain, tokens, 0)
    end, draft_end = load(store, shape, tokens, 0)
    less = BLOCK
    if window is not None and not ends_within(shape.groups[1], CHUNK, without - BLOCK):
        less = CHUNK
    assert (end, draft_end) == (max(0, without - less),) * 2
    follows, _ = load(store, geometry(window, draft=False), tokens, 0)
    assert follows == without


def test_a_draft_that_is_missing_from_some_chunk_on_is_blank_from_there() -> None:
    tokens = list(range(4 * CHUNK))
    store, shape = Store(), geometry(None, draft=True)
    store.save(geometry(None, draft=False), tokens)
    store.save(shape, tokens[: 2 * CHUNK])
    assert load(store, shape, tokens, 0) == (4 * CHUNK - BLOCK, 2 * CHUNK - BLOCK)
    assert load(store, shape, tokens, 3 * CHUNK) == (4 * CHUNK - BLOCK, 3 * CHUNK)
