"""objkv's workers under vLLM's own aggregator: what all ranks tell is what one replica did."""

import copy
import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from objkv.cache.admission import LoadTime
from objkv.connector.kv.connector import ObjKVConnector
from objkv.connector.kv.metadata import StepPlan, StepReport
from objkv.connector.kv.worker import Rank, WorkerSide
from objkv.connector.metrics import ObjKVStats
from objkv.connector.model.groups import Geometry
from objkv.index.memory import MemoryIndex
from objkv.keys.identity import GroupIdentity
from objkv.keys.prefix import root_hash, token_digest
from objkv.stores.memory import MemoryStore
from objkv.telemetry import MemoryRecorder
from objkv.transfer.plan import ChunkMove, LoadMove, LoadPlan, SaveMove, SavePlan
from tests.support.paged_cache import BLOCKS, CHUNK, HASHES, NAMESPACE, TOKENS
from tests.support.sides import worker_side

TP_SIZES, PP_SIZES = range(1, 9), range(1, 5)
LAYERS = tuple(f"l{i}" for i in range(4))
STEPS_MAX = 200_000
COUNTED = ("loads", "load_bytes", "save_errors", "load_seconds_sum")


def aggregator(ranks: int) -> KVOutputAggregator:
    """As vLLM's executor makes it of the scheduler's connector."""
    connector: Any = SimpleNamespace(
        get_finished_count=lambda: ObjKVConnector.get_finished_count(cast("Any", None))
    )
    return KVOutputAggregator.from_connector(connector, ranks)


def aggregate(
    what: KVOutputAggregator, told: list[KVConnectorOutput], *, output_rank: int = 0
) -> KVConnectorOutput:
    """One step's outputs, each through a process boundary, as the executor aggregates them."""
    outputs: list[ModelRunnerOutput | None] = []
    for one in told:
        made = ModelRunnerOutput.with_kv_conn_output_only(one)
        outputs.append(copy.copy(pickle.loads(pickle.dumps(made))))
    together = what.aggregate(outputs, output_rank)
    assert together is not None
    assert together.kv_connector_output is not None
    return together.kv_connector_output


@dataclass
class Fate:
    """What becomes of one load, and of one save, on each rank."""

    received: list[int]
    """The step in which each rank tells it."""
    sent: list[int]
    failed: set[int]
    """Ranks that could not load all of it."""
    blocks: set[int]


@dataclass
class Step:
    """What one rank tells after one step."""

    received: set[str] = field(default_factory=set)
    sent: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    blocks: set[int] = field(default_factory=set)
    report: StepReport = field(default_factory=StepReport)
    stats: dict[str, float] = field(default_factory=dict)

    def output(self) -> KVConnectorOutput:
        """As vLLM's model runner asks objkv's connector for it."""
        return KVConnectorOutput(
            finished_sending=self.sent or None,
            finished_recving=self.received or None,
            failed_recving=self.failed,
            invalid_block_ids=self.blocks,
            kv_connector_stats=ObjKVStats(data=dict(self.stats)) if self.stats else None,
            kv_connector_worker_meta=None if self.report.is_empty() else self.report,
        )


@st.composite
def replicas(draw: st.DrawFn) -> tuple[list[list[Step]], dict[str, Fate], bool]:
    """Per step and rank what is told; several groups tell failures by request, not by block."""
    ranks = draw(st.sampled_from(TP_SIZES)) * draw(st.sampled_from(PP_SIZES))
    steps, requests = draw(st.integers(1, 5)), draw(st.integers(0, 4))
    by_request = draw(st.booleans())
    chance = Random(draw(st.integers(0, 1 << 32)))  # thousands of draws would take a minute
    told = [[Step() for _ in range(ranks)] for _ in range(steps)]
    fates = {}
    for number in range(requests):
        name = f"r{number}"
        received, sent = ([chance.randrange(steps) for _ in range(ranks)] for _ in range(2))
        failed = {chance.randrange(ranks) for _ in range(chance.randrange(3))}
        fate = fates[name] = Fate(received, sent, failed, {10 * number, 10 * number + 1})
        for rank in range(ranks):
            told[sent[rank]][rank].sent.add(name)
            step = told[received[rank]][rank]
            step.received.add(name)
            if rank not in failed:
                step.report.loaded[name] = LoadTime(100, float(chance.randint(1, 9)), 0.5)
                continue
            step.report.failed.add(name)
            step.report.rejected.add((NAMESPACE, HASHES[number % len(HASHES)]))
            if by_request:
                step.failed.add(name)
            else:
                step.blocks |= fate.blocks
    for one in (one for step in told for one in step):
        if chance.random() < 0.3:
            one.report.dropped.add((f"d{chance.randrange(3)}", 0))
            head = chance.randrange(3)
            one.report.stored.add((NAMESPACE, HASHES[0], f"0.L0-1_H{head}-{head + 1}"))
        for name in (*COUNTED, "load_seconds_max"):
            if chance.random() < 0.3:
                one.stats[name] = float(chance.randint(1, 1000))
    return told, fates, by_request


