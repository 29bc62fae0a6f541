"""Layer 0 of all chunks comes first, and is usable while later layers are still on the wire."""

from threading import Event

import pytest

from objkv.index.memory import MemoryIndex
from objkv.keys.identity import GroupIdentity
from objkv.stores.base import Arrived
from objkv.transfer.fetch import Cuts
from tests.transfer.arriving import PiecewiseStore
from tests.transfer.paged_cache import same_blocks
from tests.transfer.world import BLOCKS, IN_SPANS, PATIENCE_S, Replica, wait_until

CHUNKS = 4
LAYERS = 8
GROUP = GroupIdentity(
    "full", None, tuple(f"l{i}" for i in range(LAYERS)), heads=4, content=64, block_size=32
)
THEIRS = [1 + i for i in range(CHUNKS * BLOCKS)]
MINE = [9 + i for i in range(CHUNKS * BLOCKS)]


class LateStore(PiecewiseStore):
    """What does not begin with the payload's first byte comes when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.go = Event()

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        if start:
            assert self.go.wait(PATIENCE_S)
        return super().get_into(key, buffer, arrived, start)


@pytest.mark.parametrize("codec", ["none", "blosc"])
def test_layer_0_of_all_chunks_is_usable_before_the_last_layer_of_any_has_arrived(
    codec: str,
) -> None:
    store, index = LateStore(), MemoryIndex()
    writer = Replica(store, index, seed=1, group=GROUP, codec=codec)
    for pages in writer.caches:
        pages.round_()  # compressible
    # With fewer slabs than chunks: a span needs one (two to decode) for its own time only.
    reader = Replica(store, index, seed=2, group=GROUP, cuts=IN_SPANS, slabs=4)
    writer.save(range(CHUNKS))
    before = reader.snapshot()
    reader.loader.submit(reader.load_plan(range(CHUNKS), MINE[0], sync=True))
    for layer in range(LAYERS // IN_SPANS.step_spans_max):
        reader.loader.wait_layer(0, layer)
        assert same_blocks([writer.caches[layer]], THEIRS, [reader.caches[layer]], MINE)
    assert not store.go.is_set()
    assert same_blocks(before[-1:], MINE, reader.caches[-1:], MINE)
    store.go.set()
    (outcome,) = reader.loader.take_finished(sync=True)
    assert not outcome.failed
    assert same_blocks(writer.caches, THEIRS, reader.caches, MINE)
    wait_until(lambda: reader.load_slabs.leased == 0)
    writer.close()
    reader.close()


def test_a_last_layer_that_never_comes_fails_the_chunk_whose_first_layers_came() -> None:
    store, index = LateStore(), MemoryIndex()
    replica = Replica(store, index, seed=1, group=GROUP, cuts=IN_SPANS)
    replica.save(range(1))
    replica.loader.submit(replica.load_plan(range(1), MINE[0], sync=True))
    replica.loader.wait_layer(0, 0)
    assert same_blocks(replica.caches[:1], THEIRS[:2], replica.caches[:1], MINE[:2])
    store.delete(replica.path(0))
    store.go.set()
    (outcome,) = replica.loader.take_finished(sync=True)
    assert outcome.failed_blocks == set(MINE[:BLOCKS])
    assert len(outcome.rejected) == 1
    replica.close()


@pytest.mark.parametrize(
    ("sync", "cuts", "requests"),
    [
        (True, Cuts(step_spans_max=4, span_bytes_min=1), 4),
        (True, Cuts(step_spans_max=2, span_bytes_min=1), 2),
        (True, Cuts(), 1),  # each request is paid for, and these payloads are small
        (False, Cuts(step_spans_max=4, span_bytes_min=1), 1),  # nobody waits for a layer
    ],
)
def test_how_many_requests_a_payload_costs(*, sync: bool, cuts: Cuts, requests: int) -> None:
    store, index = PiecewiseStore(), MemoryIndex()
    replica = Replica(store, index, seed=1, group=GROUP, cuts=cuts)
    replica.save(range(1))
    del store.requests[:]
    assert not replica.load(range(1), first_block=MINE[0], sync=sync).failed
    assert len(store.requests) == requests
    assert len(set(store.requests)) == requests
    replica.close()
