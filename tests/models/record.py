"""Records what vLLM makes of a model's configuration: its KV cache groups and tensors.

vLLM builds the model without weights (on PyTorch's ``meta`` device), reads the cache of each
attention layer, and divides layers into groups as its engine does. Ranks are only imitated: layers
divide their heads by sizes that are set here, and no second process runs.
``python -m scripts.write_models --record`` calls this.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

HERE = Path(__file__).parent
_MEMORY = 1 << 44
"""Bytes of memory for a cache, so that every model fits."""


def record(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's answer to one case, as JSON values. ``error`` is vLLM's sentence if it refuses
    the configuration."""
    os.environ.update(
        HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="CRITICAL",
        VLLM_HOST_IP="127.0.0.1", VLLM_CPU_OMP_THREADS_BIND="nobind",
    )  # fmt: skip
    try:
        with _as_accelerator():
            return _record(folder, case)
    except ImportError:
        raise
    except Exception as exc:
        if os.environ.get("OBJKV_TRACE"):
            raise
        lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
        said = " ".join(lines).replace(str(folder), "FOLDER")
        return {"error": f"{type(exc).__name__}: {said}"[:300]}


def _record(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    from vllm.config import set_current_vllm_config

    config = _vllm_config(folder, case)
    stages = case.get("pp", 1)
    with set_current_vllm_config(config, check_compile=False):
        specs = [_specs(config, case, stage) for stage in range(stages)]
        config.cache_config.kv_cache_layout = "BLHNC"
        made = _planned(config, [dict(spec) for spec in specs])
    model, draft = config.model_config, config.speculative_config
    answer = {
        "model": _numbers(model),
        "layer_types": getattr(model.hf_text_config, "layer_types", None),
        "dtype": str(model.dtype).removeprefix("torch."),
        "draft": None,
        "groups": [_group(group) for group in made.kv_cache_groups],
        "tensors": [
            {
                "layers": list(tensor.layers),
                "layer_stride": tensor.layer_stride,
                "block_stride": tensor.block_stride,
            }
            for tensor in made.kv_cache_tensors
        ],
    }
    if stages == 1 or not isinstance(answer["layer_types"], (list, tuple)):
        answer.pop("layer_types")
    if draft is not None and draft.draft_model_config is not None:
        own = draft.draft_model_config
        answer["draft"] = {
            **_numbers(own),
            "method": draft.method,
            "latent": bool(own.use_mla),
            "dtype": str(own.dtype).removeprefix("torch."),
        }
    return answer


def _planned(config: Any, specs: list[dict[str, Any]]) -> Any:
    memory = [_MEMORY] * len(specs)
    try:
        from vllm.v1.core import kv_cache_planning as since_033
    except ImportError:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

        return get_kv_cache_configs(config, specs, memory)[0]
    groups = since_033.get_global_kv_cache_groups(config, specs)
    return since_033.get_kv_cache_configs(config, specs, memory, groups)[0]


def _numbers(model: Any) -> dict[str, int]:
    return {
        "layers": int(model.get_total_num_hidden_layers()),
        "heads": int(model.get_total_num_kv_heads()),
    }


def _vllm_config(folder: Path, case: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    speculative = None
    if method := case.get("draft"):
        speculative = {"method": method, "num_speculative_tokens": case.get("tokens", 1)}
        if other := case.get("draft_model"):
            speculative["model"] = str(HERE / other)
    args = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        enable_prefix_caching=True,
        max_model_len=case.get("max_model_len", 4096),
        kv_cache_dtype=case.get("kv_dtype", "auto"),
        block_size=case.get("block_size"),
        speculative_config=speculative,
        hf_overrides=case.get("overrides", {}),
    )
    config = args.create_engine_config()
    config.parallel_config.tensor_parallel_size = case.get("tp", 1)
    config.parallel_config.pipeline_parallel_size = case.get("pp", 1)
    config.parallel_config.decode_context_parallel_size = case.get("dcp", 1)
    if speculative is not None and config.speculative_config.draft_parallel_config is not None:
        config.speculative_config.draft_parallel_config.tensor_parallel_size = case.get("tp", 1)
    return config


def _specs(config: Any, case: dict[str, Any], stage: int) -> dict[str, Any]:
    import torch
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype

    context = config.compilation_config.static_forward_context
    context.clear()
    draft = config.speculative_config and config.speculative_config.draft_model_config
    with _ranks(case, stage), set_default_torch_dtype(config.model_config.dtype):
        with torch.device("meta"):
            initialize_model(vllm_config=config)
            if draft and draft is not config.model_config:
                _add_draft(config, draft)
        if stage == 0:
            current_platform.update_block_size_for_backend(config)
        found = {}
        for name, layer in context.items():
            if isinstance(layer, AttentionLayerBase):
                if getattr(layer, "kv_sharing_target_layer_name", None):
                    continue
                if spec := layer.get_kv_cache_spec(config):
                    found[name] = spec
    return found


def _add_draft(config: Any, draft: Any) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    if config.speculative_config.method == "draft_model":
        own = copy(config)
        own.model_config = draft
        with set_current_vllm_config(own, check_compile=False):
            initialize_model(vllm_config=own, model_config=draft, prefix="draft_model")
    else:
        initialize_model(vllm_config=config, model_config=draft)


@contextmanager
def _ranks(case: dict[str, Any], stage: int) -> Iterator[None]:
    from vllm.distributed import parallel_state

    tp, pp = parallel_state._TP, parallel_state._PP
    assert tp is not None
    assert pp is not None
    stages = case.get("pp", 1)
    with (
        patch.object(tp, "world_size", case.get("tp", 1)),
        patch.object(pp, "world_size", stages),
        patch.object(pp, "rank_in_group", stage),
        patch.object(pp, "ranks", list(range(stages))),
        patch.object(pp, "rank", stage),
    ):
        yield


@contextmanager
def _as_accelerator() -> Iterator[None]:
    """Let vLLM's CPU platform answer as others do: prefix caching stays on with MLA, sparse
    attention has a backend, and block sizes are those of other platforms."""
    if not any(isinstance(finder, _AbsentModules) for finder in sys.meta_path):
        from transformers.utils import import_utils

        import_utils.is_torchvision_available()  # remembers the answer
        sys.meta_path.append(_AbsentModules())
    import torch
    from vllm.distributed import parallel_state
    from vllm.model_executor.models import registry
    from vllm.triton_utils import triton
    from vllm.v1.worker.workspace import WorkspaceManager, init_workspace_manager

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.init_distributed_environment(
            1, 0, f"file://{tempfile.mkdtemp()}/ranks", 0, backend="gloo"
        )
        from vllm.config import VllmConfig, set_current_vllm_config

        with set_current_vllm_config(VllmConfig()):
            parallel_state.initialize_model_parallel()
        init_workspace_manager(torch.device("cpu"))
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    backend = current_platform.get_attn_backend_cls

    def any_backend(selected_backend: Any, attn_selector_config: Any, **more: Any) -> str:
        if attn_selector_config.use_sparse:
            return AttentionBackendEnum.FLASHMLA_SPARSE.get_path()
        if attn_selector_config.use_mla:  # with any KV dtype
            return AttentionBackendEnum.AMX_MLA.get_path()
        return backend(selected_backend, attn_selector_config, **more)

    with (
        patch.object(registry, "_run_in_subprocess", lambda work: work()),
        patch.object(torch.cpu, "_is_amx_tile_supported", lambda: True),
        patch.object(
            WorkspaceManager, "get_simultaneous", lambda self, *sizes: [None] * len(sizes)
        ),
        patch.object(triton, "set_allocator", lambda allocate: None, create=True),
        patch.object(torch.cuda, "Event", _Absent),
        patch.object(torch.cuda, "Stream", _Absent),
        patch.object(type(current_platform), "get_attn_backend_cls", staticmethod(any_backend)),
    ):
        yield


_ABSENT = ("torchvision", "torchaudio", "cutlass")


class _Absent:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what a class of the CUDA build takes."""


class _AbsentModules(MetaPathFinder, Loader):
    """Lets models import libraries that the CPU environment lacks and no cache depends on."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.split(".")[0] in _ABSENT else None

    def create_module(self, spec: ModuleSpec) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__ = []
        module.__spec__ = spec
        return module

    def exec_module(self, module: Any) -> None:
        """Leave it empty."""


def _group(group: Any) -> dict[str, Any]:
    inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    found: dict[str, Any] = {"layers": list(group.layer_names)}
    if getattr(group, "host_resident", False):
        found["host_resident"] = True
    if inner is None:
        return found | {"spec": _spec(group.kv_cache_spec)}
    kinds: list[tuple[Any, list[str]]] = []
    for name in group.layer_names:
        for spec, names in kinds:
            if spec == inner[name]:
                names.append(name)
                break
        else:
            kinds.append((inner[name], [name]))
    return found | {"uniform": [{"layers": names, "spec": _spec(spec)} for spec, names in kinds]}


def _spec(spec: Any) -> dict[str, Any]:
    assert is_dataclass(spec)
    values: dict[str, Any] = {"type": type(spec).__name__}
    for field in fields(spec):
        value = getattr(spec, field.name)
        if value == field.default:
            continue
        values[field.name] = _plain(value)
    return values


def _plain(value: Any) -> Any:
    import torch

    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Enum):
        return {"enum": f"{type(value).__name__}.{value.name}"}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    assert value is None or isinstance(value, (int, float, str, bool)), value
    return value
