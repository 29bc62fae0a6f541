"""Makes the scheduler's and the worker's side from vLLM's configuration, settings and backends."""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, cast

import torch

from objkv.agent.client import Connect
from objkv.agent.outbox import AgentSaves, Outbox
from objkv.assembly.link import AgentLink
from objkv.codec.payload import payload_bytes_max
from objkv.codec.values import RAW_BYTES_MAX
from objkv.config import Config
from objkv.config.node import host_bytes
from objkv.connector.kv.events import open_event_log
from objkv.connector.kv.saves import BlockHeadroom
from objkv.connector.kv.scheduler import SchedulerSide
from objkv.connector.kv.worker import Rank, WorkerSide
from objkv.connector.model.groups import Geometry
from objkv.connector.model.identity import (
    names_media,
    placed,
    ranks_of_worker,
    read_identity,
    read_quantised,
    safe_load_mode,
)
from objkv.connector.wiring import may_save
from objkv.errors import ConfigError
from objkv.index.base import WriteIndex
from objkv.keys.chunk import ChunkKey
from objkv.stores.base import WriteStore
from objkv.telemetry import Recorder
from objkv.tracing import NO_TRACING, Tracing, open_tracing
from objkv.transfer.devices import driver_of, open_lane
from objkv.transfer.layouts import row_bytes_max
from objkv.transfer.loading.loader import Loader, LoadLimits
from objkv.transfer.paging import NOT_QUANTISED, PagedGroup, Quantised, check_pages
from objkv.transfer.registration import ArenaRegistration
from objkv.transfer.saver import SaveLimits, Saver
from objkv.transfer.slabs import Pin, SlabPool

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)
_PAGE = 4096
_PINNED_SHARE = 8
"""Divisor: by default all workers of a host take at most this fraction of its memory."""
_LOAD_QUEUE_MAX = 8192
"""Payloads of a worker that may wait to be loaded, those of some long prompts. Further ones are
misses: they would wait until their deadline."""
_SAVE_QUEUE_MIN = 64
"""Chunks of a worker that may wait to be saved, if two steps have fewer."""
_BOUNCE_SLABS = 4
"""For what a device cannot read in an arena: while some are read, others are filled."""


def open_scheduler_side(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    config: Config,
    geometry: Geometry,
    link: AgentLink,
    recorder: Recorder,
    *,
    manager: Callable[[], "KVCacheManager | None"],
) -> SchedulerSide:
    """Open the scheduler's side. Reads the model's files. Raises ``ConfigError`` for unsupported
    models. ``manager``: returns vLLM's manager, or None until the connector is bound to it."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    # vLLM reads this after it has made the connector. Its default fails the request. In objkv a
    # payload that cannot be loaded is an ordinary miss.
    transfer.kv_load_failure_policy = "recompute"
    identity = read_identity(vllm_config, geometry, config)
    saves = may_save(config, producer=transfer.is_kv_producer, consumer=transfer.is_kv_consumer)
    config = safe_load_mode(vllm_config, geometry, config)
    side = SchedulerSide(
        config,
        geometry,
        identity,
        loads=transfer.is_kv_consumer,
        saves=saves,
        steps_in_flight=max(1, vllm_config.max_concurrent_batches),
        has_peers=vllm_config.parallel_config.data_parallel_size > 1,
        media_named=names_media(vllm_config),
        # These have the verbs that replicas use; the rest is for operators.
        bulk=cast("WriteStore", link.calls),
        index=cast("WriteIndex", link.calls),
        recorder=recorder,
        tracing=open_tracing(),
        prefetch=link.calls.prefetch,
        events=open_event_log(vllm_config, kv_cache_config, geometry, config),
        may_reuse=BlockHeadroom(vllm_config, kv_cache_config, geometry, manager).is_short,
    )
    logger.info(
        "objkv ready model=%s namespace=%s chunk_tokens=%d load_mode=%s agent=%s",
        identity.model,
        side.namespace,
        identity.chunk_tokens,
        config.load_mode,
        link.shown(),
    )
    side.switch.start()
    return side


def open_worker_side(
    vllm_config: "VllmConfig",
    config: Config,
    geometry: Geometry,
    link: AgentLink,
    *,
    writer: str,
    recorder: Recorder,
    kv_caches: Mapping[str, torch.Tensor],
    accepted: deque[ChunkKey] | None = None,
) -> WorkerSide:
    """Open the worker's side. Raises ``ConfigError`` for a cache layout that objkv cannot read.
    ``kv_caches``: vLLM's, by layer, never freed here. ``accepted``: see ``WorkerSide``."""
    for device in {cache.device for cache in kv_caches.values()}:
        use_batched_copies(device)
    parallel = vllm_config.parallel_config
    tp_rank, pp_rank = ranks_of_worker(parallel)
    rank = Rank(
        tp_rank,
        writer,
        max(1, vllm_config.max_concurrent_batches),
        writes_early=getattr(vllm_config, "use_v2_model_runner", False),
        pp_rank=pp_rank,
        workers=parallel.world_size * max(1, parallel.data_parallel_size_local),
        step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        quantised=read_quantised(vllm_config, kv_caches),
    )
    return make_worker_side(
        config,
        placed(vllm_config, geometry),
        rank,
        link.connect,
        recorder=recorder,
        kv_caches=kv_caches,
        tracing=open_tracing(),
        accepted=accepted,
    )


