"""objkv's workers under vLLM's own aggregator: what all ranks tell is what one replica did."""

import copy
import pickle
from collections import Counter
from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from objkv.cache.admission import LoadTime
from objkv.connector.kv.connector import ObjKVConnector
from objkv.connector.kv.metadata import StepReport
from objkv.connector.metrics import ObjKVStats
from tests.support.paged_cache import HASHES, NAMESPACE

TP_SIZES, PP_SIZES = range(1, 9), range(1, 5)
COUNTED = ("loads", "load_bytes", "save_errors", "load_seconds_sum")


def aggregate(what: KVOutputAggregator, told: list[KVConnectorOutput]) -> KVConnectorOutput:
    """One step's outputs, each through a process boundary, as the executor aggregates them."""
    outputs: list[ModelRunnerOutput | None] = []
    for one in told:
        made = ModelRunnerOutput.with_kv_conn_output_only(one)
        outputs.append(copy.copy(pickle.loads(pickle.dumps(made))))
    together = what.aggregate(outputs, len(told) - 1)
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
            kv_connector_worker_meta=None if self.report == StepReport() else self.report,
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
                step.report.loaded[name] = LoadTime(float(chance.randint(1, 9)), 0.5)
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
    what = KVOutputAggregator.from_connector(object.__new__(ObjKVConnector), ranks)
    for number, step in enumerate(told):
        found = aggregate(what, [one.output() for one in step])

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
        if all(report == StepReport() for report in reports):
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
