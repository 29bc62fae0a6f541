"""Loads within a step and between steps, side by side on one worker."""

from dataclasses import replace

from tests.transfer.paged_cache import same_blocks
from tests.transfer.world import BLOCKS, Replica, stores, wait_until


def test_settling_a_step_leaves_the_loads_between_steps_to_be_told_as_such() -> None:
    store, index = stores()
    writer, reader = Replica(store, index, seed=1), Replica(store, index, seed=2)
    writer.save(range(2))
    later = replace(reader.load_plan(range(1), 20), request_id="later")
    reader.loader.submit(later)
    wait_until(lambda: same_blocks(writer.caches, [1, 2], reader.caches, [20, 21]))
    wait_until(lambda: reader.loader._jobs["later"].is_over())
    reader.loader.submit(reader.load_plan(range(2), 9, sync=True))
    (settled,) = reader.loader.take_finished(sync=True)
    assert settled.request_id == "r"
    assert reader.outcome().request_id == "later"
    ids = range(2 * BLOCKS)
    assert same_blocks(writer.caches, [1 + i for i in ids], reader.caches, [9 + i for i in ids])
    writer.close()
    reader.close()
