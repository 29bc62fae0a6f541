"""The caches and inputs of a small model as vLLM's V0 engine laid them out, without vLLM."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

LAYERS, HEADS, SIZE, HIDDEN, LATENT = 3, 4, 8, 24, 12
BLOCK, BLOCKS = 4, 64


@dataclass
class Intermediate:
    """As vLLM's ``IntermediateTensors``."""

    tensors: dict[str, torch.Tensor]


@dataclass
class Shape:
    """Which part of the model a rank runs."""

    tp_rank: int = 0
    tp_size: int = 1
    start_layer: int = 0
    end_layer: int = LAYERS
    latent: bool = False
    dtype: torch.dtype = torch.float32


class Model:
    """One rank of the model. ``model.start_layer`` and so on are where V0 has them."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.model = SimpleNamespace(start_layer=shape.start_layer, end_layer=shape.end_layer)

    def cache_shape(self, blocks: int) -> tuple[int, ...]:
        """Of each layer's cache."""
        if self.shape.latent:
            return blocks, BLOCK, LATENT
        return 2, blocks, BLOCK, HEADS // self.shape.tp_size, SIZE

    def make_empty_intermediate_tensors(
        self, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> Intermediate:
        """As V0's models with pipeline stages."""
        empty = torch.zeros(batch_size, HIDDEN, dtype=dtype, device=device)
        return Intermediate({"hidden_states": empty, "residual": empty})


def slots_of(blocks: Sequence[int], tokens: int) -> list[int]:
    """The slots of a sequence's first tokens, in its blocks."""
    return [blocks[i // BLOCK] * BLOCK + i % BLOCK for i in range(tokens)]


def prompts(
    tokens: Sequence[Sequence[int]], tables: Sequence[Sequence[int]], **more: Any
) -> SimpleNamespace:
    """The model input of a step that computes whole prompts."""
    slots = [slots_of(table, len(one)) for one, table in zip(tokens, tables, strict=True)]
    attention = SimpleNamespace(
        num_prefills=len(tokens),
        num_prefill_tokens=sum(map(len, tokens)),
        seq_lens=[len(one) for one in tokens],
        slot_mapping=torch.tensor([slot for own in slots for slot in own]),
    )
    return SimpleNamespace(
        input_tokens=torch.tensor([token for one in tokens for token in one]),
        attn_metadata=attention,
        sampling_metadata=object(),
        **more,
    )


def model_config(model: str, *, latent: bool) -> SimpleNamespace:
    """As ``VllmConfig.model_config``."""
    config = SimpleNamespace(
        model=model,
        use_mla=latent,
        dtype=torch.float32,
        revision=None,
        quantization=None,
        seed=0,
        max_model_len=512,
        values={"rope_theta": 10_000.0},
        hf_text_config=SimpleNamespace(num_hidden_layers=LAYERS),
        get_total_num_kv_heads=lambda: HEADS,
        get_head_size=lambda: LATENT if latent else SIZE,
        get_hidden_size=lambda: HIDDEN,
    )
    config.hf_config = SimpleNamespace(to_dict=lambda: config.values)
    return config


def model_folder(folder: Path, *, weights: float = 8.0) -> None:
    """Make the files that say which weights these are."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({"layers": LAYERS}))
    save_file({"w": torch.full((8,), weights)}, model / "model.safetensors")


def engine_config(
    folder: Path, *, latent: bool = False, tp_size: int = 1, **settings: Any
) -> SimpleNamespace:
    """As ``VllmConfig``, of the model that ``model_folder`` made, with stores beside it."""
    stores = {
        "bulk_url": f"file://{folder}/chunks",
        "index_url": f"sqlite://{folder}/index.sqlite",
        # The machine may be busy with other things.
        "step_load_deadline_ms": 120_000,
        "save_deadline_ms": 120_000,
    }
    return SimpleNamespace(
        model_config=model_config(str(folder / "model"), latent=latent),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp_size),
        load_config=SimpleNamespace(load_format="auto"),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=stores | settings),
    )