def use_batched_copies(device: torch.device) -> None:
    """Let lanes of CUDA and ROCm use vLLM's batched copy if this version has it. Source: vLLM 0.32,
    ``swap_blocks_batch`` in ``_custom_ops.py``."""
    if device.type != "cuda" or driver_of(device).batch_copy is not None:
        return
    from vllm import _custom_ops

    copy = getattr(_custom_ops, "swap_blocks_batch", None)
    if copy is not None and "is_src_access_order_any" in signature(copy).parameters:
        driver_of(device).batch_copy = copy


def make_worker_side(
    config: Config,
    geometry: Geometry,
    rank: Rank,
    connect: Connect,
    *,
    recorder: Recorder,
    kv_caches: Mapping[str, torch.Tensor],
    tracing: Tracing = NO_TRACING,
    accepted: deque[ChunkKey] | None = None,
) -> WorkerSide:
    """Make the worker's side without vLLM's configuration."""
    groups = read_pages(geometry, (rank.tp_rank, rank.pp_rank), kv_caches, rank.quantised)
    pools = plan_pools(config, groups, geometry.chunk_tokens, rank)
    device = _device(groups)
    outbox = Outbox(pools.save_slabs * pools.slab_bytes)
    pin = None if device.type == "cpu" else driver_of(device).pin
    load_slabs, save_slabs = open_slabs(pools, pin, outbox.fd)
    target = AgentSaves(
        lambda fd: connect(outbox=fd),
        outbox,
        save_slabs.memory.numpy(),
        accepted=None if accepted is None else accepted.append,
    )
    saver = Saver(
        target,
        groups,
        save_slabs,
        lane=open_lane(device),
        limits=SaveLimits(pools.save_queue_max, config.save_deadline_ms / 1000, rank.writer),
        recorder=recorder,
    )
    lane, on_device = open_lane(device, urgent=True), None
    if load_slabs is not None:
        pin_frames = driver_of(device).pin_read_only
        on_device = ArenaRegistration(load_slabs, pin_frames, begin=lane.adopt_thread)
    loader = Loader(
        groups,
        lane,
        partial(connect, wants_arena=True),
        verify=config.agent_verify == "reader",
        limits=LoadLimits(
            _LOAD_QUEUE_MAX,
            config.load_deadline_ms / 1000,
            min(config.step_load_deadline_ms, config.load_deadline_ms) / 1000,
        ),
        recorder=recorder,
        tracing=tracing,
        on_device=on_device,
    )
    logger.info("objkv worker ready slabs=%d slab_bytes=%d", pools.save_slabs, pools.slab_bytes)
    return WorkerSide(
        config,
        geometry,
        rank,
        groups,
        loader=loader,
        saver=saver,
        target=target,
        tracing=tracing,
        accepted=accepted,
    )


