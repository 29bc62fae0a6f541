"""Makes the scheduler's and the worker's side from vLLM's configuration, settings and backends."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, cast

import torch

from objkv.agent.client import Connect
from objkv.agent.outbox import AgentSaves, Outbox
from objkv.assembly.link import AgentLink
from objkv.cache.admission import AdmissionPolicy
from objkv.cache.lookup import LookupLimits, LookupService
from objkv.cache.switch import AdmissionSwitch
from objkv.codec.payload import payload_bytes_max
from objkv.config import Config
from objkv.config.node import host_bytes
from objkv.connector.kv.coverage import open_coverage
from objkv.connector.kv.request_limits import Prefetch
from objkv.connector.kv.requests import RequestTracker
from objkv.connector.kv.scheduler import Roles, SchedulerSide
from objkv.connector.kv.timing import Timing
from objkv.connector.kv.worker import Rank, Transfers, WorkerSide
from objkv.connector.model.groups import Geometry
from objkv.connector.model.identity import (
    copies_are_synchronous,
    names_media,
    pipeline_rank,
    read_identity,
    safe_load_mode,
    tensor_rank,
)
from objkv.connector.model.media import read_quantised
from objkv.connector.model.weights import open_digests
from objkv.connector.namespace import ReplicaNamespace
from objkv.connector.wiring import locality, may_save
from objkv.errors import ConfigError
from objkv.index.base import WriteIndex
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import Identity
from objkv.stores.base import WriteStore
from objkv.telemetry import Recorder
from objkv.tracing import NO_TRACING, Tracing, open_tracing
from objkv.transfer.devices import driver_of, open_lane
from objkv.transfer.lanes import Lane
from objkv.transfer.loading.arena_lane import ArenaLane
from objkv.transfer.loading.loader import Loader
from objkv.transfer.loading.loads import LoadLimits
from objkv.transfer.paging import NOT_QUANTISED, PagedGroup, Quantised, check_pages
from objkv.transfer.registration import DeviceFrames
from objkv.transfer.saver import SaveLimits, Saver
from objkv.transfer.slabs import Pin, SlabPool
from objkv.transfer.sources import frame_bytes_max

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)
_LOOKUP_AGE_MIN_S = 10.0
"""Steps may take seconds, and a lookup's answer must stay valid for several of them."""
_PAGE = 4096
_PINNED_SHARE = 8
"""Divisor: by default all workers of a host take at most this fraction of its memory."""
_PINNED_BYTES = 1 << 30
"""The default limit is at least this, if the host has the memory: payloads of other shapes take a
share of the limit."""
_BOUNCE_SLABS = 4
"""Slabs for what a device cannot read in an agent's memory: while some are read, others are
filled."""