@settings(deadline=None, max_examples=150)
@given(replicas())
def test_a_replica_did_what_its_ranks_did(
    replica: tuple[list[list[Step]], dict[str, Fate], bool],
) -> None:
    told, fates, by_request = replica
    ranks = len(told[0])
    what = aggregator(ranks)
    for number, step in enumerate(told):
        found = aggregate(what, [one.output() for one in step], output_rank=ranks - 1)

        ended = {name for name, fate in fates.items() if max(fate.received) == number}
        assert (found.finished_recving or set()) == ended
        sent = {name for name, fate in fates.items() if max(fate.sent) == number}
        assert (found.finished_sending or set()) == sent
        failed = {name for name in ended if fates[name].failed}
        assert found.failed_recving == (failed if by_request else set())
        assert found.invalid_block_ids == set().union(*(one.blocks for one in step))

        sums = Counter({n: 0.0 for one in step for n in one.stats})
        for one in step:
            for name, value in one.stats.items():
                sums[name] = max(sums[name], value) if name.endswith("_max") else sums[name] + value
        stats = found.kv_connector_stats
        assert (dict(stats.data) if stats is not None else {}) == dict(sums)

        reports = [one.report for one in step]
        if all(report.is_empty() for report in reports):
            assert found.kv_connector_worker_meta is None
            continue
        together = found.kv_connector_worker_meta
        assert isinstance(together, StepReport)
        for part in ("dropped", "rejected", "failed", "stored"):
            assert getattr(together, part) == set().union(*(getattr(r, part) for r in reports))
        loaded = {name for report in reports for name in report.loaded}
        assert together.loaded.keys() == loaded
        for name in loaded:
            slowest = max(r.loaded[name].seconds for r in reports if name in r.loaded)
            assert together.loaded[name].seconds == slowest


@pytest.mark.parametrize(("tp", "pp"), list(product(TP_SIZES, PP_SIZES)))
def test_nothing_is_over_while_one_rank_is_busy(tp: int, pp: int) -> None:
    ranks = tp * pp
    what = aggregator(ranks)
    for late in range(ranks):
        told = [Step(received={"r"}, sent={"s"}) for _ in range(ranks)]
        told[late] = Step()
        found = aggregate(what, [one.output() for one in told])
        assert (found.finished_recving, found.finished_sending) == (None, None)
        told = [Step() for _ in range(ranks)]
        told[late] = Step(received={"r"}, sent={"s"})
        found = aggregate(what, [one.output() for one in told])
        assert (found.finished_recving, found.finished_sending) == ({"r"}, {"s"})


# Real workers, of every rank of a replica.


class Replica:
    """All workers of one replica, each with its own part of the caches."""

    def __init__(self, geometry: Geometry, store: MemoryStore, index: MemoryIndex, seed: int):
        self.workers: list[WorkerSide] = []
        self.recorders: list[MemoryRecorder] = []
        self.aggregator = aggregator(geometry.ranks)
        for pp_rank, tp_rank in product(range(geometry.pp_size), range(geometry.tp_size)):
            shape = geometry.shape(0, tp_rank, pp_rank)
            assert shape is not None
            share = shape.rank_shard.shard
            # Of a head that several ranks hold each has the same.
            place = 10 * share.layer_start + share.head_start
            generator = torch.Generator().manual_seed(seed * 100 + place)
            sizes = (32, share.head_end - share.head_start, 32, 8)
            recorder = MemoryRecorder()
            caches = {name: torch.randn(sizes, generator=generator) for name in shape.layers}
            rank = Rank(tp_rank, f"w{seed}-{pp_rank}-{tp_rank}", 1, pp_rank=pp_rank)
            self.workers.append(
                worker_side(
                    store, index, geometry=geometry, rank=rank, caches=caches, recorder=recorder
                )
            )
            self.recorders.append(recorder)

    def step(self, plan: StepPlan, finished: frozenset[str] = frozenset()) -> KVConnectorOutput:
        """One step of every worker, in the order of vLLM's calls, and what comes of it."""
        told = []
        for worker, recorder in zip(self.workers, self.recorders, strict=True):
            worker.start_loads(plan)
            worker.end_forward(plan)
            done = worker.results(plan, set(finished))
            data = recorder.drain()
            told.append(
                KVConnectorOutput(
                    finished_sending=done.sent,
                    finished_recving=done.received,
                    failed_recving=done.failed,
                    invalid_block_ids=worker.take_failed_blocks(),
                    kv_connector_stats=ObjKVStats(data=cast("Any", data)) if data else None,
                    kv_connector_worker_meta=worker.take_report(),
                )
            )
        return aggregate(self.aggregator, told)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


