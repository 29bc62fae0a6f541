"""Loads by batches against a plain reader of the same files: whatever the layouts, the blocks and
the faults, each block has exactly what its file has, or is reported."""

import pickle
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from objkv.agent.server import AgentSession
from objkv.keys.chunk import payload_path
from objkv.keys.topology import Shard
from objkv.transfer.loading import loader as module
from objkv.transfer.plan import ChunkMove, LoadPlan
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.device import ON_HOST
from tests.support.paged_cache import NAMESPACE
from tests.support.paged_shapes import Model, ShapedRank, ShapedReplica, ShapeOfReplica
from tests.support.plans import LoadMove, packed, unpacked

MODEL = Model(chunks=6)
WRITERS = (
    ShapeOfReplica(block_size=4),
    ShapeOfReplica(block_size=8),
    ShapeOfReplica(tp=2, block_size=4),
    ShapeOfReplica(tp=4, pp=2, block_size=16, codec="lz4"),
)
READERS = (
    ShapeOfReplica(block_size=4),
    ShapeOfReplica(block_size=4, layout="BLHNC"),
    ShapeOfReplica(tp=2, block_size=4),
    ShapeOfReplica(tp=2, pp=2, block_size=8),
)
FAULTS = ("missing", "corrupt", "stale")
PATHS = [payload_path(NAMESPACE, prefix_hash, "0") for prefix_hash in MODEL.hashes]


def decoded(payload: bytes) -> np.ndarray:
    """``[layers, heads, tokens, content]`` of a file, as any safetensors reader sees it."""
    frames = safetensors.numpy.load(payload)
    layers = []
    for name in MODEL.names:
        columns = {key: frame for key, frame in frames.items() if key.split("@")[0] == name}
        ordered = sorted(columns, key=lambda key: int((key + "@H0-").split("@H")[1].split("-")[0]))
        whole = np.concatenate([columns[key] for key in ordered], axis=1)
        blocks, heads, size, content = whole.shape
        layers.append(whole.swapaxes(0, 1).reshape(heads, blocks * size, content))
    return np.stack(layers)


class Reader:
    """One rank that loads the prompt into blocks at random, more than once."""

    def __init__(self, rank: ShapedRank, dice: random.Random) -> None:
        self.rank, self.dice = rank, dice
        self.each = MODEL.chunk // rank.shape.block_size

    def plan(self, *, sync: bool) -> tuple[LoadPlan, list[tuple[int, ...]]]:
        """A load, and the blocks of each chunk from its first block on that is loaded."""
        blocks = list(range(1, 1 + 2 * self.rank.blocks))
        cut = self.dice.randrange(len(blocks))  # most runs are long
        blocks = blocks[cut:] + blocks[:cut]
        for _ in range(self.dice.randrange(4)):
            one, other = self.dice.sample(range(len(blocks)), 2)
            blocks[one], blocks[other] = blocks[other], blocks[one]
        ids = [tuple(blocks[n * self.each : (n + 1) * self.each]) for n in range(MODEL.chunks)]
        ids[0] = ids[0][self.dice.randrange(self.each) :]
        moves = unpacked(self.rank.plan(self.rank.index).moves)
        for n, load in enumerate(moves):
            mine = ids[load.move.chunk]
            move = self.rank.move(load.move.chunk, self.each - len(mine), mine)
            moves[n] = type(load)(move, load.shard)
        return LoadPlan("r", NAMESPACE, packed(moves), sync), ids

    def check(self, files: Sequence[bytes], *, sync: bool, fails_from: int = MODEL.chunks) -> None:
        """Load, and compare all blocks with the files."""
        rank = self.rank
        rank.memory.view(torch.int32)[:] = -7
        plan, ids = self.plan(sync=sync)
        outcome = rank.outcome(plan)
        assert outcome.failed_blocks == {b for some in ids[fails_from:] for b in some}
        found = rank.memory.cpu().contiguous().view(torch.int32).numpy()
        size, seen = rank.shape.block_size, {b for some in ids for b in some}
        for chunk, mine in enumerate(ids[:fails_from]):
            whole = decoded(files[chunk])[rank.layers.start : rank.layers.stop]
            whole = whole[:, rank.heads.start : rank.heads.stop].view(np.int32)
            first = self.each - len(mine)
            for n, block in enumerate(mine, first):
                wanted = whole[:, :, n * size : (n + 1) * size]
                assert np.array_equal(found[:, block], wanted), (chunk, n, block)
        others = [b for b in range(found.shape[1]) if b not in seen]
        assert (found[:, others] == -7).all()