def open_scheduler_side(
    vllm_config: "VllmConfig",
    config: Config,
    geometry: Geometry,
    link: AgentLink,
    recorder: Recorder,
) -> SchedulerSide:
    """Open the scheduler's side. Reads the model's files. Raises ``ConfigError`` for unsupported
    models. ``link``: the way to its agent."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    if config.load_failure == "recompute":
        # vLLM reads this after it has made the connector. Its default fails the request. In
        # objkv a payload that cannot be loaded is an ordinary miss.
        transfer.kv_load_failure_policy = "recompute"
    identity = read_identity(vllm_config, geometry, config)
    saves = may_save(config, producer=transfer.is_kv_producer, consumer=transfer.is_kv_consumer)
    roles = Roles(
        loads=transfer.is_kv_consumer,
        saves=saves,
        copies_are_synchronous=copies_are_synchronous(),
        steps_in_flight=max(1, vllm_config.max_concurrent_batches),
        has_peers=vllm_config.parallel_config.data_parallel_size > 1,
        media_named=names_media(vllm_config),
    )
    side = make_scheduler_side(
        safe_load_mode(vllm_config, geometry, config),
        roles,
        geometry,
        identity,
        # These have the verbs that replicas use; the rest is for operators.
        bulk=cast("WriteStore", link.calls),
        index=cast("WriteIndex", link.calls),
        recorder=recorder,
        tracing=open_tracing(),
        prefetch=link.calls.prefetch,
    )
    side.switch.start()
    return side


def make_scheduler_side(
    config: Config,
    roles: Roles,
    geometry: Geometry,
    identity: Identity,
    *,
    bulk: WriteStore,
    index: WriteIndex,
    recorder: Recorder,
    tracing: Tracing = NO_TRACING,
    prefetch: Prefetch | None = None,
) -> SchedulerSide:
    """Make the scheduler's side without vLLM's configuration, and store the identity document. An
    operator's switch is read once it is started."""
    shapes, coverage = open_coverage(config, geometry, index, writes=roles.saves)
    limits = LookupLimits(
        config.lookup_deadline_ms / 1000,
        config.lookup_queue_max,
        age_max_s=max(config.lookup_ttl_ms / 1000, _LOOKUP_AGE_MIN_S),
    )
    fields = sorted(geometry.all_fields())
    lookups = LookupService(shapes, fields, recorder, limits, tracing=tracing)
    namespace = ReplicaNamespace(identity, bulk, lookups.submit, writes=roles.saves)
    namespace.announce()
    switch = AdmissionSwitch(config.admission, bulk, namespace, recorder, lookups.submit)
    side = SchedulerSide(
        config,
        roles,
        geometry,
        index=index,
        lookups=lookups,
        requests=RequestTracker(
            geometry,
            lookups,
            recorder,
            open_digests(),
            coverage,
            locality=locality(config),
            prefetch=prefetch,
        ),
        timing=Timing(
            AdmissionPolicy(lambda: switch.mode, recorder),
            geometry,
            steps_in_flight=roles.steps_in_flight,
            coverage=coverage,
        ),
        namespace=namespace,
        switch=switch,
        recorder=recorder,
        tracing=tracing,
    )
    public = config.public()
    logger.info(
        "objkv ready model=%s namespace=%s chunk_tokens=%d load_mode=%s bulk=%s index=%s",
        identity.model,
        namespace.name,
        identity.chunk_tokens,
        config.load_mode,
        public["bulk_url"],
        public["index_url"],
    )
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
    accepted: Callable[[ChunkKey], object] | None = None,
) -> WorkerSide:
    """Open the worker's side. Raises ``ConfigError`` for a cache layout that objkv cannot read.

    ``kv_caches``: vLLM's paged cache by layer, never freed or resized here. ``accepted``: called
    for each payload that the agent saves.
    """
    for device in {cache.device for cache in kv_caches.values()}:
        use_batched_copies(device)
    rank = Rank(
        tensor_rank(vllm_config),
        writer,
        max(1, vllm_config.max_concurrent_batches),
        writes_early=getattr(vllm_config, "use_v2_model_runner", False),
        pp_rank=pipeline_rank(vllm_config),
        workers=_workers_here(vllm_config),
        step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        quantised=read_quantised(vllm_config, kv_caches),
    )
    return make_worker_side(
        config,
        geometry,
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
    accepted: Callable[[ChunkKey], object] | None = None,
) -> WorkerSide:
    """Make the worker's side without vLLM's configuration."""
    groups = read_pages(geometry, (rank.tp_rank, rank.pp_rank), kv_caches, rank.quantised)
    pools = plan_pools(config, groups, geometry.chunk_tokens, rank)
    host = _Host(groups, pools, rank, recorder, tracing)
    transfers = _open_transfers(config, host, connect, accepted)
    logger.info("objkv worker ready loader=%r saver=%r", transfers.loader, transfers.saver)
    return WorkerSide(config, geometry, rank, groups, transfers=transfers, tracing=tracing)