@dataclass
class Told:
    """What a scheduler heard over many steps."""

    received: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    blocks: set[int] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    report: StepReport = field(default_factory=StepReport)
    stats: ObjKVStats = field(default_factory=ObjKVStats)

    def hear(self, output: KVConnectorOutput) -> None:
        self.received.update(output.finished_recving or ())
        self.sent.update(output.finished_sending or ())
        self.blocks |= output.invalid_block_ids
        self.failed |= output.failed_recving
        if isinstance(report := output.kv_connector_worker_meta, StepReport):
            self.report = self.report.aggregate(report)
        if isinstance(stats := output.kv_connector_stats, ObjKVStats):
            self.stats = self.stats.aggregate(stats)


SHAPES = [(tp, pp, 8) for tp in (1, 2, 4, 8) for pp in (1, 2, 4)] + [(4, 1, 1), (4, 2, 2)]


@pytest.fixture(params=SHAPES, ids=lambda shape: "tp{}-pp{}-heads{}".format(*shape))
def saved(
    request: pytest.FixtureRequest,
) -> Iterator[tuple[Geometry, MemoryStore, MemoryIndex, Replica]]:
    """A replica that has saved a chunk, and another that has not."""
    tp, pp, heads = request.param
    group = GroupIdentity("full", None, LAYERS, heads=heads, content=8, block_size=32)
    geometry = Geometry((group,), CHUNK, 32, tp, ((4 // pp,) * pp,) if pp > 1 else ())
    store, index = MemoryStore(), MemoryIndex()
    writer = Replica(geometry, store, index, seed=1)
    reader = Replica(geometry, store, index, seed=2)
    save = SaveMove(_move(1), token_digest(tuple(TOKENS[:CHUNK])), None)
    heard = Told()
    plan = StepPlan(saves=(SavePlan("s", NAMESPACE, (save,)),))
    heard.hear(writer.step(plan))
    held = StepPlan(held=frozenset({"s"}))
    for _ in range(STEPS_MAX):
        heard.hear(writer.step(held, frozenset({"s"})))
        (record,) = index.lookup(NAMESPACE, [HASHES[0]])
        if heard.sent["s"] and record and record.shards.keys() == geometry.all_fields():
            break
    assert heard.sent == {"s": 1}  # although it was held in later steps too
    writer.close()
    yield geometry, store, index, reader
    reader.close()


def _move(first_block: int) -> ChunkMove:
    blocks = tuple(range(first_block, first_block + BLOCKS))
    return ChunkMove(
        0, 0, HASHES[0], root_hash(NAMESPACE), 0, CHUNK, first_block=0, block_ids=blocks
    )


def _load(index: MemoryIndex, name: str) -> LoadPlan:
    (record,) = index.lookup(NAMESPACE, [HASHES[0]])
    assert record is not None
    return LoadPlan(name, NAMESPACE, (LoadMove(_move(9), tuple(record.shards.items())),), False)


def _play(replica: Replica, load: LoadPlan) -> Told:
    heard = Told()
    heard.hear(replica.step(StepPlan(loads=(load,), idle=True)))
    for _ in range(STEPS_MAX):
        if heard.received:
            break
        heard.hear(replica.step(StepPlan(idle=True)))
    for _ in range(2):
        heard.hear(replica.step(StepPlan()))
    return heard


def test_a_load_is_over_once_when_all_ranks_have_it(
    saved: tuple[Geometry, MemoryStore, MemoryIndex, Replica],
) -> None:
    geometry, _, index, reader = saved
    heard = _play(reader, _load(index, "q"))
    assert heard.received == {"q": 1}
    assert (heard.blocks, heard.failed, heard.report.failed) == (set(), set(), set())
    assert heard.report.loaded.keys() == {"q"}
    assert heard.stats.data["loads"] == geometry.ranks
    assert heard.stats.data["load_seconds_count"] == geometry.ranks


def test_a_load_that_failed_on_one_rank_failed(
    saved: tuple[Geometry, MemoryStore, MemoryIndex, Replica],
) -> None:
    geometry, store, index, reader = saved
    load = _load(index, "q")
    shard = geometry.rank_shard(0, geometry.tp_size - 1, geometry.pp_size - 1)
    assert shard is not None
    digest = HASHES[0].hex()
    path = f"{NAMESPACE}/{digest[:2]}/{digest}/0.{shard.shard}.safetensors"
    spoilt = bytearray(store.get(path) or b"")
    spoilt[-1] ^= 1
    store.put(path, spoilt)
    heard = _play(reader, load)
    assert heard.received == {"q": 1}
    assert heard.blocks == set(range(9, 9 + BLOCKS))
    assert heard.report.failed == {"q"}
    assert heard.report.rejected == {(NAMESPACE, HASHES[0])}
    assert heard.stats.data["loads"] == geometry.ranks
    assert heard.stats.data["load_failures"] == shard.replicas
    assert heard.stats.data["load_corrupt"] == shard.replicas
