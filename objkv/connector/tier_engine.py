"""Finds the engine that a tier is made for, because vLLM does not hand its configuration to tiers.

A tier is given what concerns the rows, not what else changes the KV in them: overrides of the
model's configuration, quantization, adapters. No name that an operator has to remember would keep
two replicas reliably apart. But a tier is made while vLLM's connector is, so the configuration is a
local variable of a caller, and it is recognised by the very object that both were given as
``kv_connector_extra_config``; searching all objects of the process would take seconds. Where it is
not found the tier does not start (``engine_unseen``).
Source: vLLM 0.32-0.33, ``OffloadingConnectorScheduler.__init__`` in
``distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py``, ``build_offloading_config``.
"""

import sys
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig

from objkv.connector.translate import further_settings, names_media
from objkv.errors import ConfigError

if TYPE_CHECKING:
    from types import FrameType

    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_offload.base import OffloadingSpec

_DEPTH_MAX = 100
"""Callers looked at; vLLM 0.32 has it in the sixth."""


@dataclass(frozen=True, slots=True)
class TierEngine:
    """What a tier's callers had."""

    config: VllmConfig
    connector: "weakref.ref[KVConnectorBase_V1] | None" = None
    """vLLM's, if it was seen; it holds the tier, not the tier it."""

    def manager(self) -> "KVCacheManager | None":
        """vLLM's, once the connector was bound to it."""
        connector = None if self.connector is None else self.connector()
        return getattr(connector, "_kv_cache_manager", None)


def find_engine(spec: "OffloadingSpec") -> TierEngine | None:
    """The engine whose connector is being made with ``spec`` further up this thread's stack, also
    one of several connectors; None if there is none."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    extra = spec.config.extra_config
    config: VllmConfig | None = None
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_DEPTH_MAX):
        if frame is None:
            break
        there = frame.f_locals
        found = there.get("vllm_config")
        if _is_of(found, extra):
            config = config or found
            if isinstance(maker := there.get("self"), KVConnectorBase_V1):
                return TierEngine(config, weakref.ref(maker))
        elif config is not None:
            break  # above whoever was given it
        frame = frame.f_back
    return None if config is None else TierEngine(config)


def engine_settings(engine: TierEngine) -> tuple[tuple[str, str], ...]:
    """What the engine was told that changes KV and that a tier is not told, as sorted text."""
    found = dict(further_settings(engine.config))
    found["quantization"] = str(engine.config.model_config.quantization)
    return tuple(sorted(found.items()))


def refuse_unshareable(engine: TierEngine, named: frozenset[str]) -> None:
    """Raises ``ConfigError``, with what to do, for engines whose keys do not say all that a chunk
    depends on. ``named``: what the operator answers for, by names in ``settings``."""
    told = engine.config
    parallel, speculative = told.parallel_config, told.speculative_config
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        raise ConfigError(
            "objkv's secondary tier does not support external_launcher with several ranks, each of "
            "which would schedule, save and load by itself: use the executor 'mp' or 'ray'"
        )
    if not names_media(told):
        raise ConfigError(
            "objkv's secondary tier cannot tell one image from another, because vLLM only numbers "
            "them here: turn prefix caching on, or set --mm-processor-cache-gb above 0"
        )
    if told.lora_config is not None and "adapters" not in named:
        raise ConfigError(
            "vLLM names LoRA adapters to objkv's secondary tier by name and path, not by what they "
            "hold: name the release of all of them as 'adapters' in the tier's 'settings', and "
            "change it whenever one of them changes, or run without LoRA"
        )
    drafts = speculative is not None and speculative.method not in ("ngram", "suffix")
    if drafts and "speculative" not in named:
        raise ConfigError(
            "objkv's secondary tier does not know which draft model computed KV: name it as "
            f"'speculative' in the tier's 'settings', or use 'ngram', not {speculative.method!r}"
        )


def _is_of(found: Any, extra: Any) -> bool:
    if not isinstance(found, VllmConfig) or found.kv_transfer_config is None:
        return False
    return found.kv_transfer_config.kv_connector_extra_config is extra