def _device(groups: Mapping[int, PagedGroup]) -> torch.device:
    """Return the device of the groups. A pipeline stage may have no layer that is shared."""
    return next((group.device for group in groups.values()), torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class _Host:
    """The common parts of a worker's loads and saves."""

    groups: Mapping[int, PagedGroup]
    pools: "Pools"
    rank: Rank
    recorder: Recorder
    tracing: Tracing

    @property
    def device(self) -> torch.device:
        """The device of the paged cache."""
        return _device(self.groups)

    def loader(self, config: Config, connect: Connect, slabs: SlabPool | None) -> Loader:
        """Return the loader. ``slabs``: for a device, see ``DeviceFrames``."""
        lane: Lane = ArenaLane()
        on_device = None
        if slabs is not None:
            lane = open_lane(self.device, urgent=True)
            pin = driver_of(self.device).pin_read_only
            on_device = DeviceFrames(slabs, pin, begin=lane.adopt_thread)
        limits = LoadLimits(
            config.load_queue_max,
            config.load_deadline_ms / 1000,
            min(config.step_load_deadline_ms, config.load_deadline_ms) / 1000,
        )
        return Loader(
            self.groups,
            lane,
            partial(connect, wants_arena=True),
            verify=config.agent_verify == "reader",
            limits=limits,
            recorder=self.recorder,
            tracing=self.tracing,
            on_device=on_device,
        )

    def saver(self, config: Config, target: AgentSaves, slabs: SlabPool) -> Saver:
        """Return the saver over ``slabs``."""
        limits = SaveLimits(
            self.pools.save_queue_max, config.save_deadline_ms / 1000, self.rank.writer
        )
        return Saver(
            target,
            self.groups,
            slabs,
            lane=open_lane(self.device),
            limits=limits,
            recorder=self.recorder,
        )


def _open_transfers(
    config: Config,
    host: _Host,
    connect: Connect,
    accepted: Callable[[ChunkKey], object] | None,
) -> Transfers:
    """Return loads and saves by the agent. Raises ``ConfigError``."""
    outbox = Outbox(host.pools.save_slabs * host.pools.slab_bytes)
    pin = None if host.device.type == "cpu" else driver_of(host.device).pin
    slabs = open_slabs(host.pools, pin, outbox.fd)
    memory = slabs["save"].memory.numpy()
    target = AgentSaves(lambda fd: connect(outbox=fd), outbox, memory, accepted=accepted)
    loader = host.loader(config, connect, slabs.get("load"))
    return Transfers(loader, host.saver(config, target, slabs["save"]), target)


@dataclass(frozen=True, slots=True)
class Pools:
    """The division of the pinned memory."""

    slab_bytes: int
    load_slabs: int
    """They hold what a device cannot read in an arena."""
    save_slabs: int
    save_queue_max: int
    """How many saves may wait, for the device or for a thread."""
    nbytes_max: int
    """Limit for all of it."""


def plan_pools(
    config: Config,
    groups: Mapping[int, PagedGroup],
    chunk_tokens: int,
    rank: Rank,
) -> Pools:
    """Divide the pinned memory: a few slabs for loads by a device, the rest for saves, which should
    have slabs for two full steps: one that is being copied, and one that is being handed over.
    Raises ``ConfigError`` if there is not enough for one of each."""
    # Includes room for token ids, which payloads of other replicas may contain.
    each = groups.values()
    slab_bytes = max((payload_bytes_max(g.layers, tokens=chunk_tokens) for g in each), default=0)
    bounce = 0
    if _device(groups).type != "cpu":
        bounce = _BOUNCE_SLABS
        slab_bytes = max(slab_bytes, *map(frame_bytes_max, groups.values()))
    # One page more, because the header is a few bytes longer for another block size.
    slab_bytes = -(-slab_bytes // _PAGE) * _PAGE + _PAGE
    # In each group a step may also complete a chunk that an earlier step began.
    two_steps = 2 * len(groups) * (rank.step_tokens // chunk_tokens + 1)
    queue_max = max(config.save_queue_max, two_steps)
    save_max = queue_max + 1
    nbytes = config.pinned_bytes_max
    if not nbytes:
        share = host_bytes() // _PINNED_SHARE // rank.workers
        expected = max(slab_bytes * (bounce + save_max), _PINNED_BYTES)
        nbytes = min(expected, max(share, 4 * slab_bytes))
    budget = nbytes // slab_bytes
    bounce = min(bounce, budget // 4)
    save = min(save_max, budget - bounce)
    if save < 1:
        raise ConfigError(
            f"pinned_bytes_max={config.pinned_bytes_max} is less than 4 slabs of {slab_bytes} "
            "bytes, one chunk each: raise it, or lower chunk_tokens"
        )
    if save < two_steps:
        logger.warning(
            "pinned memory for fewer than two full steps, so saves of long prompts may be dropped: "
            "raise pinned_bytes_max slabs=%d expected=%d slab_bytes=%d",
            save,
            two_steps,
            slab_bytes,
        )
    return Pools(slab_bytes, bounce, save, queue_max, nbytes)


def open_slabs(pools: Pools, pin: Pin | None, fd: int = -1) -> dict[str, SlabPool]:
    """Allocate the slabs of loads, if there are any, and of saves. Raises ``ConfigError`` if memory
    is short, or may not be page-locked. ``fd``: an outbox, which is the slabs of saves."""
    counts = {"load": (pools.load_slabs, -1), "save": (pools.save_slabs, fd)}
    try:
        return {
            name: SlabPool(name, count=count, slab_bytes=pools.slab_bytes, pin=pin, fd=memory)
            for name, (count, memory) in counts.items()
            if count
        }
    except (OSError, RuntimeError, MemoryError) as exc:
        nbytes = pools.slab_bytes * (pools.load_slabs + pools.save_slabs)
        raise ConfigError(
            f"no {nbytes} bytes of {'' if pin is None else 'pinned '}memory for loads and saves "
            f"({exc}): lower pinned_bytes_max"
        ) from exc


def _workers_here(vllm_config: "VllmConfig") -> int:
    """Return how many workers this host may have, those of data-parallel replicas included."""
    parallel = vllm_config.parallel_config
    return int(parallel.world_size * max(1, parallel.data_parallel_size_local))


def _states(page: int, cache: torch.Tensor) -> int:
    """Return how many states a block of ``page`` bytes has. Some kernels divide each block."""
    nbytes = cache[0].numel() * cache.element_size()
    return int(cache.shape[2]) * max(1, page // nbytes)


def read_pages(
    geometry: Geometry,
    ranks: tuple[int, int],
    kv_caches: Mapping[str, torch.Tensor],
    quantised: Mapping[str, Quantised] = NOT_QUANTISED,
) -> dict[int, PagedGroup]:
    """Return the groups that have layers on this rank, and check their layout.

    The check writes to free blocks and restores their contents. Raises ``ConfigError`` for a layout
    that objkv cannot use. ``ranks``: TP rank and PP rank.
    """
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
        if (page := geometry.groups[g].page) is not None:
            shape = replace(shape, block_size=_states(page, caches[0]))
        number = geometry.number(g)
        groups[number] = PagedGroup(shape, caches, quantised)
        check_pages(groups[number], open_lane(groups[number].device))
    return groups
