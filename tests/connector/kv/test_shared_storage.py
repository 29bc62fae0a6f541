"""The scheduler's side over one folder and nothing else, where vLLM's example goes wrong.

Each replica is one of its own; what they have in common are files. Source of the example: vLLM
0.32, ``kv_connector/v1/example_connector.py``.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.outputs import KVConnectorOutput

from objkv.cache.bulk_index import BulkIndex
from objkv.codec.payload import Claim, LayerSpec, Provenance, encode
from objkv.keys.chunk import ChunkKey
from objkv.keys.topology import Shard
from objkv.stores.local import LocalStore
from objkv.transfer.plan import LoadPlan, SavePlan
from tests.support.sides import SIZE, request, scheduler_side, step
from tests.support.waiting import wait_until

SHARD = Shard(0, 1, 0, 1)
LAYERS = (LayerSpec("l0", "BF16", (1, 1, SIZE, 8)),)


def image(seed: int, offset: int, length: int = 7) -> Any:
    place = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(identifier=f"{seed:064x}", mm_position=place)


class Replica:
    """A scheduler's side on a folder, and the steps that vLLM would take with it."""

    def __init__(self, folder: Path) -> None:
        self.store = LocalStore(folder)
        index = BulkIndex(LocalStore(folder))
        self.side = scheduler_side(index, bulk=self.store, admission="always")

    def ask(self, request: Any, computed: int = 0) -> int:
        """Tokens that can be loaded beyond ``computed``."""
        wait_until(lambda: self.side.match(request, computed)[0] is not None)
        found = self.side.match(request, computed)[0]
        assert found is not None
        return found

    def run(self, request: Any) -> tuple[int, list[int]]:
        """Admit a request, load what is stored, compute the rest in one step, save: the tokens
        that were loaded, and the chunks that were saved."""
        self.side.track(request)
        loaded = self.ask(request)
        blocks = list(range(1, 2 + request.num_tokens // SIZE))
        self.side.plan_load(request, (blocks,), loaded)
        if loaded:
            self.told_received(request, self.step(request, blocks, 0).loads)
            self.side.plan_load(request, (blocks,), 0)
        request.num_computed_tokens = min(loaded, request.num_tokens - 1)
        plan = self.step(request, blocks, request.num_tokens - request.num_computed_tokens)
        saved = [save.move.chunk for one in plan.saves for save in one.moves]
        for one in plan.saves:
            self.save(one)
        self.side.finish(request, (blocks,))
        return loaded, saved

    def step(self, request: Any, blocks: list[int], scheduled: int) -> Any:
        tokens = {request.request_id: scheduled} if scheduled else {}
        return self.side.plan_step(step(tokens, blocks))

    def told_received(self, request: Any, loads: Sequence[LoadPlan]) -> None:
        assert [load.request_id for load in loads] == [request.request_id]
        self.side.update(KVConnectorOutput(finished_recving={request.request_id}))

    def save(self, plan: SavePlan) -> None:
        """As a worker does, of whatever pages."""
        for save in plan.moves:
            move = save.move
            key = ChunkKey(plan.namespace, move.prefix_hash, move.group, SHARD)
            claim = Claim(key, move.parent_hash, move.token_start, move.token_end)
            told = Provenance(save.token_digest, "test", 0)
            pages = [bytes(LAYERS[0].nbytes)]
            payload = encode(claim, LAYERS, pages, codec="none", provenance=told)
            self.store.put_if_absent(key.path(), payload)

    def close(self) -> None:
        self.side.close()


Open = Callable[[], Replica]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens replicas on one folder."""
    with contextlib.ExitStack() as stack:

        def make() -> Replica:
            replica = Replica(tmp_path)
            stack.callback(replica.close)
            return replica

        yield make


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 5 * SIZE), st.integers(1, 5 * SIZE), st.integers(0, 5 * SIZE))
def test_of_any_two_prompts_what_they_begin_with_is_shared(
    tmp_path_factory: pytest.TempPathFactory, first: int, second: int, common: int
) -> None:
    folder = tmp_path_factory.mktemp("shared")
    common = min(first, second, common)
    one = list(range(1000, 1000 + first))
    two = one[:common] + list(range(5000, 5000 + second - common))
    with contextlib.closing(Replica(folder)) as writer, contextlib.closing(Replica(folder)) as next:
        assert writer.run(request(one)) == (0, list(range(first // SIZE)))
        loaded = common // SIZE
        assert next.run(request(two)) == (loaded * SIZE, list(range(loaded, second // SIZE)))


def test_images_count_where_they_stand_and_not_before(opened: Open) -> None:
    """The example puts the hashes of all images into the one name of a prompt."""
    tokens = list(range(4 * SIZE + 3))
    late = [image(1, SIZE + 4), image(2, 3 * SIZE + 1)]
    opened().run(request(tokens, mm_features=late))
    replica = opened()
    for number, (images, chunks) in enumerate(
        [
            (late, 4),
            ([late[0], image(3, 3 * SIZE + 1)], 3),
            ([image(3, SIZE + 4), late[1]], 1),
            ([image(1, SIZE + 5), late[1]], 1),
            ([], 1),
        ]
    ):
        one = request(tokens, name=str(number), mm_features=images)
        replica.side.track(one)
        assert replica.ask(one) == chunks * SIZE, images


def test_a_request_that_was_preempted_finds_the_folder_again(opened: Open) -> None:
    """vLLM asks anew each time, with whatever its own cache still has; it may have generated some
    tokens by then, and those are nowhere."""
    tokens = list(range(4 * SIZE + 3))
    opened().run(request(tokens))
    replica, one = opened(), request(tokens)
    replica.side.track(one)
    assert [replica.ask(one, kept * SIZE) for kept in range(5)] == [
        (4 - kept) * SIZE for kept in range(5)
    ]
    blocks = list(range(1, 6))
    replica.side.plan_load(one, (blocks,), replica.ask(one))
    first = replica.step(one, blocks, 0).loads
    replica.told_received(one, first)
    one.all_token_ids += range(9000, 9000 + 2 * SIZE)
    one.num_tokens = len(one.all_token_ids)
    others = list(range(11, 16))
    assert replica.ask(one, SIZE) == 3 * SIZE
    replica.side.plan_load(one, (others,), 3 * SIZE)
    [again] = replica.step(one, others, 0).loads
    assert [load.move.block_ids for load in again.moves] == [(12,), (13,), (14,)]
    assert [load.move.chunk for load in again.moves] == [1, 2, 3]


def test_a_folder_of_which_files_are_gone_serves_what_comes_before(
    opened: Open, tmp_path: Path
) -> None:
    """To the example a folder that is there counts as whole, and the engine ends."""
    tokens = range(4 * SIZE)
    opened().run(request(tokens))
    [third] = [
        path
        for path in tmp_path.glob("*/*/*/*.safetensors")
        if b'"token_start":"64"' in path.read_bytes()[:4096]
    ]
    third.unlink()
    # Nobody looked beyond the one that is gone: the last is offered once more, and is there.
    assert opened().run(request(tokens)) == (2 * SIZE, [2, 3])
    assert opened().run(request(tokens)) == (4 * SIZE, [])
