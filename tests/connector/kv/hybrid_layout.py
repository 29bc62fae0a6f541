"""The caches that vLLM gives a model with a mix of groups, and the configuration of its engine."""

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

_MODEL = Path(__file__).parents[3] / ".cache" / "models" / "notes"
_HEADS = 4


@dataclass(frozen=True)
class Layout:
    """A model's groups, each of one layer unless it has ``layers``, and how vLLM is run."""

    kinds: tuple[tuple[str, int], ...]
    """Per group its kind, and its window in tokens; 0 where it has none. Of ``compressed`` and
    ``ring`` the second is the number of tokens that are compressed into one state."""
    block_sizes: tuple[int, ...]
    chunk_tokens: int = 8
    num_blocks: int = 64
    step_tokens: int = 32
    retention: int | None = 0
    layers: int = 0
    """Of a model with one group: how many of these it has. They may be in as many stages."""
    tp_size: int = 1
    pp_size: int = 1
    dcp_size: int = 1
    dcp_interleave: int = 1
    nodes: int = 1
    """How many nodes the ranks are on, each with an agent of its own."""
    head_size: int = 1
    """Numbers per token of a head, which are all equal. Of layers with one head see ``words``."""

    @property
    def ranks(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def rank_heads(self) -> int:
        """Heads of a rank, of a layer whose heads are divided."""
        return max(1, _HEADS // self.tp_size)


@dataclass(frozen=True)
class Layer:
    name: str
    table: int
    """Number of its group."""
    kind: str
    window: int
    block_size: int
    words: int
    """Numbers per token or state, at most 4."""
    layout: Layout
    stage: int = 0

    @property
    def heads(self) -> int:
        return _HEADS if self.kind in ("full", "sliding_window", "chunked_local") else 1

    @property
    def ratio(self) -> int:
        return self.window if self.kind == "compressed" else 1

    def needed(self, end: int) -> range:
        """The tokens, or the last tokens of states, that are read to continue after ``end``."""
        match self.kind:
            case "compressed":
                return range(self.window - 1, end, self.window)
            case "ring":
                return range(end // self.window * self.window, end)
            case "sliding_window" | "window_mla" | "replayed":
                return range(max(0, end - (self.window - 1)), end)
            case "chunked_local":
                return range(end // self.window * self.window, end)
        return range(end)

    def place(self, table: Sequence[int], token: int) -> tuple[int, int]:
        """Block and slot of a token, or of the state that it completes, on the ranks that hold it.
        Source: vLLM 0.32, ``v1/worker/block_table.py``."""
        each, ranks = self.layout.dcp_interleave, self.layout.dcp_size
        size = self.block_size * ranks
        at = 0 if self.kind == "ring" else token // size
        offset = token % size
        return table[at], (offset // (each * ranks) * each + offset % each) // self.ratio

    def holders(self, token: int) -> Iterator[tuple[int, slice]]:
        """The ranks that hold a token, each with its heads."""
        layout = self.layout
        dcp_rank = token // layout.dcp_interleave % layout.dcp_size
        for rank in range(dcp_rank, layout.tp_size, layout.dcp_size):
            first = rank * self.heads // layout.tp_size
            yield (
                self.stage * layout.tp_size + rank,
                slice(first, first + min(self.heads, layout.rank_heads)),
            )


def layers_of(layout: Layout) -> list[Layer]:
    """The layers of a model: one per group, or two of different widths."""
    if layout.layers:
        ((kind, window),), (size,) = layout.kinds, layout.block_sizes
        plain = (0, kind, window, size, 4, layout)
        return [
            Layer(f"layers.{number}", *plain, stage=number * layout.pp_size // layout.layers)
            for number in range(layout.layers)
        ]
    layers = []
    for i, ((kind, window), size) in enumerate(zip(layout.kinds, layout.block_sizes, strict=True)):
        widths = (4, 2) if kind in ("sparse", "compressed") else (4,)
        for j, words in enumerate(widths):
            name = f"layer.{'x' * i}{'.index' * j}"
            layers.append(Layer(name, i, kind, window, size, words, layout))
    return layers


def caches_of(layout: Layout, kv: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Views of one storage, ``[num_blocks, page]``: a block belongs to one group at a time, which
    has the pages of its layers side by side."""
    (page,) = {tensor.block_stride for tensor in kv.kv_cache_tensors}
    generator = torch.Generator().manual_seed(1)
    storage = torch.randint(
        1, 100, (layout.num_blocks, page), generator=generator, dtype=torch.int8
    )
    specs, caches = _specs(layout), {}
    for tensor in kv.kv_cache_tensors:
        for place, name in enumerate(tensor.layers):
            spec, start = specs[name], tensor.offset + place * tensor.layer_stride
            heads, states, size, view = 1, 1, 1, storage
            if hasattr(spec, "dtype"):
                heads, states, size = spec.num_heads, spec.num_states, 4
                view = storage.view(torch.float32)
            content = spec.state_content_size_bytes // size
            shape = (layout.num_blocks, heads, states, content)
            strides = (page // size, states * content, content, 1)
            caches[name] = view.as_strided(shape, strides, start // size)
    return caches, storage


def _specs(layout: Layout) -> dict[str, Any]:
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        CircularBufferSpec,
        FullAttentionSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowMLASpec,
        SlidingWindowSpec,
    )

    page = _page_bytes(layout)
    specs: dict[str, Any] = {}
    for layer in layers_of(layout):
        plain: dict[str, Any] = {"head_size_v": 0, "dtype": torch.float32}
        plain["block_size"] = size = layer.block_size
        heads = plain | {
            "head_size": layout.head_size,
            "num_kv_heads": layout.rank_heads,
            "page_size_padded": page,
        }
        latent = plain | {"head_size": layer.words, "num_kv_heads": 1}
        match layer.kind:
            case "full":
                spec: Any = FullAttentionSpec(**heads)
            case "mla":
                spec = MLAAttentionSpec(**latent, page_size_padded=page)
            case "sparse" | "compressed":
                spec = MLAAttentionSpec(**latent, tokens_per_state=layer.ratio)
            case "sliding_window":
                spec = SlidingWindowSpec(sliding_window=layer.window, **heads)
            case "window_mla" | "replayed":
                replay = layer.kind == "replayed"
                spec = SlidingWindowMLASpec(
                    sliding_window=layer.window, bounded_replay=replay, **latent
                )
            case "chunked_local":
                spec = ChunkedLocalAttentionSpec(attention_chunk_size=layer.window, **heads)
            case "ring":
                spec = CircularBufferSpec(**latent)
            case _:
                form = ((4,),), (torch.float32,)
                spec = MambaSpec(size, *form, page_size_padded=page, mamba_cache_mode="align")
        specs[layer.name] = spec
    return specs


def _page_bytes(layout: Layout) -> int:
    """Bytes of a block of all layers of the largest group, and some more."""
    return 24 * layout.head_size * max(layout.block_sizes) + 32


def _stride(layout: Layout) -> int:
    return _page_bytes(layout) * max(1, layout.layers)


def kv_cache_config(layout: Layout, stage: int = 0) -> Any:
    from vllm.v1.kv_cache_interface import (
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
        UniformTypeKVCacheSpecs,
    )

    page, specs = _stride(layout), _specs(layout)
    groups, tensors = [], []
    for table in range(len(layout.kinds)):
        own = [one for one in layers_of(layout) if (one.table, one.stage) == (table, stage)]
        names = [layer.name for layer in own]
        spec = specs[names[0]]
        if len(own) > 1 and not layout.layers:
            spec = UniformTypeKVCacheSpecs.from_specs({name: specs[name] for name in names})
        groups.append(KVCacheGroupSpec(names, spec))
        offset = 0
        for alike in [names] if layout.layers else [[name] for name in names]:
            nbytes = specs[alike[0]].page_size_bytes
            tensors.append(KVCacheTensor(page * layout.num_blocks, alike, nbytes, page, offset))
            offset += nbytes
    return KVCacheConfig(
        num_blocks=layout.num_blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=groups,
        prefix_cache_retention_interval=layout.retention,
    )


def engine_config(layout: Layout, folder: Path, settings: dict[str, Any]) -> Any:
    from vllm.config import KVTransferConfig

    config = copy.copy(plain_config())
    for part in ("cache_config", "scheduler_config", "parallel_config", "model_config"):
        setattr(config, part, copy.copy(getattr(config, part)))
    config.parallel_config.tensor_parallel_size = layout.tp_size
    config.parallel_config.pipeline_parallel_size = layout.pp_size
    config.parallel_config.world_size = layout.ranks
    config.parallel_config.nnodes = layout.nodes
    config.model_config.model_arch_config = copy.copy(config.model_config.model_arch_config)
    config.model_config.model_arch_config.total_num_hidden_layers = max(1, layout.layers)
    config.parallel_config.decode_context_parallel_size = layout.dcp_size
    config.parallel_config.cp_kv_cache_interleave_size = layout.dcp_interleave
    states = [i for i, (kind, _) in enumerate(layout.kinds) if kind == "mamba"]
    size = layout.block_sizes[states[0]] if states else layout.block_sizes[0]
    config.cache_config.block_size = size
    config.cache_config.num_gpu_blocks = layout.num_blocks
    config.cache_config.mamba_cache_mode = "align" if states else "none"
    config.cache_config.mamba_block_size = size
    config.scheduler_config.max_num_batched_tokens = layout.step_tokens
    config.scheduler_config.max_num_scheduled_tokens = layout.step_tokens
    extra = {
        "bulk_url": f"file://{folder}/chunks",
        "index_url": f"sqlite://{folder}/index.sqlite",
        "chunk_tokens": layout.chunk_tokens,
        "admission": "always",
        "codec": "none",
        "model_id": "notes",
        "pinned_bytes_max": 64 << 20,
        "load_threads": 2,
        "lookup_deadline_ms": 120_000,
        "load_deadline_ms": 120_000,
        "save_deadline_ms": 600_000,
    }
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="ObjKVConnector",
        kv_connector_module_path="objkv.connector",
        kv_role="kv_both",
        kv_connector_extra_config=extra | settings,
    )
    return config


@cache
def plain_config() -> Any:
    from vllm.engine.arg_utils import EngineArgs

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "max_position_embeddings": 512,
    }
    _MODEL.mkdir(parents=True, exist_ok=True)
    (_MODEL / "config.json").write_text(json.dumps(config))
    return EngineArgs(
        model=str(_MODEL),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        block_size=32,
    ).create_engine_config()
