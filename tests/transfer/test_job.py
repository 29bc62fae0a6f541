"""The fence around one load's blocks, on a clock of its own."""

from threading import Event
from time import monotonic

import pytest

from objkv.keys.prefix import root_hash
from objkv.transfer.lanes import Mark
from objkv.transfer.layouts import SourceShape
from objkv.transfer.loading.loader import LoadJob
from objkv.transfer.plan import ChunkMove, LoadPlan
from tests.contracts.clock import ManualClock
from tests.support.device import ON_HOST
from tests.support.paged_cache import CHUNK, HASHES, NAMESPACE
from tests.support.plans import LoadMove, packed
from tests.support.waiting import at_once
from tests.transfer.test_saver import HungMark

pytestmark = ON_HOST
LAYERS = 2
ALL_LAYERS = [SourceShape(range(LAYERS), 1)]


def job_of(clock: ManualClock, *, sync: bool, chunks: int = 1) -> LoadJob:
    moves = []
    for c in range(chunks):
        parent = HASHES[c - 1] if c else root_hash(NAMESPACE)
        blocks = (3 + 2 * c, 4 + 2 * c)
        at = c * CHUNK
        move = ChunkMove(c, 0, HASHES[c], parent, at, at + CHUNK, 0, blocks)
        moves.append(LoadMove(move, None))
    plan = LoadPlan("r", NAMESPACE, packed(moves), sync)
    return LoadJob(plan, ALL_LAYERS, clock() + 5.0, clock, Mark())


def write_all_layers(job: LoadJob) -> None:
    job.end_write([0], range(LAYERS), Mark())
    job.done([0], 0)


def test_a_layer_that_was_computed_without_its_blocks_counts_as_not_loaded() -> None:
    """A write under way at the deadline still ends, but attention did not wait for it."""
    clock = ManualClock()
    job = job_of(clock, sync=True)
    assert job.begin_write(0)
    clock.advance(6.0)
    assert job.wait_layer(0, 0) is None
    write_all_layers(job)
    assert job.wait_layer(0, 1)
    assert job.close().failed_blocks == {3, 4}


@pytest.mark.parametrize("sync", [False, True])
def test_nothing_is_written_after_the_deadline(*, sync: bool) -> None:
    clock = ManualClock()
    job = job_of(clock, sync=sync)
    clock.advance(5.0)
    assert not job.needed()
    assert not job.begin_write(0)
    assert job.is_over()
    assert job.close().failed_blocks == {3, 4}


@pytest.mark.parametrize("is_layer", [False, True])
def test_nobody_waits_longer_than_the_deadline(*, is_layer: bool) -> None:
    plan = job_of(ManualClock(), sync=True).plan
    job = LoadJob(plan, ALL_LAYERS, monotonic() + 0.05, monotonic, Mark())
    try:
        at_once(lambda: job.wait_layer(0, 0) if is_layer else job.wait_over())
    finally:
        job.cancel()  # wakes a thread that does
    assert job.close().failed_blocks == {3, 4}


def test_a_move_of_which_a_layer_is_missing_is_not_loaded() -> None:
    """Only a bug could bring it about; then it is a miss, and ends at once."""
    job = job_of(ManualClock(), sync=True)
    assert job.begin_write(0)
    job.end_write([0], range(1, 2), Mark())
    job.done([0], 0)
    assert job.is_over()
    assert job.close().failed_blocks == {3, 4}


def test_a_load_is_over_when_what_is_left_of_it_is_of_no_use() -> None:
    """Chunks behind one that failed may still wait for a thread."""
    job = job_of(ManualClock(), sync=False, chunks=3)
    job.fail(1, rejected=False)
    assert not job.is_over(), "the first one is of use by itself"
    assert job.begin_write(0)
    write_all_layers(job)
    assert job.is_over()
    assert job.close().failed_blocks == {5, 6, 7, 8}


def test_a_cancelled_load_has_no_outcome_while_it_writes_and_copies() -> None:
    """Its blocks go to somebody else with that."""
    job, ended = job_of(ManualClock(), sync=False), Event()
    assert job.begin_write(0)
    job.cancel()
    assert job.poll() is None
    job.end_write([0], range(1), HungMark(ended.is_set))
    assert not job.begin_write(0)
    assert job.poll() is None
    ended.set()
    assert (outcome := job.poll()) is not None
    assert outcome.failed_blocks == {3, 4}