def written(dice: random.Random) -> tuple[MemoryStore, MemoryIndex, list[bytes]]:
    """Chunks by writers of several shapes: a store, an index, and the plain file of each chunk."""
    of_chunk = [dice.randrange(len(WRITERS)) for _ in range(MODEL.chunks)]
    plain: list[bytes] = [b""] * MODEL.chunks
    store, index = MemoryStore(), MemoryIndex()
    for number, shape in enumerate(WRITERS):
        chunks = [chunk for chunk, writer in enumerate(of_chunk) if writer == number]
        for codec in {"none", shape.codec}:
            kept = (store, index) if codec == shape.codec else (MemoryStore(), MemoryIndex())
            same = ShapeOfReplica(**(vars(shape) | {"codec": codec}))
            with ShapedReplica(MODEL, same, *kept) as replica:
                for rank in replica.ranks:
                    rank.compute()
                    (plan,) = rank.save_plan()
                    moves = tuple(save for save in plan.moves if save.move.chunk in chunks)
                    rank.saver.gather((type(plan)("r", NAMESPACE, moves),))
                    assert rank.saver.drain(60.0)
            for chunk in chunks if codec == "none" else ():
                plain[chunk] = kept[0].get(PATHS[chunk]) or b""
    assert all(plain)
    return store, index, plain


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1 << 30), fault=st.sampled_from((*FAULTS, "")), sync=st.booleans())
def test_loads_of_any_mix_are_what_a_plain_reader_reads(seed: int, fault: str, sync: bool) -> None:
    dice = random.Random(seed)
    store, index, files = written(dice)
    with ShapedReplica(MODEL, dice.choice(READERS), store, index) as replica:
        rank = dice.choice(replica.ranks)
        reader = Reader(rank, dice)
        reader.check(files, sync=sync)
        reader.check(files, sync=not sync)  # from memory, by numbers of layouts
        bad = dice.randrange(MODEL.chunks)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_SLICE_BYTES", dice.choice((1, 1 << 20)))
            if fault == "stale":
                hand_out_another(patch, rank, bad)
            elif fault:
                rank.forget()
                spoil(store, PATHS[bad], fault)
            reader.check(files, sync=sync, fails_from=bad if fault else MODEL.chunks)


def spoil(store: MemoryStore, path: str, fault: str) -> None:
    payload = bytearray(store.get(path) or b"")
    store.delete(path)
    if fault == "corrupt":
        payload[-1] ^= 1
        store.put(path, bytes(payload))


def hand_out_another(patch: pytest.MonkeyPatch, rank: ShapedRank, chunk: int) -> None:
    """The agent hands out where another payload is, of the same layout if there is one."""
    cache, lease = rank.inside.core.arena_cache, AgentSession.lease
    (mine,) = cache.peek(PATHS[chunk : chunk + 1])
    assert mine is not None
    others = [one for one in cache.peek(PATHS) if one is not None and one is not mine]
    same = [one for one in others if one.layout == mine.layout]
    other = (same or others)[0]

    def stale(session: AgentSession, wanted: Any, **how: Any) -> Any:
        answers = lease(session, wanted, **how)
        return [
            answer._replace(offset=other.offset) if row[0] == MODEL.hashes[chunk] else answer
            for row, answer in zip(wanted, answers, strict=True)
        ]

    patch.setattr(AgentSession, "lease", stale)


@ON_HOST
def test_a_plan_of_many_moves_is_sent_as_a_few_strings() -> None:
    """Objects for all of them would take milliseconds of each worker's forward thread."""
    shards = [Shard(0, 80, head, head + 1) for head in range(8)]
    moves = [
        LoadMove(move, shard)
        for c in range(128)
        for move in (ChunkMove(c, 0, bytes([c]) * 20, bytes([c + 1]) * 20, c, c + 1, 0, (c + 1,)),)
        for shard in shards
    ]
    few, many = (
        pickle.dumps(LoadPlan("r", "n", packed(some), sync=False), protocol=5)
        for some in (moves[:16], moves)
    )
    assert unpacked(pickle.loads(many).moves) == moves
    marks = [data.count(b"\x94") for data in (few, many)]  # MEMOIZE: one per object or string
    assert marks[1] <= marks[0] + 8  # bytes that look alike
