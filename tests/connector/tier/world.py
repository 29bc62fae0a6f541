"""vLLM's own tiering manager on the CPU, made by its own spec and factory, with objkv's tier."""

import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from objkv.config import Config
from objkv.connector.tier.manager import ObjKVTier
from tests.connector.encoder.engine import engine
from tests.support.served import ServedAgent
from tests.support.waiting import PATIENCE_S, wait_until

ROW_BYTES = 8192
ROWS = 8


def init_hashes(algorithm: str = "sha256") -> None:
    """As the engine does after it made its scheduler."""
    kv_cache_utils.init_none_hash(get_hash_fn_by_name(algorithm))


def offload_key(number: int, group: int = 0) -> OffloadKey:
    """A key as vLLM makes them; the same number is the same tokens."""
    return make_offload_key(number.to_bytes(32, "big"), group)


def offloading_config(extra: dict[str, Any], **changes: Any) -> OffloadingConfig:
    """As ``build_offloading_config`` makes it for a model with one group, on one rank."""
    parallel: dict[str, Any] = {
        "rank": 0,
        "world_size": 1,
        "tp_size": 1,
        "pp_size": 1,
        "pcp_size": 1,
        "dcp_size": 1,
        "data_parallel_index": 0,
        "data_parallel_size": 1,
        "data_parallel_rank_local": None,
        "is_parallelism_agnostic": False,
    } | changes.pop("parallel", {})
    values: dict[str, Any] = {
        "groups": (OffloadingGroupConfig(16, ("l0", "l1"), 0),),
        "worker_kv_bytes_per_block": ROW_BYTES // parallel["world_size"],
        "enable_kv_cache_events": False,
        "extra_config": extra,
        "engine_id": f"test-{uuid.uuid4().hex}",
        "model": OffloadingModelConfig("some/model", "bfloat16"),
        "cache": OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        "parallel": OffloadingParallelConfig(**parallel),
        "kv_cache_layout": "LBNHC",
    } | changes
    return OffloadingConfig(**values)


def engine_config(told: OffloadingConfig, **changes: Any) -> Any:
    """vLLM's configuration, as far as a tier reads it, with the very ``extra_config`` of ``told``;
    ``changes`` by the parts' names."""
    config = engine(Path(told.model.name), revision="release-1", multimodal_config=None)
    config.kv_transfer_config = SimpleNamespace(
        kv_connector_extra_config=told.extra_config, engine_id=told.engine_id
    )
    config.parallel_config = SimpleNamespace(
        distributed_executor_backend="mp",
        world_size=told.parallel.world_size,
        use_ray=False,
        nnodes_within_dp=1,
    )
    config.speculative_config = None
    for name, values in changes.items():
        before = getattr(config, name) or SimpleNamespace()
        setattr(config, name, SimpleNamespace(**vars(before) | values))
    return config


class Connector(OffloadingConnector):
    """vLLM's connector of a scheduler, as far as a tier knows it."""

    def __init__(self, spec: TieringOffloadingSpec, vllm_config: VllmConfig) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_manager = SimpleNamespace(usage=0)
        self.manager: TieringOffloadingManager = spec.get_manager()


class Engine:
    """One replica's offloading, driven as ``OffloadingConnectorScheduler`` drives it. It has a node
    and so an agent of its own, unless its settings name one."""

    def __init__(self, folder: Path, tier: dict[str, Any] | None = None, **changes: Any) -> None:
        options: dict[str, Any] = {
            "type": "ObjKVTier",
            "module_path": "objkv.connector.tier",
            "bulk_url": f"file://{folder}/chunks",
            "index_url": f"sqlite://{folder}/index.sqlite",
            "codec": "none",
            "lookup_deadline_ms": 60_000,  # a busy machine is no slow index
        } | (tier or {})
        ends = ExitStack()
        self.lose_agent = ends.close
        if "agent" not in options:
            own = {k: v for k, v in options.items() if k in Config.model_fields}
            self.agent = ServedAgent(own)
            ends.callback(self.agent.close)
            options["agent"] = self.agent.url
        rows = changes.pop("rows", ROWS)
        extra = {"cpu_bytes_to_use": rows * ROW_BYTES, "secondary_tiers": [options]}
        seen = changes.pop("engine", {})
        told = offloading_config(extra, **changes)
        self.spec = TieringOffloadingSpec(told)
        try:
            self.connector = Connector(self.spec, engine_config(told, **seen))
        except BaseException:
            self.lose_agent()
            raise
        self.manager = self.connector.manager
        (self.tier,) = self.manager.secondary_tiers
        assert isinstance(self.tier, ObjKVTier)
        self._requests = 0

    @property
    def view(self) -> memoryview:
        return self.manager.primary_tier.get_kv_memoryview()

    def begin(self) -> ReqContext:
        self._requests += 1
        self.connector._kv_cache_manager.usage += 1
        context = ReqContext(req_id=f"r{self._requests}")
        self.manager.on_new_request(context)
        return context

    def end_step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def compute(self, context: ReqContext, content: dict[OffloadKey, bytes]) -> list[OffloadKey]:
        """Chunks are computed and given to vLLM's CPU memory; those that vLLM took."""
        out = self.manager.prepare_store(list(content), context)
        assert out is not None
        for key, row in zip(out.keys_to_store, out.store_spec.chunk_ids, strict=True):
            np.asarray(self.view)[row] = np.frombuffer(content[key], np.int8)
        self.manager.complete_store(out.keys_to_store, context)
        return list(out.keys_to_store)

    def save(self, *numbers: int, context: ReqContext | None = None) -> None:
        """Compute chunks for a request, by default a new one that ends, and wait until its agent
        has saved them, or has not."""
        request = context or self.begin()
        self.compute(request, {offload_key(n): row(n) for n in numbers})
        self.store()
        if context is None:
            self.end(request)

    def ask(self, *numbers: int) -> list[LookupResult]:
        request = self.begin()
        answers = self.find(request, [offload_key(n) for n in numbers])
        self.end(request)
        return answers

    def counted(self, name: str) -> float:
        return float(self.tier._recorder.value(name))

    def store(self) -> None:
        """Steps until no job is under way, and its agent saves nothing."""
        self.settle()
        assert self.agent.node.saves.drain(PATIENCE_S)

    def settle(self) -> None:

        def idle() -> bool:
            self.end_step()
            return not self.manager.has_pending_work()

        wait_until(idle, "all jobs to end")

    def find(self, context: ReqContext, keys: Sequence[OffloadKey]) -> list[LookupResult]:
        """Ask, step by step, until vLLM would not wait any longer."""
        answers: list[LookupResult] = []

        def settled() -> bool:
            answers[:] = [self.manager.lookup(key, context) for key in keys]
            self.end_step()
            return not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(answers)

        wait_until(settled, "all keys to be answered")
        return answers

    def read(self, context: ReqContext, key: OffloadKey) -> bytes:
        """What vLLM would copy to the device."""
        spec = self.manager.prepare_load([key], context)
        row = np.asarray(self.view)[int(spec.chunk_ids[0])].tobytes()
        self.manager.complete_load([key], context)
        return row

    def end(self, context: ReqContext) -> None:
        self.connector._kv_cache_manager.usage -= 1
        self.manager.on_request_finished(context)

    def close(self) -> None:
        self.manager.shutdown()
        self.lose_agent()


def row(seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, ROW_BYTES, np.uint8).tobytes()
