"""Payloads that several ranks write: what any reader of safetensors finds, and what is refused."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load

from objkv.codec.join import Join, Place, check_moved
from objkv.codec.payload import Claim, Provenance, encode, frame_pages, read_header
from objkv.errors import PayloadError
from objkv.keys.topology import frame_name
from tests.codec.payloads import CLAIM, LAYERS, PROVENANCE, noise
from tests.support.paged_cache import stores
from tests.support.paged_shapes import Model, ShapedReplica, ShapeOfReplica

SHAPES = (
    ShapeOfReplica(tp=2),
    ShapeOfReplica(tp=2, pp=2),
    ShapeOfReplica(pp=2),
    ShapeOfReplica(tp=8, dcp=2, block_size=2),
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_reader_of_safetensors_finds_each_ranks_frames(shape: ShapeOfReplica) -> None:
    model, (store, index) = Model(), stores()
    with ShapedReplica(model, shape, store, index) as replica:
        replica.compute_and_save()
        entries = list(store.scan(""))
        assert len(entries) == model.chunks, "one payload a chunk"
        payloads = {read_header(store.get(e.key) or b"").claim.token_start: e.key for e in entries}
        for chunk in range(model.chunks):
            payload = store.get(payloads[chunk * model.chunk]) or b""
            tensors = load(bytes(payload))
            for rank in replica.ranks:
                each = rank.blocks // model.chunks
                pages = rank.expected()[:, chunk * each : (chunk + 1) * each].numpy()
                for layer, name in enumerate(model.names[rank.layers.start : rank.layers.stop]):
                    own = name if shape.tp == 1 else frame_name(name, rank.rank.shard)
                    tensor = tensors[own]
                    assert tensor.dtype == np.float32
                    assert tensor.shape == pages[layer].shape
                    assert np.array_equal(tensor.view(np.int32), pages[layer])
            columns = min(shape.tp, model.heads) * shape.dcp
            assert len(tensors) == model.layers * columns


def test_frames_are_in_rows_of_layers_and_columns_of_ranks(tmp_path: Path) -> None:
    memory = joined(range(4))
    file = tmp_path / "payload.safetensors"
    file.write_bytes(memory)
    with safe_open(file, "np") as opened:
        offsets = opened.offset_keys()
    assert offsets == [f"{layer.name}@H{n}-{n + 1}" for layer in LAYERS[:2] for n in range(2)]


def test_parts_come_in_any_order() -> None:
    whole = joined(range(4))
    assert all(joined(order) == whole for order in permutations(range(4)))
    header = read_header(whole)
    frames = [bytes(frame_pages(header, n, whole, None)) for n in range(4)]
    assert frames == [noise(LAYERS[0].nbytes, rank) for rank in range(4)]
    assert header.nbytes == len(whole)


def test_a_part_is_refused_that_came_before_or_is_of_something_else() -> None:
    payload, place = part(0)
    header = read_header(payload)
    others = [
        (header, place),
        (read_header(part(1)[0]), place),
        (read_header(part(1, claim=replace(CLAIM, token_end=600))[0]), part(1)[1]),
        (read_header(part(1, tokens="ef" * 32)[0]), part(1)[1]),
        (read_header(part(1, codec="lz4")[0]), part(1)[1]),
        (header, place._replace(parts=3)),
    ]
    for other in others:
        join = Join(header, place)
        join.add(header, place)
        with pytest.raises(PayloadError):
            join.add(*other)


@pytest.mark.parametrize(("rank", "change"), [(3, {"skipped": 0}), (0, {"first": 3})])
def test_parts_that_overlap_or_have_the_same_frame_are_refused(
    rank: int, change: dict[str, int]
) -> None:
    join = Join(read_header(part(0)[0]), part(0)[1])
    for known in (0, 1, 2):
        join.add(read_header(part(known)[0]), part(known)[1])
    payload, place = part(rank)
    join.add(read_header(payload), place._replace(**change))
    assert join.is_complete
    with pytest.raises(PayloadError):
        join.finish(memoryview(bytearray(join.nbytes)))


def test_a_part_that_changed_while_it_was_copied_is_refused() -> None:
    payload, place = part(0)
    header = read_header(payload)
    join = Join(header, place)
    memory = memoryview(bytearray(join.nbytes))
    moves = join.add(header, place)
    with pytest.raises(PayloadError):
        check_moved(header, moves, memory)


def part(
    rank: int,
    *,
    claim: Claim = CLAIM,
    tokens: str = PROVENANCE.token_digest,
    codec: str = "none",
) -> tuple[bytes, Place]:
    """One of two stages of two ranks, each with one layer."""
    stage, column = divmod(rank, 2)
    layer = replace(LAYERS[stage], name=f"{LAYERS[stage].name}@H{column}-{column + 1}")
    pages = bytes(layer.nbytes) if codec != "none" else noise(layer.nbytes, rank)
    provenance = Provenance(tokens, "rank", 1)
    payload = encode(claim, [layer], [pages], codec=codec, provenance=provenance)
    return bytes(payload), Place(4, 4, rank, 2, 2 * stage * layer.nbytes, 4 * layer.nbytes)


def joined(ranks: Sequence[int]) -> bytes:
    """The payload of all parts, added in some order."""
    first, place = part(ranks[0])
    join = Join(read_header(first), place)
    memory = memoryview(bytearray(join.nbytes))
    for rank in ranks:
        payload, place = part(rank)
        header = read_header(payload)
        moves = join.add(header, place)
        for source, target, nbytes in moves:
            memory[target : target + nbytes] = payload[source : source + nbytes]
        check_moved(header, moves, memory)
    join.finish(memory)
    return bytes(memory)
