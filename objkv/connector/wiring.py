"""What every connector reads from its settings and from vLLM's. Imports no vLLM."""

import os
import socket
from typing import TYPE_CHECKING

from objkv.assembly.link import Replica
from objkv.config import Config
from objkv.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig


def writer_name(connector: object) -> str:
    """Return a connector's name for leases and payloads."""
    return f"{socket.gethostname()}:{os.getpid()}:{id(connector):x}"


def replica_of(vllm_config: "VllmConfig") -> Replica:
    """Return what an agent of this replica alone needs to know."""
    parallel = vllm_config.parallel_config
    transfer = vllm_config.kv_transfer_config or vllm_config.ec_transfer_config
    assert transfer is not None
    workers = parallel.world_size // count_nodes(parallel)
    return Replica(str(transfer.engine_id), min(1.0, workers / max(1, _count_gpus())))


def count_nodes(parallel: "ParallelConfig") -> int:
    """Return on how many nodes the ranks of a replica are. Ray places them where it likes, at least
    on as many as have a device for each. Source: vLLM 0.31-0.33, ``config/parallel.py``."""
    if parallel.world_size == 1:
        return 1
    if parallel.use_ray:
        return -(-int(parallel.world_size) // max(1, _count_gpus()))
    return int(parallel.nnodes_within_dp)


def _count_gpus() -> int:
    """Return how many devices this machine or container has, 0 if that is not known."""
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return 0


def may_save(config: Config, *, producer: bool, consumer: bool) -> bool:
    """Whether this replica saves. ``producer``, ``consumer``: whether its role in vLLM includes
    saving and loading. Raises ``ConfigError`` if it would do neither."""
    if config.role != "reader":
        return producer
    if producer and not consumer:
        raise ConfigError(
            "role is reader, but vLLM's role of this replica is a producer, which only saves: set "
            "role to writer, or give the replica a vLLM role that loads"
        )
    return False
