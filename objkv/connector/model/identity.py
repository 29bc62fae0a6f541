"""Reads identity and groups from vLLM's configuration (0.31-0.33), equal on scheduler and ranks."""

import hashlib
import json
import logging
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import lcm
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform

from objkv.codec.values import scales_text
from objkv.config import Config
from objkv.connector.model.drafts import INSTEAD, Draft, has_draft_kv, read_draft
from objkv.connector.model.groups import DraftGroups, Geometry, read_chunk_tokens, read_group
from objkv.connector.model.subgroups import PipelineStages, SubGroup, read_subgroups, whole_groups
from objkv.connector.model.weights import read_weights
from objkv.connector.wiring import count_nodes
from objkv.errors import ConfigError
from objkv.keys.identity import GroupIdentity, Identity, name_model, sealed_extra
from objkv.transfer.paging import Quantised

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


_SCHEDULES_FOR_ALL = ("mp", "ray", "uni", None)
"""Backends by name, so that the check does not import an executor that is not installed."""


def refuse_external_launcher(vllm_config: "VllmConfig") -> None:
    """Raise ``ConfigError`` if several ranks each have a scheduler, as under torchrun. Their
    decisions depend on the timing of a store: one would load a block that another computes, and
    their collective operations would hang. Source: vLLM 0.31-0.33,
    ``ExecutorWithExternalLauncher``. ``world_size`` includes its data-parallel ranks."""
    parallel = vllm_config.parallel_config
    if parallel.world_size == 1 or parallel.distributed_executor_backend in _SCHEDULES_FOR_ALL:
        return
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    if issubclass(Executor.get_class(vllm_config), ExecutorWithExternalLauncher):
        raise ConfigError(
            f"objkv does not support external_launcher with {parallel.world_size} ranks, because "
            "each rank has its own scheduler and they would disagree on loads: run it without the "
            "objkv connector, or let vLLM start the ranks: --distributed-executor-backend mp or ray"
        )


logger = logging.getLogger(__name__)


def read_geometry(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", config: Config
) -> Geometry:
    """Read the geometry of the model. Raises ``ConfigError`` for unsupported configurations."""
    _refuse_unsupported(vllm_config, kv_cache_config)
    draft = None
    if has_draft_kv(vllm_config):
        draft = read_draft(vllm_config, read_weights(vllm_config, config, draft=True))
    subgroups = read_subgroups(kv_cache_config, draft.has if draft else lambda _: False)
    stages: PipelineStages = ()
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        subgroups, stages = _whole_subgroups(vllm_config, kv_cache_config, subgroups)
    groups = tuple(read_group(vllm_config, subgroup, draft) for subgroup in subgroups)
    groups, dcp_size, interleave = _divided(vllm_config, subgroups, groups)
    return Geometry(
        groups=groups,
        chunk_tokens=read_chunk_tokens(config.chunk_tokens, groups),
        block_tokens=lcm(*(group.block_size for group in groups)),
        tp_size=vllm_config.parallel_config.tensor_parallel_size,
        stages=stages,
        canonical=not current_platform.is_cpu(),
        tables=tuple(subgroup.table for subgroup in subgroups),
        table_count=len(kv_cache_config.kv_cache_groups),
        drafted=None if draft is None else _draft_groups(draft, subgroups, groups),
        dcp_size=dcp_size,
        dcp_interleave=interleave,
        nodes=count_nodes(vllm_config.parallel_config),
    )


def _divided(
    vllm_config: "VllmConfig", subgroups: Sequence[SubGroup], groups: tuple[GroupIdentity, ...]
) -> tuple[tuple[GroupIdentity, ...], int, int]:
    """Return the groups with a block's tokens on all DCP ranks, and their number and interleave."""
    parallel = vllm_config.parallel_config
    size = int(getattr(parallel, "decode_context_parallel_size", 1))
    if size == 1:
        return groups, 1, 1
    for subgroup, group in zip(subgroups, groups, strict=True):
        sharded = getattr(subgroup.spec, "dcp_sharded", True)
        if group.kind not in ("full", "mla") or group.page or subgroup.draft or not sharded:
            raise ConfigError(
                f"objkv does not support decode_context_parallel_size={size} for the KV cache of "
                f"{group.layers[0]} ({group.kind}): {INSTEAD} set it to 1, or use ObjKVTier"
            )
    divided = tuple(replace(group, block_size=group.block_size * size) for group in groups)
    return divided, size, int(getattr(parallel, "cp_kv_cache_interleave_size", 1))


