"""Blocks that a load failed to fill leave vLLM's own prefix cache, or are given back.

vLLM hashes blocks that a load within a step is to fill, and those computed after them, before it
knows of the failure, and with ``recompute`` leaves the hashes to the request that computes them
again in the next step. A preemption or an abort right there would leave them to whoever asks next.
Source: vLLM 0.31-0.33, ``v1/core/sched/scheduler.py``, ``_handle_invalid_blocks``; aborts that came
during a step are carried out before its output is looked at, ``v1/engine/core.py``, ``step``.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


def evict_failed(
    manager: "KVCacheManager",
    request_ids: Iterable[str],
    ended: Iterable[Sequence[int]],
    failed: set[int],
) -> set[int]:
    """Forget, of each request, the first failed block and all after it; single-group models.

    ``ended``: blocks of those that ended in the step that failed. The others' blocks stay with
    their requests. Returns what was evicted.
    """
    evicted = set(failed)
    tables = [manager.get_block_ids(request_id)[0] for request_id in request_ids]
    for table in (*tables, *ended):
        first = next((i for i, block in enumerate(table) if block in failed), len(table))
        evicted.update(table[first:])
    evicted.discard(0)
    manager.evict_blocks(evicted)
    return evicted


def free_failed(manager: "KVCacheManager", requests: Iterable["Request"]) -> None:
    """Give the blocks of requests back whose whole load failed, and ended on all workers.

    vLLM does so itself, but one request after the other as each comes to be scheduled again: if the
    first then needs more blocks than are free, as one does that computes what a window need not
    have loaded, it waits for ever for those behind it. Source: vLLM 0.31-0.33, ``schedule`` and
    ``_update_waiting_for_remote_kv`` in ``v1/core/sched/scheduler.py``; freeing twice is harmless.
    """
    for request in requests:
        # Not of one that was aborted, nor where its load's failure is its end: vLLM frees those.
        waits = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        if waits and request.num_computed_tokens == 0:
            manager.free(request)


def holds_nothing(manager: "KVCacheManager | None") -> bool:
    """Whether no request holds a block, so that vLLM can have dropped its whole prefix cache."""
    return manager is not None and manager.usage == 0


def holds_no_prefix(manager: "KVCacheManager | None") -> bool:
    """Whether vLLM's own prefix cache is empty and stays so: no request holds a block that could
    still get in. Source: vLLM 0.31-0.33, ``BlockPool`` in ``v1/core/block_pool.py``."""
    if manager is None or manager.usage != 0:
        return False
    return len(manager.block_pool.cached_block_hash_to_block) == 0
