"""How the pinned memory is divided: loads, saves, and payloads of other shapes.

Neither loads nor saves can starve the other. What replicas of other shapes wrote may be larger than
any payload of this rank; slabs for those are made when the first of them is loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from objkv.codec.payload import payload_bytes_max
from objkv.config import Config
from objkv.errors import ConfigError
from objkv.transfer.paging import PagedGroup
from objkv.transfer.slabs import WideSlabs
from objkv.transfer.sources import whole_payload_bytes_max
from objkv.transfer.taskqueue import Task

_PAGE = 4096
_WIDE_SHARE = 4
"""Payloads of other shapes may take as much again as this part of the pinned memory, or one pair of
slabs if that is more."""


@dataclass(frozen=True, slots=True)
class Pools:
    """How the pinned memory is divided."""

    slab_bytes: int
    load_slabs: int
    save_slabs: int
    load_threads: int


def plan_pools(config: Config, groups: Mapping[int, PagedGroup], chunk_tokens: int) -> Pools:
    """Half for loads, two slabs a thread (payload and decoded pages); the rest for saves, so that
    neither can starve the other. Raises ``ConfigError`` if there is no room for one of each."""
    # With room for token ids, which payloads of other replicas may carry.
    slab_bytes = max(payload_bytes_max(g.layers, tokens=chunk_tokens) for g in groups.values())
    # A page more: of another block size the header is a few bytes longer.
    slab_bytes = -(-slab_bytes // _PAGE) * _PAGE + _PAGE
    budget = config.pinned_bytes_max // slab_bytes
    load = min(2 * config.load_threads, budget // 2 // 2 * 2)
    save = min(config.save_queue_max + config.save_threads, budget - load)
    if load < 2 or save < 1:
        raise ConfigError(
            f"pinned_bytes_max={config.pinned_bytes_max} has no room for 4 slabs of {slab_bytes} "
            "bytes, one chunk each: raise it, or lower chunk_tokens"
        )
    return Pools(slab_bytes, load, save, load // 2)


def plan_wide(
    config: Config, groups: Mapping[int, PagedGroup], chunk_tokens: int, *, pinned: bool
) -> WideSlabs[Task]:
    """Slabs that hold any payload of the model, in pairs; memory is taken when they are needed."""
    largest = max(whole_payload_bytes_max(g, tokens=chunk_tokens) for g in groups.values())
    slab_bytes = -(-largest // _PAGE) * _PAGE + _PAGE
    pairs = config.pinned_bytes_max // _WIDE_SHARE // (2 * slab_bytes)
    return WideSlabs(
        pairs=min(max(1, pairs), config.load_threads), slab_bytes=slab_bytes, pinned=pinned
    )
