"""Parts of a payload become the payload that one rank would have written, or are refused."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from objkv.codec.join import FRAMES_MAX, Join, PartPosition, check_moved
from objkv.codec.payload import LayerSpec, frame_pages, read_header
from objkv.codec.values import DTYPE_BYTES, RAW_BYTES_MAX, TYPED_BYTES
from objkv.errors import PayloadError
from tests.codec.parts import WHOLE, Grid, Piece, joined, part_of
from tests.codec.payloads import PROVENANCE, claims_unlike
from tests.codec.seals import SEALS

GRIDS = st.builds(
    Grid,
    stages=st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    heads=st.integers(1, 4),
    dcp=st.integers(1, 3),
    contents=st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    scales=st.sampled_from(["", "0.0625 1.0"]),
).filter(lambda grid: grid.parts > 1)
GRID = Grid((2, 1))


@given(GRIDS, st.data())
def test_parts_in_any_order_are_the_payload_of_all_rows_and_columns(
    grid: Grid, data: st.DataObject
) -> None:
    payload = joined(data.draw(st.permutations(grid.pieces())))
    header, layers = read_header(payload), grid.layers()
    assert (header.claim, header.provenance) == (WHOLE, PROVENANCE)
    assert header.frames.layers == tuple(layers)
    assert header.nbytes == len(payload)
    for number, layer in enumerate(layers):
        assert frame_pages(header, number, payload, None) == grid.pages(layer)
    opened = dict(safetensors.deserialize(payload))
    assert {name: tensor["data"] for name, tensor in opened.items()} == {
        layer.name: grid.pages(layer) for layer in layers
    }
    if grid.dtype in TYPED_BYTES:
        for tensor, layer in ((opened[layer.name], layer) for layer in layers):
            assert (tensor["dtype"], tuple(tensor["shape"])) == (grid.dtype, layer.shape)


def test_names_and_numbers_with_more_digits_than_those_of_the_first_part_fit() -> None:
    grid = Grid((1,) * 110, heads=1, contents=(1,))
    header = read_header(joined(grid.pieces()))
    assert header.frames.layers[-1].name == "model.layers.109.attn"


IMPOSSIBLE = [
    {"parts": 1},
    {"parts": 7},
    {"frames": 0},
    {"frames": FRAMES_MAX + 1},
    {"first": 6},
    {"step": 0},
    {"step": 5},
    {"skipped": GRID.pieces()[0].position.nbytes},
    {"nbytes": 0},
    {"nbytes": RAW_BYTES_MAX + 1},
]


@pytest.mark.parametrize("wrong", IMPOSSIBLE, ids=str)
def test_places_that_no_payload_has_are_refused(wrong: dict[str, int]) -> None:
    payload, place = GRID.pieces()[0]
    with pytest.raises(PayloadError, match="impossible place"):
        Join(read_header(payload), place._replace(**wrong))


def is_refused(pieces: Sequence[Piece]) -> bool:
    try:
        joined(pieces)
    except PayloadError:
        return True
    return False


@given(GRIDS, st.data())
def test_a_part_at_another_place_overlaps_or_leaves_a_gap(grid: Grid, data: st.DataObject) -> None:
    pieces = data.draw(st.permutations(grid.pieces()))
    payload, place = pieces[0]
    name = data.draw(st.sampled_from(tuple(PartPosition.__annotations__)))
    near = st.integers(0, 2 * getattr(place, name) + 2)
    number = data.draw((near | st.integers(0, 2**32)).filter(lambda n: n != getattr(place, name)))
    at = data.draw(st.integers(0, len(pieces) - 1))
    pieces[0] = Piece(payload, place._replace(**{name: number}))
    pieces[0], pieces[at] = pieces[at], pieces[0]
    assert is_refused(pieces)


@given(GRIDS, st.data())
def test_nothing_is_joined_without_all_parts(grid: Grid, data: st.DataObject) -> None:
    pieces = data.draw(st.permutations(grid.pieces()))
    assert is_refused(pieces[:-1])
    assert is_refused([*pieces[:-1], pieces[0]]), "one came twice"
    fewer = [Piece(p.payload, p.position._replace(parts=len(pieces) - 1)) for p in pieces[:-1]]
    assert is_refused(fewer)


TOLD = [
    replace(PROVENANCE, token_digest="0" * 64),
    replace(PROVENANCE, tokens=tuple(range(256))),
]


def test_a_part_of_another_chunk_or_of_other_tokens_is_refused() -> None:
    pieces = GRID.pieces()
    others = [(claim, PROVENANCE) for claim in claims_unlike(WHOLE)]
    for claim, provenance in others + [(WHOLE, told) for told in TOLD]:
        other = GRID.pieces(claim, provenance)
        assert is_refused([*pieces[:-1], other[-1]])
        header = read_header(joined(other))
        assert (header.claim, header.provenance) == (claim, provenance)
    assert not is_refused([*pieces[:-1], GRID.pieces(seed=7)[-1]])


OTHERWISE = [{"codec": "lz4"}, {"codec": "blosc"}, *({"seal": seal} for seal in SEALS.values())]


@pytest.mark.parametrize("how", OTHERWISE, ids=["lz4", "blosc", *SEALS])
def test_a_part_that_is_compressed_or_sealed_is_refused(how: dict[str, Any]) -> None:
    grid = Grid(contents=(512,))
    pieces, other = grid.pieces(), grid.pieces(**how)
    assert read_header(other[0].payload) != read_header(pieces[0].payload)
    for some in (other, [*pieces[:-1], other[-1]]):
        assert is_refused(some)


def replaced(piece: Piece, *layers: LayerSpec) -> Piece:
    pages = [bytes(layer.nbytes) for layer in layers]
    return Piece(part_of(WHOLE, layers, pages), piece.position)


def test_parts_with_the_same_frame_with_frames_of_another_size_or_too_many_are_refused() -> None:
    pieces, first = GRID.pieces(), GRID.layer(0, 0)
    own = GRID.layer(2, 1)
    assert not is_refused([*pieces[:-1], replaced(pieces[-1], own)])
    assert is_refused([*pieces[:-1], replaced(pieces[-1], first)])
    assert is_refused([*pieces[:-1], replaced(pieces[-1], replace(own, shape=(1, 1, 1, 8)))])
    assert is_refused([*pieces[:-1], replaced(pieces[-1], replace(own, shape=(2, 1, 8, 8)))])
    assert is_refused([*pieces[:-1], replaced(pieces[-1], own, replace(own, name="more"))])


def test_a_whole_payload_whose_header_would_be_too_long_is_refused() -> None:
    grid = Grid((4,))
    pieces = grid.pieces()
    long = [LayerSpec(f"{row}" + "\u00e9" * 500, "BF16", (2, 1, 4, 8)) for row in range(4)]
    with pytest.raises(PayloadError, match="header has"):
        joined([pieces[0], replaced(pieces[1], *long)])


def test_a_part_whose_bytes_did_not_come_whole_is_refused() -> None:
    payload, place = GRID.pieces()[1]
    header = read_header(payload)
    join = Join(header, place)
    moves, memory = join.add(header, place), bytearray(join.nbytes)
    for source, target, nbytes in moves:
        memory[target : target + nbytes] = payload[source : source + nbytes]
    check_moved(header, moves, memoryview(memory))
    memory[moves[-1].target] ^= 1
    with pytest.raises(PayloadError, match="checksum"):
        check_moved(header, moves, memoryview(memory))