def _draft_groups(
    draft: Draft, subgroups: Sequence[SubGroup], groups: tuple[GroupIdentity, ...]
) -> DraftGroups:
    own = [group for subgroup, group in zip(subgroups, groups, strict=True) if subgroup.draft]
    if not own or len(own) == len(groups):
        raise ConfigError(
            f"objkv cannot separate the layers of the draft ({draft.method}) from the target's: "
            f"{INSTEAD} use ObjKVTier"
        )
    size = min(group.block_size for group in own)
    if draft.lags and draft.tokens >= size:
        raise ConfigError(
            f"objkv does not support {draft.tokens} speculative tokens in blocks of {size}: "
            f"{INSTEAD} set fewer, or a larger --block-size"
        )
    return DraftGroups(len(own), draft.number(own), draft.lags)


def _whole_subgroups(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", subgroups: Sequence[SubGroup]
) -> "tuple[list[SubGroup], PipelineStages]":
    """Return the subgroups with the layers of all pipeline stages."""
    if len(subgroups) != len(kv_cache_config.kv_cache_groups) or any(
        subgroup.page for subgroup in subgroups
    ):
        raise ConfigError(
            "objkv does not support pipeline parallelism for caches of several shapes in one "
            f"group: {INSTEAD} set pipeline_parallel_size to 1, or use ObjKVTier"
        )
    whole, stages = whole_groups(vllm_config, kv_cache_config.kv_cache_groups)
    layers = [tuple(group.layer_names) for group in whole]
    return [
        replace(subgroup, layers=own) for subgroup, own in zip(subgroups, layers, strict=True)
    ], stages


def read_identity(vllm_config: "VllmConfig", geometry: Geometry, config: Config) -> Identity:
    """Return this replica's identity. Reads the model's files, which may take seconds."""
    model = vllm_config.model_config
    return Identity(
        model=name_model(model.model, config.model_id),
        weights=read_weights(vllm_config, config),
        quantization=model.quantization,
        kv_dtype=_kv_dtype(vllm_config),
        groups=geometry.stored_groups,
        page_layout=_page_layout(vllm_config, geometry),
        chunk_tokens=geometry.chunk_tokens,
        weights_epoch=config.weights_epoch,
        tenant=config.tenant,
        extra=sealed_extra(further_settings(vllm_config), config.seal_kinds),
    )


def ranks_of_worker(parallel: "ParallelConfig") -> tuple[int, int]:
    """Return this worker's TP rank and pipeline stage, each 0 without such parallelism."""
    from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

    tensor = parallel.tensor_parallel_size > 1 and get_tensor_model_parallel_rank()
    stage = parallel.pipeline_parallel_size > 1 and get_pp_group().rank_in_group
    return int(tensor), int(stage)


def placed(vllm_config: "VllmConfig", geometry: Geometry) -> Geometry:
    """Return the geometry of this worker. Ray may put any number of ranks on a node. On several
    nodes each counts as alone on its own: an agent would wait for parts that go to another."""
    from vllm.distributed.parallel_state import get_node_count

    if geometry.ranks == 1 or not vllm_config.parallel_config.use_ray:
        return geometry
    return replace(geometry, nodes=1 if get_node_count() == 1 else geometry.ranks)


def warn_of_outer_policy(vllm_config: "VllmConfig") -> None:
    """Warn if another connector wraps this one and a failed load would fail its request. The
    outermost ``kv_transfer_config`` decides, and only workers can read it."""
    from vllm.config import get_current_vllm_config_or_none

    outer = get_current_vllm_config_or_none()
    transfer = None if outer is None else outer.kv_transfer_config
    if transfer is None or transfer is vllm_config.kv_transfer_config:
        return
    if transfer.kv_load_failure_policy != "recompute":
        logger.warning(
            "a failed load will fail its request: set kv_load_failure_policy to recompute in the "
            "configuration that vLLM reads, next to kv_connector=%s",
            transfer.kv_connector,
        )


