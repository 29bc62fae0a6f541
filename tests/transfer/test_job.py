"""The fence around one load's blocks, on a clock of its own."""

from objkv.keys.prefix import root_hash
from objkv.testing.clock import ManualClock
from objkv.transfer.job import LoadJob
from objkv.transfer.lanes import HostMark
from objkv.transfer.plan import ChunkMove, LoadMove, LoadPlan
from tests.transfer.world import CHUNK, HASHES, NAMESPACE

LAYERS = 2


def job_of_one_chunk(clock: ManualClock, *, sync: bool) -> LoadJob:
    move = ChunkMove(0, 0, HASHES[0], root_hash(NAMESPACE), 0, CHUNK, 0, (3, 4))
    plan = LoadPlan("r", NAMESPACE, (LoadMove(move, ()),), sync)
    return LoadJob(plan, {0: LAYERS}, clock() + 5.0, clock)


def write_all_layers(job: LoadJob) -> None:
    for layer in range(LAYERS):
        job.layer_written(0, layer, HostMark())
    job.leave(0, complete=True)


def test_a_layer_that_was_computed_without_its_blocks_counts_as_not_loaded() -> None:
    """A write under way at the deadline still ends, but attention did not wait for it."""
    clock = ManualClock()
    job = job_of_one_chunk(clock, sync=True)
    assert job.enter(0)
    clock.advance(6.0)
    assert job.wait_layer(0, 0) == []
    write_all_layers(job)
    assert job.wait_layer(0, 1)
    assert job.close().failed_blocks == {3, 4}


def test_a_write_under_way_at_the_deadline_counts_between_steps() -> None:
    clock = ManualClock()
    job = job_of_one_chunk(clock, sync=False)
    assert job.enter(0)
    clock.advance(6.0)
    write_all_layers(job)
    assert not job.close().failed
