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

COUNTED = ("loads", "load_bytes", "save_errors", "load_seconds_sum", "load_seconds_max")
BLOCKS = {"r0": {1, 2}, "r1": {3}, "r2": set[int](), "r3": set[int]()}
"""The blocks of each load. Of those without any failures are told by request."""


@dataclass
class Step:
    """What one rank tells after one step."""

    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    blocks: set[int] = field(default_factory=set)
    report: StepReport = field(default_factory=StepReport)
    stats: dict[str, float] = field(default_factory=dict)

    def output(self) -> ModelRunnerOutput:
        """As vLLM's model runner asks objkv's connector for it, through a process boundary."""
        told = KVConnectorOutput(
            finished_recving=self.received or None,
            failed_recving=self.failed,
            invalid_block_ids=self.blocks,
            kv_connector_stats=ObjKVStats(data=dict(self.stats)) if self.stats else None,
            kv_connector_worker_meta=None if self.report == StepReport() else self.report,
        )
        made = ModelRunnerOutput.with_kv_conn_output_only(told)
        return copy.copy(pickle.loads(pickle.dumps(made)))


def told_by(chance: Random, ranks: int, steps: int) -> list[list[Step]]:
    """Per step and rank what is told. Each rank ends each load in some step."""
    told = [[Step() for _ in range(ranks)] for _ in range(steps)]
    for number, (name, blocks) in enumerate(BLOCKS.items()):
        for rank in range(ranks):
            step = told[chance.randrange(steps)][rank]
            step.received.add(name)
            if chance.random() < 0.8:
                step.report.loaded[name] = LoadTime(float(chance.randint(1, 9)), 0.5)
                continue
            step.blocks |= blocks
            step.failed |= set() if blocks else {name}
            step.report.failed.add(name)
            step.report.rejected.add((NAMESPACE, HASHES[number]))
    for one in (one for step in told for one in step if chance.random() < 0.5):
        head = chance.randrange(3)
        one.report.dropped.add((f"d{head}", 0))
        one.report.stored.add((NAMESPACE, HASHES[0], f"0.L0-1_H{head}-{head + 1}"))
        one.stats = {name: float(chance.randint(1, 9)) for name in COUNTED if chance.random() < 0.5}
    return told


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 1 << 32), st.integers(1, 8), st.integers(1, 4), st.integers(1, 5))
def test_a_replica_did_what_its_ranks_did(seed: int, tp: int, pp: int, steps: int) -> None:
    told = told_by(Random(seed), ranks := tp * pp, steps)
    what = KVOutputAggregator.from_connector(object.__new__(ObjKVConnector), ranks)
    left, failed = dict.fromkeys(BLOCKS, ranks), set[str]()
    for step in told:
        together = what.aggregate([one.output() for one in step], ranks - 1)
        assert together is not None
        found = together.kv_connector_output
        assert found is not None
        left = {name: n - sum(name in one.received for one in step) for name, n in left.items()}
        ended = {name for name, count in left.items() if not count}
        left = {name: count for name, count in left.items() if count}
        failed |= set().union(*(one.failed for one in step))
        assert (found.finished_recving or set()) == ended
        assert found.failed_recving == ended & failed
        assert found.invalid_block_ids == set().union(*(one.blocks for one in step))
        sums = Counter[str]()
        for name, value in ((name, v) for one in step for name, v in one.stats.items()):
            sums[name] = max(sums[name], value) if name.endswith("_max") else sums[name] + value  # type: ignore[assignment]
        stats = found.kv_connector_stats
        assert (dict(stats.data) if stats is not None else {}) == sums
        reports, meta = [one.report for one in step], found.kv_connector_worker_meta
        if all(report == StepReport() for report in reports):
            assert meta is None
            continue
        assert isinstance(meta, StepReport)
        for part in ("dropped", "rejected", "failed", "stored"):
            assert getattr(meta, part) == set().union(*(getattr(r, part) for r in reports))
        times = [(name, time.seconds) for report in reports for name, time in report.loaded.items()]
        slowest = {name: max(s for other, s in times if other == name) for name, _ in times}
        assert {name: time.seconds for name, time in meta.loaded.items()} == slowest