def safe_load_mode(vllm_config: "VllmConfig", geometry: Geometry, config: Config) -> Config:
    """Return the settings, with ``load_mode`` async if vLLM cannot recover from a load that fails
    within a step: it uses the tokens of steps that were scheduled before the failure was known, and
    stops if block ids could belong to several groups. Source: vLLM 0.31-0.33,
    ``update_from_output`` and ``_handle_invalid_blocks`` in ``v1/core/sched/scheduler.py``."""
    several = geometry.several_tables
    if config.load_mode == "async" or (vllm_config.max_concurrent_batches == 1 and not several):
        return config
    reason = "run vLLM with --no-async-scheduling to load within steps"
    if several:
        reason = "the model has several KV cache groups"
    elif vllm_config.parallel_config.pipeline_parallel_size > 1:
        reason = "a pipeline has several steps in progress"
    logger.warning(
        "load mode not safe here, loading between steps load_mode=%s reason=%s",
        config.load_mode,
        reason,
    )
    return config.model_copy(update={"load_mode": "async"})


def names_media(vllm_config: "VllmConfig") -> bool:
    """Whether the name of an image, sound or video identifies its encoder output. With both of its
    caches off, vLLM numbers media in order of arrival, so one name means other images in other
    processes. Source: vLLM 0.32, ``_process_mm_uuids`` in ``renderers/base.py``."""
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    if has_fp8_encoder(multimodal):
        logger.warning(
            "prompts with images are not shared, because the encoder's fp8 scales may depend on "
            "earlier images: unset --mm-encoder-attn-dtype"
        )
        return False
    if (
        multimodal is None
        or vllm_config.cache_config.enable_prefix_caching
        or getattr(multimodal, "mm_processor_cache_gb", 0)
    ):
        return True
    logger.warning(
        "prompts with images are not shared, because vLLM only numbers them: run it with "
        "prefix caching or --mm-processor-cache-gb above 0"
    )
    return False


