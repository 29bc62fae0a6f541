"""A replica's worker and its agent without an engine, as benchmarks time them."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

import torch

from objkv.assembly.link import AgentLink, Replica
from objkv.config import load_config
from objkv.connector.kv.metadata import StepPlan
from objkv.connector.kv.wiring import make_worker_side
from objkv.connector.kv.worker import Rank
from objkv.connector.model.groups import Geometry
from objkv.index.base import ReadIndex
from objkv.keys.identity import GroupIdentity
from objkv.keys.prefix import prefix_hashes, root_hash, token_digest
from objkv.telemetry import NullRecorder
from objkv.transfer.plan import ChunkMove, LoadPlan, SaveMove, SavePlan
from tests.support.plans import LoadMove, packed
from tests.support.steps import Completed

CHUNK: Final = 256
BLOCK: Final = 16
BLOCKS: Final = CHUNK // BLOCK
"""Of a chunk."""
LAYERS: Final = tuple(f"layers.{number}" for number in range(32))
LLAMA_8B: Final = GroupIdentity("full", None, LAYERS, heads=8, content=256, block_size=BLOCK)
"""The layers of an 8B model: a chunk of 256 tokens has 32 MiB."""
NOTHING: Final = StepPlan(may_reuse=False)
BOUND_S: Final = 100.0
LOOK_S: Final = 5e-5
_WAITS = ("load_deadline_ms", "step_load_deadline_ms", "save_deadline_ms")


class Side:
    """A worker over one group of layers, and the calls that an engine makes with it."""

    def __init__(
        self,
        stack: ExitStack,
        settings: Mapping[str, str],
        geometry: Geometry,
        caches: Sequence[torch.Tensor],
    ) -> None:
        """``settings``: with the ``agent`` to use. ``caches``: the paged cache, a tensor a layer.
        The worker ends with ``stack``."""
        bounds = dict.fromkeys(_WAITS, str(int(1000 * BOUND_S)))
        config = load_config({"pinned_bytes_max": str(2 << 30), **bounds, **settings}, environ={})
        link = AgentLink(config, Replica("bench"))
        assert link.await_agent(BOUND_S), "there is no agent"
        stack.callback(link.calls.close)
        self.index: Any = Completed(link.calls)
        """Lookups by the agent."""
        (group,) = geometry.groups
        self.worker = make_worker_side(
            config,
            geometry,
            Rank(0, "bench", 1),
            link.connect,
            recorder=NullRecorder(),
            kv_caches=dict(zip(group.layers, caches, strict=True)),
        )
        stack.callback(self.worker.close)

    def save(self, namespace: str, moves: Sequence[SaveMove]) -> None:
        """Hand payloads over to the agent."""
        self.worker.end_forward(StepPlan(saves=(SavePlan("r", namespace, tuple(moves)),)))
        assert self.worker.saver.drain(BOUND_S)
        report = self.worker.take_report()
        assert report is None or not report.dropped, "saves were dropped"

    def load(self, plan: StepPlan) -> float:
        """Load by a model runner's calls. Returns seconds until it is reported."""
        begun = time.perf_counter()
        self.worker.before_reuse(plan)
        self.worker.before_forward(plan)
        self.worker.start_loads(plan)
        self.worker.end_forward(plan)
        while True:
            received = self.worker.results(NOTHING, set()).finished_recving
            assert not self.worker.take_failed_blocks(), "a load failed"
            if received:
                return time.perf_counter() - begun
            assert time.perf_counter() - begun < BOUND_S
            time.sleep(LOOK_S)


def moves_of(namespace: str, tokens: Sequence[int], blocks: Sequence[int]) -> list[ChunkMove]:
    """The chunks of a prompt, each in the next ``BLOCKS`` of these blocks."""
    hashes = prefix_hashes(namespace, tokens, CHUNK)
    parents = [root_hash(namespace), *hashes]
    return [
        ChunkMove(
            chunk=chunk,
            group=0,
            prefix_hash=hashed,
            parent_hash=parents[chunk],
            token_start=chunk * CHUNK,
            token_end=(chunk + 1) * CHUNK,
            first_block=0,
            block_ids=tuple(blocks[chunk * BLOCKS : (chunk + 1) * BLOCKS]),
        )
        for chunk, hashed in enumerate(hashes)
    ]


def saves_of(moves: Sequence[ChunkMove]) -> list[SaveMove]:
    """What saves these chunks. The digest of their tokens is one for all."""
    return [SaveMove(move, token_digest(()), None) for move in moves]


def step_of(namespace: str, moves: Sequence[LoadMove], name: str = "r") -> StepPlan:
    """A step that begins a load."""
    return StepPlan(loads=(LoadPlan(name, namespace, packed(moves), sync=False),))


def stored(index: ReadIndex, namespace: str, saves: Sequence[SaveMove]) -> list[LoadMove]:
    """Wait until payloads are stored. Returns their loads, into the blocks that they came from."""
    hashes, end = [save.move.prefix_hash for save in saves], time.monotonic() + BOUND_S
    while None in (records := index.lookup(namespace, hashes)):
        assert time.monotonic() < end, "saves did not end"
        time.sleep(1e-3)
    return [
        LoadMove(save.move, None)
        for save, record in zip(saves, records, strict=True)
        if record is not None
    ]
