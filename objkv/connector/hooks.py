"""The methods that objkv patches in vLLM, and its changes to blocks. EngineCore executes calls that
change weights or adapters between steps, on the scheduler's thread. It informs a connector only if
it also drops its own prefix cache, as ``sleep`` and a pause do. After a weight update without a
pause (``collective_rpc("reload_weights")``, ``update_weights``, or any function sent to the
workers) KV of the old weights would still be loaded. The wrappers never raise into vLLM."""

import functools
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

from vllm.v1.request import RequestStatus

from objkv.connector.guard import guarded

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

    from objkv.connector.encoder.scheduler import EncoderSchedulerSide
    from objkv.connector.kv.connector import ObjKVConnector
    from objkv.connector.kv.scheduler import SchedulerSide
    from objkv.connector.model.weights import Adapters

logger = logging.getLogger(__name__)

_CORE = "vllm.v1.engine.core", "EngineCore"
_WORKER = "vllm.v1.worker.gpu_worker", "Worker"
PATCHED = {
    "collective_rpc": _CORE,
    "add_lora": _CORE,
    "remove_lora": _CORE,
    "reset_encoder_cache": _CORE,
    "sleep": _WORKER,
    "wake_up": _WORKER,
    "discard": _WORKER,
}
"""Module and class of each patched method. Read against vLLM 0.31-0.33."""
_followers: dict[str, WeakSet[Any]] = {name: WeakSet() for name in PATCHED}


def evict_failed(
    manager: "KVCacheManager",
    request_ids: Iterable[str],
    ended: Iterable[Sequence[int]],
    failed: set[int],
) -> None:
    """Evict each request's first failed block and all later ones from vLLM's prefix cache. For
    single-group models. vLLM hashes blocks that a load within a step will fill, and blocks computed
    after them, before the failure is known, and keeps the hashes with ``recompute``. After a
    preemption or an abort at this moment, the next request with that prefix would hit them.
    ``ended``: blocks of requests that ended in the failed step, as aborted ones do before its
    output is processed. Source: vLLM 0.31-0.33, ``_handle_invalid_blocks`` in
    ``v1/core/sched/scheduler.py``."""
    evicted = set(failed)
    tables = [manager.get_block_ids(request_id)[0] for request_id in request_ids]
    for table in (*tables, *ended):
        first = next((i for i, block in enumerate(table) if block in failed), len(table))
        evicted.update(table[first:])
    evicted.discard(0)
    manager.evict_blocks(evicted)


def free_failed(manager: "KVCacheManager", requests: Iterable["Request"]) -> None:
    """Free the blocks of requests whose whole load failed, and ended on all workers. vLLM frees
    them too, but only when it schedules each request again. The first may need more blocks than are
    free, because it computes tokens whose load a window could skip, and would wait for ever for
    those behind it. Freeing twice is harmless. Source: vLLM 0.31-0.33, ``schedule`` and
    ``_update_waiting_for_remote_kv`` in ``v1/core/sched/scheduler.py``."""
    for request in requests:
        # vLLM itself frees aborted requests, and requests that the failed load has ended.
        waits = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        if waits and request.num_computed_tokens == 0:
            manager.free(request)


def engine_of(vllm_config: "VllmConfig | None") -> object:
    """Return what identifies an engine: the cache's configuration, which inner connectors share."""
    return None if vllm_config is None else vllm_config.cache_config


def release_worker(vllm_config: "VllmConfig") -> None:
    """Have vLLM forget this process's worker connector if it was made for ``vllm_config``, whose
    engine fails to start. vLLM would give it to the next engine. Source: vLLM 0.31-0.33,
    ``ensure_kv_transfer_initialized`` in ``distributed/kv_transfer/kv_transfer_state.py``."""
    from vllm.distributed.kv_transfer import kv_transfer_state as state

    if not state.has_kv_transfer_group():
        return
    made_for = getattr(state.get_kv_transfer_group(), "_vllm_config", None)
    if made_for is not None and engine_of(made_for) is engine_of(vllm_config):
        state.ensure_kv_transfer_shutdown()


def holds_nothing(manager: "KVCacheManager | None") -> bool:
    """Whether no request has a block, so that vLLM could drop its whole prefix cache."""
    return manager is not None and manager.usage == 0


def holds_no_prefix(manager: "KVCacheManager | None") -> bool:
    """Whether vLLM's own prefix cache is empty and stays empty, because no request has a block that
    could still enter it. Source: vLLM 0.31-0.33, ``BlockPool`` in ``v1/core/block_pool.py``."""
    if manager is None or manager.usage != 0:
        return False
    return len(manager.block_pool.cached_block_hash_to_block) == 0


@guarded(None)
def reopen(side: "SchedulerSide", manager: "KVCacheManager | None") -> None:
    """Resume if vLLM has dropped its blocks of old weights. Connectors may not hear of that."""
    if not side.open and holds_no_prefix(manager):
        side.reset(clean=True)


_CHANGES = re.compile(r"weight|param|apply_model|load_|checkpoint|state_dict|refit", re.IGNORECASE)
"""Names of calls on all workers that may change weights: vLLM's own calls, and those of training
frameworks (``update_weights_from_ipc``, ``load_weights``)."""
KEEPS_WEIGHTS = "objkv_keeps_weights"
"""An attribute of functions that do not change weights."""
_CHANGES_NOTHING = frozenset(
    {
        "compute_weight_checksums",
        "get_weight_version",
        "init_weight_transfer_engine",
        "shutdown_weight_transfer_engine",
        "start_draft_weight_update",
    }
)


