"""Makes the scheduler's and the worker's side from vLLM's configuration, settings and backends."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from objkv.assembly.backends import Backends, open_room
from objkv.assembly.seal import open_seal
from objkv.cache.chunks import CacheSettings, ChunkCache
from objkv.config import Config
from objkv.connector.kv.scheduler import Roles, SchedulerSide
from objkv.connector.kv.worker import Rank, WorkerSide
from objkv.connector.model.groups import Geometry
from objkv.connector.model.identity import (
    copies_are_synchronous,
    names_media,
    pipeline_rank,
    read_identity,
    safe_load_mode,
    tell_of_sudden_end,
    tensor_rank,
)
from objkv.connector.model.media import read_quantised
from objkv.errors import ConfigError
from objkv.index.near import NearIndex
from objkv.telemetry import Recorder
from objkv.tracing import open_tracing

if TYPE_CHECKING:
    from vllm.config import VllmConfig


# Whether a replica saves: vLLM's role of it wants that, and its rights allow it.


def saves(config: Config, *, producer: bool, consumer: bool) -> bool:
    """Whether this replica stores anything; with the rights of a reader it does not try.

    Args:
        producer: whether vLLM's configuration has it save (``kv_role``, ``ec_role``).
        consumer: whether it has it load.

    Raises ``ConfigError`` for a replica that would then do nothing at all.
    """
    if config.role != "reader":
        return producer
    if producer and not consumer:
        raise ConfigError(
            "role is reader, and vLLM's role of this replica is that of a producer, which only "
            "saves: set role to writer, or let the replica load"
        )
    return False


@dataclass(frozen=True, slots=True)
class Worker:
    """What a worker process has of its own."""

    name: str
    """Names it in leases and payloads."""
    recorder: Recorder
    kv_caches: Mapping[str, torch.Tensor]
    """vLLM's paged cache, by layer; never freed or resized here."""


def open_scheduler_side(
    vllm_config: "VllmConfig",
    config: Config,
    geometry: Geometry,
    backends: Backends,
    recorder: Recorder,
) -> SchedulerSide:
    """Reads the model's files. Raises ``ConfigError`` for what is not supported."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    if config.load_failure == "recompute":
        # vLLM reads it after it made the connector. Its default would fail the request, and
        # to objkv a payload that cannot be loaded is a miss like any other.
        transfer.kv_load_failure_policy = "recompute"
    identity = read_identity(vllm_config, geometry, config)
    saving = saves(config, producer=transfer.is_kv_producer, consumer=transfer.is_kv_consumer)
    if saving:
        tell_of_sudden_end(vllm_config)
    return SchedulerSide(
        safe_load_mode(vllm_config, geometry, config),
        Roles(
            loads=transfer.is_kv_consumer,
            saves=saving,
            copies_are_synchronous=copies_are_synchronous(),
            steps_in_flight=max(1, vllm_config.max_concurrent_batches),
            media_named=names_media(vllm_config),
        ),
        geometry,
        identity,
        bulk=backends.bulk,
        index=NearIndex(
            backends.index,
            records_max=config.near_records_max,
            ttl_s=config.near_ttl_ms / 1000,
            miss_ttl_s=config.near_miss_ttl_ms / 1000,
            fields=geometry.all_fields(),
        ),
        recorder=recorder,
        tracing=open_tracing(),
    )


def open_cache(config: Config, backends: Backends, writer: str, recorder: Recorder) -> ChunkCache:
    """Payloads by key; ``writer`` names this process in leases. Reads the keys that payloads are
    sealed with; raises ``ConfigError``."""
    settings = CacheSettings(
        writer,
        config.ttl_s,
        config.lease_ms,
        config.hot_payload_bytes_max,
        config.hot_save_bytes_max,
        config.hot_promote_loads,
        config.hot_promote_bytes_max,
    )
    room = open_room(config, backends, recorder)
    return ChunkCache(
        backends.bulk,
        backends.hot,
        backends.index,
        settings,
        recorder,
        room=room,
        seal=open_seal(config),
    )


def open_worker_side(
    vllm_config: "VllmConfig",
    config: Config,
    geometry: Geometry,
    backends: Backends,
    worker: Worker,
) -> WorkerSide:
    """Raises ``ConfigError`` for a layout of the paged cache that objkv cannot read."""
    cache = open_cache(config, backends, worker.name, worker.recorder)
    rank = Rank(
        tensor_rank(vllm_config),
        worker.name,
        max(1, vllm_config.max_concurrent_batches),
        writes_early=getattr(vllm_config, "use_v2_model_runner", False),
        pp_rank=pipeline_rank(vllm_config),
        quantised=read_quantised(vllm_config, worker.kv_caches),
    )
    return WorkerSide(
        config,
        geometry,
        rank,
        cache,
        recorder=worker.recorder,
        kv_caches=worker.kv_caches,
        tracing=open_tracing(),
    )
