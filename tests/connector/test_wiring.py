"""What connectors are opened with: who saves, how far a store is, how memory is divided."""

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import PropertyMock, patch

import pytest
import torch
from vllm.config import ParallelConfig
from vllm.distributed import parallel_state

from objkv.agent.outbox import Outbox
from objkv.assembly.backends import is_far
from objkv.assembly.link import Replica
from objkv.codec.payload import payload_bytes_max
from objkv.config import Config
from objkv.connector import wiring as connector_wiring
from objkv.connector.kv import wiring
from objkv.connector.kv.connector import ObjKVConnector
from objkv.connector.kv.wiring import Pools, open_slabs, plan_pools
from objkv.connector.kv.worker import Rank
from objkv.connector.model.groups import Geometry
from objkv.connector.model.identity import placed
from objkv.connector.wiring import count_nodes, may_save, replica_of
from objkv.errors import ConfigError
from objkv.keys.identity import GroupIdentity
from objkv.transfer.layouts import row_bytes_max
from objkv.transfer.paging import PagedGroup
from tests.support.paged_cache import GROUP, paged_group

CHUNK = 4096
RANK = Rank(0, "w", 1)
_DATA_PARALLEL = {"data_parallel_size": 2, "data_parallel_size_local": 1}


@pytest.fixture
def paged() -> PagedGroup:
    return paged_group(GROUP, chunk_tokens=CHUNK, num_blocks=1)[0]


def test_a_slab_holds_what_a_replica_that_keeps_tokens_has_saved(paged: PagedGroup) -> None:
    """To be refused for its length it would have to be corrupt, and would be replaced."""
    pools = [
        plan_pools(Config(store_tokens=keep), {0: paged}, CHUNK, RANK) for keep in (False, True)
    ]
    longest = payload_bytes_max(paged.layers, tokens=CHUNK)
    assert min(pool.slab_bytes for pool in pools) >= longest


