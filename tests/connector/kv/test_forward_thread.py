"""The forward thread makes no network call, whatever is loaded or saved."""

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from objkv.assembly.backends import Backends, open_backends
from objkv.cache.chunks import CacheSettings, ChunkCache
from objkv.config import Config
from objkv.connector.kv.metadata import StepPlan
from objkv.connector.kv.wiring import make_worker_side
from objkv.connector.kv.worker import Rank
from objkv.connector.model.groups import Geometry
from objkv.keys.prefix import token_digest
from objkv.telemetry import MemoryRecorder
from objkv.transfer.plan import LoadMove, LoadPlan, SaveMove, SavePlan
from tests.support.paged_cache import (
    BLOCKS,
    CHUNK,
    GROUP,
    HASHES,
    NAMESPACE,
    TOKENS,
    Replica,
    paged_group,
    same_blocks,
    stores,
)
from tests.support.paged_cache import wait_until as until
from tests.support.servers.quick_s3 import QuickS3
from tests.support.servers.redis import valkey_server

FORWARD = "forward"
CALLS = (
    *("connect", "connect_ex", "send", "sendall", "sendto", "sendmsg"),
    *("recv", "recv_into", "recvfrom", "recvfrom_into", "recvmsg", "recvmsg_into"),
)
THEIRS, MINE, LATER = 1, 9, 20


@pytest.fixture
def callers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that call a socket, once a call."""
    names: list[str] = []

    def recorded(name: str) -> Callable[..., Any]:
        real = getattr(socket.socket, name)

        def call(self: socket.socket, *args: Any, **kwargs: Any) -> Any:
            names.append(threading.current_thread().name)
            return real(self, *args, **kwargs)

        return call

    for name in CALLS:
        monkeypatch.setattr(socket.socket, name, recorded(name))
    return names


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Config]:
    with QuickS3() as s3, valkey_server(tmp_path / "valkey") as valkey:
        yield Config(
            bulk_url="s3://bucket/prefix",
            index_url=valkey.url,
            s3_endpoint_url=s3.url,
            s3_addressing="path",
            s3_access_key_id="a",
            s3_secret_access_key="b",
            load_deadline_ms=600_000,
            step_load_deadline_ms=600_000,
            pinned_bytes_max=1 << 20,
        )


class Served:
    """A worker whose methods are called on a thread of the engine's, as it does."""

    def __init__(self, config: Config, seed: int) -> None:
        self.recorder = MemoryRecorder()
        self.backends: Backends = open_backends(config, self.recorder)
        settings = CacheSettings(
            f"w{seed}", ttl_s=3600, lease_ms=600_000, hot_save_bytes_max=1 << 20
        )
        hot = self.backends.hot
        assert hot is not None
        cache = ChunkCache(self.backends.bulk, hot, self.backends.index, settings, self.recorder)
        _, self.caches = paged_group(GROUP, chunk_tokens=CHUNK, num_blocks=32, seed=seed)
        self.worker = make_worker_side(
            config,
            Geometry((GROUP,), CHUNK, GROUP.block_size, tp_size=1),
            Rank(0, f"w{seed}", batches_in_flight=1),
            cache,
            recorder=self.recorder,
            kv_caches=dict(zip(GROUP.layers, self.caches, strict=True)),
        )

    def step(self, plan: StepPlan) -> set[str]:
        """One step from its start to its results, which are the loads that ended."""
        received: set[str] = set()

        def forward() -> None:
            self.worker.before_reuse(plan)
            self.worker.before_forward(plan)
            self.worker.start_loads(plan)
            for layer in GROUP.layers:
                self.worker.wait_layer(layer)
            self.worker.end_forward(plan)
            received.update(self.worker.results(plan, set()).received)
            assert self.worker.take_failed_blocks() == set()

        thread = threading.Thread(target=forward, name=FORWARD)
        thread.start()
        thread.join()
        return received

    def close(self) -> None:
        self.worker.close()
        self.backends.close()


def test_the_forward_thread_makes_no_network_call(config: Config, callers: list[str]) -> None:
    planner = Replica(*stores(), seed=0)
    chunks, ids = range(2), range(2 * BLOCKS)
    saves = tuple(
        SaveMove(planner.move(c, THEIRS), token_digest(TOKENS[c * CHUNK : (c + 1) * CHUNK]), None)
        for c in chunks
    )
    writer, reader = Served(config, seed=1), Served(config, seed=2)
    writer.step(StepPlan(saves=(SavePlan("r", NAMESPACE, saves),)))
    writer.close()
    assert any(name.startswith("objkv-save") for name in callers)

    found = reader.backends.index.lookup(NAMESPACE, HASHES[: len(chunks)])
    records = [tuple(record.shards.items()) for record in found if record is not None]
    assert [shard.hot for shards in records for _, shard in shards] == [True, True]
    # One from the hot store, one from bulk.
    cold = tuple((field, replace(shard, hot=False)) for field, shard in records[1])

    def plan(name: str, first: int, *, sync: bool) -> LoadPlan:
        moves = [LoadMove(planner.move(c, first), (records[0], cold)[c]) for c in chunks]
        return LoadPlan(name, NAMESPACE, tuple(moves), sync)

    received = reader.step(
        StepPlan(loads=(plan("within", MINE, sync=True), plan("between", LATER, sync=False)))
    )
    until(lambda: "between" in received_by(reader, received))
    for first in (MINE, LATER):
        theirs, mine = [THEIRS + i for i in ids], [first + i for i in ids]
        assert same_blocks(writer.caches, theirs, reader.caches, mine)
    assert reader.recorder.value("hot_hits") >= 1, "the other load may find it in memory"
    assert any(name.startswith("objkv-fill") for name in callers)
    assert FORWARD not in callers
    reader.close()
    planner.close()


def received_by(reader: Served, received: set[str]) -> set[str]:
    """What was received, and what another step brings."""
    received |= reader.step(StepPlan())
    return received