def _refuse_unsupported(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
    refuse_external_launcher(vllm_config)
    parallel = vllm_config.parallel_config
    if (size := getattr(parallel, "prefill_context_parallel_size", 1)) > 1:
        raise ConfigError(
            f"objkv does not support prefill_context_parallel_size={size}: {INSTEAD} set it to 1"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):  # until vLLM 0.31
        raise ConfigError(
            "objkv cannot share KV if each replica calculates its own scales: "
            f"{INSTEAD} turn calculate_kv_scales off"
        )
    for group in kv_cache_config.kv_cache_groups:
        if getattr(group, "host_resident", False):
            raise ConfigError(
                f"objkv does not support the KV cache of {group.layer_names[0]}, which vLLM keeps "
                f"in host memory: {INSTEAD} turn hisparse off"
            )


def _kv_dtype(vllm_config: "VllmConfig") -> str:
    dtype = str(vllm_config.cache_config.cache_dtype)
    if dtype == "auto":
        return str(vllm_config.model_config.dtype).removeprefix("torch.")
    return kv_dtype_name(dtype)


def _page_layout(vllm_config: "VllmConfig", geometry: Geometry) -> str:
    """Return the layout of a page, which depends on the kernel's instruction set on a CPU."""
    if not current_platform.is_cpu():
        return "canonical"
    from vllm.v1.attention.backends import cpu_attn

    isa = cpu_attn._get_attn_isa(
        vllm_config.model_config.dtype,
        geometry.groups[0].block_size,
        vllm_config.model_config.get_head_size(),
        vllm_config.cache_config.cache_dtype,
    )
    return f"opaque:{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}-{isa}".lower()


def further_settings(vllm_config: "VllmConfig") -> tuple[tuple[str, str], ...]:
    """Return further settings that change KV, other than weights and groups, as sorted text."""
    model = vllm_config.model_config
    extra = {"dtype": str(model.dtype).removeprefix("torch.")}
    rope = getattr(model.hf_text_config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # The engine's maximum length selects the factors that rotate all keys, whatever the prompt.
        long = model.max_model_len > rope["original_max_position_embeddings"]
        extra["longrope"] = "long" if long else "short"
    if isinstance(model.hf_overrides, dict) and model.hf_overrides:
        extra["hf_overrides"] = _text(model.hf_overrides)
    # The digest of the weights already covers the configuration in the model's folder.
    if model.hf_config_path or callable(model.hf_overrides):
        extra["hf_config"] = _config_digest(model.hf_config.to_dict())
    if online := getattr(model, "quantization_config", None):  # not every version has it
        extra["quantization_config"] = _text(online)
    if skipped := getattr(vllm_config.cache_config, "kv_cache_dtype_skip_layers", None):
        extra["kv_cache_dtype_skip_layers"] = ",".join(sorted(skipped))
    multimodal = getattr(model, "multimodal_config", None)
    if multimodal is not None and multimodal.mm_processor_kwargs:
        extra["mm_processor_kwargs"] = _text(multimodal.mm_processor_kwargs)
    if rate := getattr(multimodal, "video_pruning_rate", None):
        extra["video_pruning"] = f"{getattr(multimodal, 'video_pruning_method', 'evs')} {rate}"
    extra |= _adapter_settings(getattr(vllm_config, "lora_config", None), model.dtype)
    return tuple(sorted(extra.items()))


def _adapter_settings(lora: Any, dtype: Any) -> dict[str, str]:
    """Return LoRA settings, other than the adapter's files, that change KV."""
    if lora is None:
        return {}
    found = {}
    if lora.lora_dtype not in ("auto", dtype, str(dtype).removeprefix("torch.")):
        found["lora_dtype"] = str(lora.lora_dtype).removeprefix("torch.")
    if getattr(lora, "target_modules", None) is not None:
        found["lora_target_modules"] = ",".join(sorted(lora.target_modules))
    if getattr(lora, "enable_tower_connector_lora", False):
        found["lora_tower"] = "true"
    return found


def _config_digest(config: dict[str, Any]) -> str:
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    return hashlib.sha256(_text(config).encode()).hexdigest()[:40]


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


_FP8 = {"fp8": "F8_E4M3", "fp8_e4m3": "F8_E4M3", "fp8_e5m2": "F8_E5M2"}


def read_quantised(
    vllm_config: "VllmConfig", kv_caches: Mapping[str, torch.Tensor]
) -> dict[str, Quantised]:
    """Return the element format and the scales of K and V of quantised KV caches, by layer. Raises
    ``ConfigError`` unless there is one scale for K and one for V. vLLM registers such caches as
    plain bytes. It keeps the scales in each layer, where only a worker can read them, once the
    weights are loaded: the checkpoint's scales, or 1.0. Source: vLLM 0.31-0.33,
    ``process_weights_after_loading`` in ``model_executor/layers/quantization/kv_cache.py``."""
    layers = vllm_config.compilation_config.static_forward_context
    found = {}
    for name, cache in kv_caches.items():
        layer = layers.get(name)
        # States are skipped: their bytes belong to several tensors.
        if cache.element_size() == 1 and hasattr(layer, "_k_scale_float"):
            found[name] = Quantised(_dtype(layer, cache), _layer_scales(name, layer))
    return found


def kv_dtype_name(cache_dtype: str) -> str:
    """Return vLLM's name of a KV dtype, with a suffix for the other number format that AMD MI300
    and MI325 use under the same name. Source: vLLM 0.32, ``is_fp8_fnuz``."""
    fnuz = cache_dtype.startswith("fp8") and current_platform.is_fp8_fnuz()
    return f"{cache_dtype}_fnuz" if fnuz else cache_dtype


def _dtype(layer: Any, cache: torch.Tensor) -> str | None:
    if cache.dtype != torch.uint8:
        return None
    name = _FP8.get(getattr(layer, "kv_cache_dtype", ""))
    return name and name + ("FNUZ" if current_platform.is_fp8_fnuz() else "")


def _layer_scales(name: str, layer: Any) -> str:
    for tensor in (getattr(layer, "_k_scale", None), getattr(layer, "_v_scale", None)):
        if isinstance(tensor, torch.Tensor) and tensor.numel() != 1:
            raise ConfigError(
                f"the KV cache of {name} has one scale per head, which objkv does not support: "
                "run the model without the objkv connector, or with --kv-cache-dtype auto"
            )
    try:
        return scales_text(layer._k_scale_float, layer._v_scale_float)
    except ValueError as exc:
        raise ConfigError(f"the KV cache of {name} cannot be shared: {exc}") from exc


def has_fp8_encoder(multimodal: Any) -> bool:
    """Whether an encoder's output for an image may depend on earlier images, as with the scales of
    an fp8 encoder, which uses the largest values of its last 16 calls. ``multimodal``: vLLM's
    ``MultiModalConfig`` or None. Source: vLLM 0.32, ``MMEncoderAttention``."""
    return getattr(multimodal, "mm_encoder_attn_dtype", None) is not None  # not every version