def test_saves_have_slabs_for_two_full_steps_unless_a_setting_or_the_host_forbids_it(
    paged: PagedGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    busy = Rank(0, "w", 1, step_tokens=99 * CHUNK, workers=4)
    pools = plan_pools(Config(), {0: paged}, CHUNK, busy)
    assert pools.save_slabs >= 2 * 99
    assert pools.save_queue_max >= 2 * 99, "else slabs are left over and chunks are dropped"
    assert not caplog.text
    limited = plan_pools(Config(pinned_bytes_max=50 * pools.slab_bytes), {0: paged}, CHUNK, busy)
    assert limited.save_slabs == 50
    assert "raise pinned_bytes_max slabs=50 expected=200" in caplog.text
    monkeypatch.setattr(wiring, "host_bytes", lambda: 4 * 8 * 20 * pools.slab_bytes)
    small = plan_pools(Config(), {0: paged}, CHUNK, busy)
    assert small.save_slabs == 20, "an eighth of the host, for four workers"


def test_chunks_that_no_payload_may_hold_are_refused_with_what_to_do(
    paged: PagedGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wiring, "RAW_BYTES_MAX", 1_000)
    with pytest.raises(ConfigError, match="at most 1000 in one payload: lower chunk_tokens"):
        plan_pools(Config(), {0: paged}, CHUNK, RANK)


def test_a_device_has_a_few_slabs_and_a_cpu_none(paged: PagedGroup) -> None:
    on_cpu = plan_pools(Config(), {0: paged}, CHUNK, RANK)
    assert on_cpu.load_slabs == 0
    device = PropertyMock(return_value=torch.device("cuda"))
    with patch.object(type(paged), "device", device):
        pools = plan_pools(Config(), {0: paged}, CHUNK, RANK)
        few = Config(pinned_bytes_max=3 * pools.slab_bytes)
        assert plan_pools(few, {0: paged}, CHUNK, RANK).load_slabs == 1, "or it reads the arena"
        with pytest.raises(ConfigError, match="raise it"):
            plan_pools(Config(pinned_bytes_max=pools.slab_bytes), {0: paged}, CHUNK, RANK)
    assert pools.load_slabs == 4
    assert pools.slab_bytes >= max(on_cpu.slab_bytes, row_bytes_max(paged))


def test_only_slabs_of_saves_are_in_the_outbox() -> None:
    pools = Pools(4096, 4, 2, 10)
    with closing(Outbox(2 * 4096)) as outbox:
        load, save = open_slabs(pools, None, outbox.fd)
        assert load is not None
        load.memory.fill_(1)
        save.memory.fill_(2)
        assert os.pread(outbox.fd, 3 * 4096, 0) == b"\2" * 8192
    assert (load.total, save.total) == (4, 2)


def test_memory_that_may_not_be_page_locked_is_refused_at_the_start(paged: PagedGroup) -> None:
    pools = plan_pools(Config(), {0: paged}, CHUNK, RANK)

    def refuse(_: torch.Tensor) -> Callable[[], None]:
        raise RuntimeError("out of memory")

    with pytest.raises(ConfigError, match=r"out of memory.*: lower pinned_bytes_max"):
        open_slabs(pools, refuse)
    load, save = open_slabs(pools, None)
    assert load is None
    assert save.total == pools.save_slabs


def test_a_replica_saves_if_vllm_wants_it_and_its_rights_allow_it() -> None:
    writer, reader = Config(role="writer"), Config(role="reader")
    assert may_save(writer, producer=True, consumer=True)
    assert not may_save(writer, producer=False, consumer=True)
    assert not may_save(reader, producer=True, consumer=True)
    with pytest.raises(ConfigError, match="set role to writer"):
        may_save(reader, producer=True, consumer=False)


@pytest.mark.parametrize(
    ("sizes", "nodes"),
    [
        ({}, 1),
        ({"tensor_parallel_size": 8}, 1),
        ({"tensor_parallel_size": 8, "pipeline_parallel_size": 2, "nnodes": 2}, 2),
        ({"tensor_parallel_size": 8, "nnodes": 4, **_DATA_PARALLEL}, 2),
        ({"tensor_parallel_size": 8, "nnodes": 2, **_DATA_PARALLEL}, 1),
    ],
)
def test_ranks_are_on_as_many_nodes_as_vllm_is_told(sizes: dict[str, int], nodes: int) -> None:
    assert count_nodes(ParallelConfig(distributed_executor_backend="mp", **sizes)) == nodes


@pytest.mark.parametrize(
    ("ranks", "devices", "nodes"),
    [(1, 8, 1), (8, 8, 1), (9, 8, 2), (16, 8, 2), (17, 8, 3), (1, 0, 1), (2, 0, 2)],
)
def test_ranks_of_ray_are_on_several_nodes_if_one_has_too_few_devices(
    monkeypatch: pytest.MonkeyPatch, ranks: int, devices: int, nodes: int
) -> None:
    monkeypatch.setattr(connector_wiring, "_count_gpus", lambda: devices)
    parallel = ParallelConfig(tensor_parallel_size=ranks, distributed_executor_backend="mp")
    parallel.distributed_executor_backend = "ray"
    assert count_nodes(parallel) == nodes


@pytest.mark.parametrize(
    ("ray", "assumed", "node_count", "expected"),
    [(True, 2, 2, 8), (True, 1, 3, 8), (True, 2, 1, 1), (False, 2, 3, 2)],
)
def test_ranks_that_ray_has_put_on_several_nodes_write_payloads_of_their_own(
    monkeypatch: pytest.MonkeyPatch, *, ray: bool, assumed: int, node_count: int, expected: int
) -> None:
    monkeypatch.setattr(parallel_state, "get_node_count", lambda: node_count)
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(use_ray=ray))
    group = GroupIdentity("full", None, ("a",), heads=8, content=8, block_size=16)
    one = Geometry((group,), 64, 16, tp_size=8, nodes=assumed)
    assert placed(config, one) == replace(one, nodes=expected)


def test_an_agent_of_one_replica_knows_what_share_of_its_machine_the_replica_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connector_wiring, "_count_gpus", lambda: 8)
    sizes = {"tensor_parallel_size": 8, "nnodes": 2}
    for more, share in (({}, 0.5), (_DATA_PARALLEL, 1.0)):
        parallel = ParallelConfig(distributed_executor_backend="mp", **sizes, **more)
        config: Any = SimpleNamespace(
            parallel_config=parallel, kv_transfer_config=SimpleNamespace(engine_id="e")
        )
        assert replica_of(config) == Replica("e", share)


@pytest.mark.parametrize(
    ("bulk_url", "endpoint", "far"),
    [
        ("s3://bucket/prefix", None, True),
        ("s3://bucket", "https://10.0.0.7:9000", True),
        ("s3://bucket", "http://127.0.0.1:9000", False),
        ("s3://bucket", "http://[::1]:9000", False),
        ("file:///tmp/x", None, False),
    ],
)
def test_only_a_bucket_on_another_machine_is_far(
    bulk_url: str, endpoint: str | None, far: bool
) -> None:
    assert is_far(Config(bulk_url=bulk_url, s3_endpoint_url=endpoint)) is far


@pytest.mark.parametrize(
    ("mode", "between"), [("async", False), ("layerwise", True), ("auto", True)]
)
def test_python_runs_between_layers_only_where_layers_wait(mode: str, between: bool) -> None:
    """Else vLLM may capture the whole model in one graph."""
    asked = ObjKVConnector.requires_piecewise_for_cudagraph({"load_mode": mode})
    assert asked is between