def _device(groups: Mapping[int, PagedGroup]) -> torch.device:
    """Return the device of the groups. A pipeline stage may have no layer that is shared."""
    return next((group.device for group in groups.values()), torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class Pools:
    """The division of the pinned memory."""

    slab_bytes: int
    load_slabs: int
    """They hold what a device cannot read in an arena."""
    save_slabs: int
    save_queue_max: int
    """How many saves may wait, for the device or for a thread."""


def plan_pools(
    config: Config, groups: Mapping[int, PagedGroup], chunk_tokens: int, rank: Rank
) -> Pools:
    """Divide the pinned memory: a few slabs for loads by a device, the rest for saves, which should
    have slabs for two full steps: one that is being copied, and one that is being handed over.
    Raises ``ConfigError`` if there is not enough for one of each."""
    # Includes room for token ids, which payloads of other replicas may contain.
    each = groups.values()
    slab_bytes = max((payload_bytes_max(g.layers, tokens=chunk_tokens) for g in each), default=0)
    if slab_bytes > RAW_BYTES_MAX:
        raise ConfigError(
            f"a chunk of {chunk_tokens} tokens has {slab_bytes} bytes, and objkv stores at most "
            f"{RAW_BYTES_MAX} in one payload: lower chunk_tokens"
        )
    bounce = 0
    if _device(groups).type != "cpu":
        bounce = _BOUNCE_SLABS
        slab_bytes = max(slab_bytes, *map(row_bytes_max, groups.values()))
    # One page more, because the header is a few bytes longer for another block size.
    slab_bytes = -(-slab_bytes // _PAGE) * _PAGE + _PAGE
    # In each group a step may also complete a chunk that an earlier step began.
    two_steps = 2 * len(groups) * (rank.step_tokens // chunk_tokens + 1)
    queue_max = max(_SAVE_QUEUE_MIN, two_steps)
    share = host_bytes() // _PINNED_SHARE // rank.workers
    budget = (config.pinned_bytes_max or max(share, 4 * slab_bytes)) // slab_bytes
    bounce = min(bounce, max(1, budget // 4))  # a device never gets pageable memory
    save = budget - bounce
    if config.pinned_bytes_max:
        queue_max = max(queue_max, save)
    else:
        save = min(save, queue_max + 1)
    if save < 1:
        raise ConfigError(
            f"pinned_bytes_max={config.pinned_bytes_max} is less than {1 + bounce} slabs of "
            f"{slab_bytes} bytes, one chunk each: raise it, or lower chunk_tokens"
        )
    if save < two_steps:
        logger.warning(
            "pinned memory for fewer than two full steps, so saves of long prompts may be dropped: "
            "raise pinned_bytes_max slabs=%d expected=%d slab_bytes=%d",
            save,
            two_steps,
            slab_bytes,
        )
    return Pools(slab_bytes, bounce, save, queue_max)


def open_slabs(pools: Pools, pin: Pin | None, fd: int = -1) -> tuple[SlabPool | None, SlabPool]:
    """Allocate the slabs of loads, if there are any, and of saves. Raises ``ConfigError`` if memory
    is short, or may not be page-locked. ``fd``: an outbox, which is the slabs of saves."""
    opened = partial(SlabPool, slab_bytes=pools.slab_bytes, pin=pin)
    try:
        load = opened("load", count=pools.load_slabs) if pools.load_slabs else None
        return load, opened("save", count=pools.save_slabs, fd=fd)
    except (OSError, RuntimeError, MemoryError) as exc:
        nbytes = pools.slab_bytes * (pools.load_slabs + pools.save_slabs)
        raise ConfigError(
            f"no {nbytes} bytes of {'' if pin is None else 'pinned '}memory for loads and saves "
            f"({exc}): lower pinned_bytes_max"
        ) from exc


def read_pages(
    geometry: Geometry,
    ranks: tuple[int, int],
    kv_caches: Mapping[str, torch.Tensor],
    quantised: Mapping[str, Quantised] = NOT_QUANTISED,
) -> dict[int, PagedGroup]:
    """Return the groups that have layers on this rank, and check their layout, which writes to free
    blocks and restores them. Raises ``ConfigError``. ``ranks``: TP rank and PP rank."""
    groups = {}
    for g in range(len(geometry.groups)):
        shape = geometry.shape(g, *ranks)
        if shape is None:
            continue  # this pipeline stage has no layer of the group
        if missing := [name for name in shape.layers if name not in kv_caches]:
            raise ConfigError(
                f"vLLM registered no KV cache for {missing[0]}: run the model without the objkv "
                "connector"
            )
        caches = [kv_caches[name] for name in shape.layers]
        if (page := geometry.groups[g].page) is not None:  # some kernels divide each block
            parts = max(1, page // (caches[0][0].numel() * caches[0].element_size()))
            shape = replace(shape, block_size=int(caches[0].shape[2]) * parts)
        number = geometry.number(g)
        groups[number] = PagedGroup(shape, caches, quantised)
        check_pages(groups[number], open_lane(groups[number].device))
    return groups
