"""Replicas of any TP and DCP size, on any number of nodes, read each other under vLLM's own
scheduler.

No CPU backend runs context parallelism. The model of ``hybrid_engine`` puts every token on the
ranks on which vLLM's kernels put it, and looks at all of them before it goes on from there.
"""

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from objkv.connector.model import identity
from objkv.index.sqlite.index import SqliteIndex
from objkv.keys.chunk import ChunkKey
from tests.connector.kv.hybrid_engine import Engine
from tests.connector.kv.hybrid_layout import Layout
from tests.connector.kv.test_hybrid_world import ask, best_end, place

CHUNK = 16
LATENT = Layout((("mla", 0),), (4,), chunk_tokens=CHUNK)
HEADS = Layout((("full", 0),), (2,), chunk_tokens=CHUNK)
LAYERS = replace(HEADS, layers=4)
FLEETS = (
    (
        LATENT,
        replace(LATENT, tp_size=2, block_sizes=(8,)),
        replace(LATENT, tp_size=2, dcp_size=2, block_sizes=(2,)),
        replace(LATENT, tp_size=4, dcp_size=2, block_sizes=(8,)),
        replace(LATENT, tp_size=4, dcp_size=4),
    ),
    (
        HEADS,
        replace(HEADS, tp_size=2, block_sizes=(4,)),
        replace(HEADS, tp_size=4, nodes=2),
        replace(HEADS, tp_size=8, dcp_size=2),
        replace(HEADS, tp_size=8, dcp_size=2, block_sizes=(4,)),
        replace(HEADS, tp_size=8, dcp_size=2, nodes=4),
    ),
    (
        LAYERS,
        replace(LAYERS, tp_size=2, pp_size=2, nodes=2),
        replace(LAYERS, tp_size=4, pp_size=2, nodes=4),
    ),
)
SPREAD = {
    replace(HEADS, tp_size=4, nodes=2): "0.L0-1_H0-2 0.L0-1_H2-4",
    replace(LAYERS, tp_size=4, pp_size=2, nodes=4): (
        "0.L0-2_H0-2 0.L0-2_H2-4 0.L2-4_H0-2 0.L2-4_H2-4"
    ),
}
"""The payloads of replicas on several nodes, by node."""
IN_PAIRS = replace(LATENT, tp_size=2, dcp_size=2, dcp_interleave=2)


@pytest.fixture(autouse=True, scope="module")
def _canonical() -> Iterator[None]:
    """On this platform each token's content is contiguous, unlike in vLLM's CPU backend."""
    with patch.object(identity, "current_platform", SimpleNamespace(is_cpu=lambda: False)):
        yield


def _id(layout: Layout) -> str:
    sizes = f"tp{layout.tp_size}-pp{layout.pp_size}-dcp{layout.dcp_size}-{layout.block_sizes[0]}"
    return f"{layout.kinds[0][0]}-{sizes}-nodes{layout.nodes}"


@pytest.mark.parametrize("writer", [shape for fleet in FLEETS for shape in fleet], ids=_id)
def test_replicas_of_other_shapes_load_all_that_one_stored(writer: Layout) -> None:
    source = random.Random(5)
    asked = [[source.randrange(3, 60) for _ in range(n)] for n in (15, 16, 57)]
    (fleet,) = (fleet for fleet in FLEETS if writer in fleet)
    with place() as folder:
        with Engine(writer, folder) as first:
            ask(first, asked)
        after = fleet[(fleet.index(writer) + 1) % len(fleet)]
        for reader in {fleet[0], after}:
            with Engine(reader, folder) as second:
                for prompt in asked:
                    (answer,) = ask(second, [prompt])
                    end = len(prompt) // CHUNK * CHUNK
                    assert answer.loaded == best_end(second, folder, prompt) == end


@pytest.mark.parametrize("first", [IN_PAIRS, LATENT], ids=_id)
def test_tokens_that_are_dealt_in_pairs_are_shared_with_the_like_only(first: Layout) -> None:
    asked = [list(range(3, 3 + 57))]
    then = LATENT if first is IN_PAIRS else IN_PAIRS
    with place() as folder:
        for shape, loaded in ((first, 0), (first, 48), (then, 0), (first, 48), (then, 48)):
            with Engine(shape, folder) as one:
                (answer,) = ask(one, asked)
                assert answer.loaded == loaded
                assert one.agent is not None
                assert one.agent.recorder.value("agent_fills") == loaded // CHUNK * len(one.workers)


def counts(engine: Engine, name: str) -> list[float]:
    """What the agent of each node has counted."""
    return [agent.recorder.value(name) for agent in engine.agents]


@pytest.mark.parametrize(
    "shape",
    [pytest.param(s, id=_id(s), marks=pytest.mark.slow if s.nodes == 4 else ()) for s in SPREAD],
)
def test_each_node_saves_its_part_of_every_chunk_and_no_other(shape: Layout) -> None:
    """Also of a chunk of which the parts of the other nodes are stored: a lease, a record and a
    payload of one node stop no other."""
    prompt, chunks = list(range(3, 3 + 57)), 57 // CHUNK
    names, whole = SPREAD[shape].split(), LAYERS if shape.layers else HEADS
    with place() as folder:

        def stored() -> list[list[str]]:
            payloads = [*folder.glob("chunks/*/*/*/*.safetensors")]
            of = {one.parent: sorted(p.stem for p in one.parent.iterdir()) for one in payloads}
            return list(of.values())

        with Engine(shape, folder) as first:
            ask(first, [prompt])
            assert stored() == [names] * chunks
            assert counts(first, "saves") == [chunks] * shape.nodes
            assert counts(first, "joins") == [chunks] * shape.nodes
        for has_record in (True, False):
            gone = max(folder.glob("chunks/*/*/*/*.safetensors"), key=lambda path: path.name)
            gone.unlink()
            if not has_record:
                key = ChunkKey.parse(str(gone.relative_to(folder / "chunks")))
                with closing(SqliteIndex(folder / "index.sqlite")) as index:
                    (record,) = index.lookup(key.namespace, [key.prefix_hash])
                    assert record is not None
                    shard = record.shards[key.field]
                    assert index.forget(key.namespace, key.prefix_hash, key.field, shard)
            with Engine(shape, folder) as second:
                (answer,) = ask(second, [prompt])
                assert counts(second, "load_ghosts") == [*[0] * (shape.nodes - 1), has_record]
                assert has_record or answer.loaded < chunks * CHUNK
                assert counts(second, "saves") == [*[0] * (shape.nodes - 1), 1]
                assert stored() == [names] * chunks
        for reader in (shape, whole):
            with Engine(reader, folder) as third:
                (answer,) = ask(third, [prompt])
                assert answer.loaded == chunks * CHUNK
                assert counts(third, "agent_fills") == (
                    [chunks] * shape.nodes if reader is shape else [chunks * shape.nodes]
                )