class Listener(Protocol):
    """A scheduler's side that is informed of changes of weights and adapters."""

    @property
    def adapters(self) -> "Adapters | None":
        """The adapters in use. None if they do not matter."""

    def reset(self, *, clean: bool) -> bool:
        """Stop using everything stored so far."""


class EngineHooks:
    """Forwards changes that vLLM does not report to connectors to a connector's scheduler side."""

    def __init__(
        self,
        side: Listener,
        manager: Callable[[], "KVCacheManager | None"],
        *,
        patches: bool = True,
    ) -> None:
        """``manager``: returns vLLM's manager, or None until the connector is bound to it.
        ``patches``: whether vLLM's classes may be wrapped."""
        self._side = side
        self._manager = manager
        wrapped = patches and [
            wrap("collective_rpc", self, after=EngineHooks.workers_called),
            wrap("add_lora", self, before=EngineHooks.adapter_loaded),
            wrap("remove_lora", self, after=EngineHooks.adapter_unloaded),
        ]
        if not wrapped or not all(wrapped):
            logger.warning(
                "weights that change in place are not noticed in this version of vLLM, or with "
                "these settings: call reset_prefix_cache(reset_connector=True) after each change"
            )

    def workers_called(
        self, method: Any = None, _timeout: Any = None, args: Any = (), *_args: Any, **_more: Any
    ) -> None:
        """Stop using everything stored so far if a call may have changed weights. Blocks that vLLM
        keeps are of the old weights, so nothing is loaded or saved while it has any."""
        if not may_change_weights(method, args):
            return
        how = method if isinstance(method, str) else getattr(method, "__qualname__", type(method))
        logger.warning("weights may have changed in place by=%s", how)
        self._side.reset(clean=holds_no_prefix(self._manager()))

    def adapter_loaded(self, lora_request: Any, **_more: Any) -> None:
        """Forward that vLLM is about to read an adapter's files."""
        if self._side.adapters is not None:
            self._side.adapters.loaded(lora_request)

    def adapter_unloaded(self, lora_id: int, **_more: Any) -> None:
        """Forward that vLLM has unloaded an adapter."""
        if self._side.adapters is not None:
            self._side.adapters.unloaded(lora_id)


def follow_sleep(sleeper: "ObjKVConnector", *, patches: bool = True) -> None:
    """Call a worker's connector before its cache is unmapped and after it is mapped again."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    def discards(sleeper: "ObjKVConnector", tags: Iterable[str] = (), **_more: Any) -> None:
        if "kv_cache" in tags:
            sleeper.unregister_kv_caches()

    def wakes(sleeper: "ObjKVConnector", tags: Iterable[str] | None = None, **_more: Any) -> None:
        if tags is None or "kv_cache" in tags:
            sleeper.restore_kv_caches()

    if not patches or hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
        return
    wrap("sleep", sleeper, before=lambda one, *_, **__: one.unregister_kv_caches())
    wrap("discard", sleeper, before=discards)
    wrap("wake_up", sleeper, after=wakes)


def follow_encoder_resets(side: "EncoderSchedulerSide", *, patches: bool = True) -> None:
    """Call a side when vLLM drops its own encoder outputs, as it does after weights changed."""
    if patches:
        wrap("reset_encoder_cache", side, after=lambda one, *_, **__: one.outputs_dropped())


def may_change_weights(method: Any, args: Any = ()) -> bool:
    """Whether a call on all workers may change the model's weights. ``method``: a name, a function,
    which is taken for a change unless its ``objkv_keeps_weights`` is True, or a pickled one.
    ``args``: ``apply_model`` has one, such a function. Source: vLLM 0.31-0.33, ``run_method`` in
    ``v1/serial_utils.py`` and ``apply_model`` in ``v1/engine/llm_engine.py``."""
    if method == "apply_model" and isinstance(args, tuple | list) and len(args) == 1:
        (method,) = args
        if isinstance(method, str):
            return True
    if not isinstance(method, str):
        return getattr(method, KEEPS_WEIGHTS, False) is not True
    return method not in _CHANGES_NOTHING and _CHANGES.search(method) is not None


def wrap(
    name: str,
    follower: object,
    *,
    before: Callable[..., Any] | None = None,
    after: Callable[..., Any] | None = None,
) -> bool:
    """Wrap a method in ``PATCHED``, once per class, so that ``before`` and ``after``, the same of
    all its followers, are called with each follower and the method's arguments, even if it raises.
    Keeps no follower alive. Returns False if this version of vLLM lacks the method."""
    _followers[name].add(follower)
    module, owner_name = PATCHED[name]
    owner = getattr(import_module(module), owner_name)
    original = owner.__dict__.get(name)
    if original is None:
        return False
    if hasattr(original, "wrapped_by_objkv"):
        return True

    def notify(act: Callable[..., Any] | None, /, *args: Any, **kwargs: Any) -> None:
        if act is not None:
            for one in list(_followers[name]):
                guarded(None)(act)(one, *args, **kwargs)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        notify(before, *args, **kwargs)
        try:
            return original(self, *args, **kwargs)
        finally:  # a change that failed half-way is still a change
            notify(after, *args, **kwargs)

    call.wrapped_by_objkv = True  # type: ignore[attr-defined]
    setattr(owner, name, call)
    return True
