"""A small transformer over paged caches as vLLM's V0 engine laid them out, without vLLM.

Weights are random but the same for everybody who names the same seed. Ranks of a tensor-parallel
group hold their own heads, pipeline stages their own layers. With ``latent`` a token's K and V are
one vector, as with MLA.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

LAYERS, HEADS, SIZE, HIDDEN, LATENT, VOCAB = 3, 4, 8, 24, 12, 97
BLOCK, BLOCKS = 4, 64
Reduce = Callable[[torch.Tensor], torch.Tensor]


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

    @property
    def heads(self) -> int:
        return HEADS // self.tp_size


class Model:
    """One rank of the model. ``model.start_layer`` and so on are where V0 has them."""

    def __init__(self, shape: Shape, reduce: Reduce = lambda partial: partial) -> None:
        self.shape = shape
        self.model = SimpleNamespace(start_layer=shape.start_layer, end_layer=shape.end_layer)
        self.computed = 0
        self._reduce = reduce
        generator = torch.Generator().manual_seed(12)

        def weight(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, generator=generator) / sizes[0] ** 0.5

        self._embedding = weight(VOCAB, HIDDEN) * VOCAB**0.5
        self._positions = weight(512, HIDDEN) * 512**0.5
        self._head = weight(HIDDEN, VOCAB)
        width = LATENT if shape.latent else SIZE
        self._layers = [
            {
                "q": 3.0 * weight(HIDDEN, HEADS, width),  # attends to few: wrong KV shows
                "k": weight(HIDDEN, HEADS, SIZE),
                "v": weight(HIDDEN, HEADS, SIZE),
                "kv": weight(HIDDEN, LATENT),
                "o": 4.0 * weight(HEADS * width, HIDDEN).view(HEADS, width, HIDDEN),
                "mlp": weight(HIDDEN, HIDDEN),
            }
            for _ in range(LAYERS)
        ]

    def caches(self, *, blocks: int = BLOCKS) -> list[torch.Tensor]:
        """Fresh caches of this rank, full of what must not be used."""
        shape = (
            (blocks, BLOCK, LATENT)
            if self.shape.latent
            else (2, blocks, BLOCK, self.shape.heads, SIZE)
        )
        count = self.shape.end_layer - self.shape.start_layer
        return [torch.full(shape, float("nan"), dtype=self.shape.dtype) for _ in range(count)]

    def make_empty_intermediate_tensors(
        self, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> Intermediate:
        """As V0's models with pipeline stages."""
        empty = torch.zeros(batch_size, HIDDEN, dtype=dtype, device=device)
        return Intermediate({"hidden_states": empty, "residual": empty})

    def forward(
        self,
        step: SimpleNamespace,
        caches: Sequence[torch.Tensor],
        given: Intermediate | None = None,
    ) -> torch.Tensor | Intermediate:
        """All tokens of ``step``, which ``prompts`` or ``next_token`` made."""
        self.computed += len(step.input_tokens)
        if given is None:
            hidden = (self._embedding[step.input_tokens] + self._positions[step.places]).to(
                self.shape.dtype
            )
            residual = torch.zeros_like(hidden)
        else:
            hidden, residual = given.tensors["hidden_states"], given.tensors["residual"]
        for layer, cache in zip(
            range(self.shape.start_layer, self.shape.end_layer), caches, strict=True
        ):
            hidden = hidden + residual
            residual = hidden
            normed = hidden / (hidden.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
            hidden = self._attend(self._layers[layer], normed, step, cache)
            mlp = self._layers[layer]["mlp"].to(hidden.dtype)
            residual = residual + hidden
            hidden = torch.tanh(residual @ mlp)
        if self.shape.end_layer == LAYERS:
            return hidden + residual
        return Intermediate({"hidden_states": hidden, "residual": residual})

    def token(self, hidden: torch.Tensor) -> int:
        """The next token after ``[hidden]``."""
        return int((hidden.float() @ self._head).argmax())

    def _attend(
        self,
        weights: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        step: SimpleNamespace,
        cache: torch.Tensor,
    ) -> torch.Tensor:
        shape, dtype = self.shape, x.dtype
        mine = slice(shape.tp_rank * shape.heads, (shape.tp_rank + 1) * shape.heads)
        slots = step.attn_metadata.slot_mapping
        block, offset = slots // BLOCK, slots % BLOCK
        q = torch.einsum("td,dhs->ths", x, weights["q"][:, mine].to(dtype))
        if shape.latent:
            cache[block, offset] = x @ weights["kv"].to(dtype)
        else:
            cache[0][block, offset] = torch.einsum(
                "td,dhs->ths", x, weights["k"][:, mine].to(dtype)
            )
            cache[1][block, offset] = torch.einsum(
                "td,dhs->ths", x, weights["v"][:, mine].to(dtype)
            )
        out = torch.zeros(len(x), HIDDEN, dtype=dtype)
        for i, (place, context) in enumerate(zip(step.places.tolist(), step.contexts, strict=True)):
            seen = torch.tensor(context[: place + 1])
            at = seen // BLOCK, seen % BLOCK
            if shape.latent:
                k = v = cache[at].unsqueeze(1).expand(-1, shape.heads, -1)
            else:
                k, v = cache[0][at], cache[1][at]
            scores = torch.einsum("hs,chs->hc", q[i], k).float() / k.shape[-1] ** 0.5
            mixed = torch.einsum("hc,chs->hs", scores.softmax(-1).to(dtype), v)
            out[i] = torch.einsum("hs,hsd->d", mixed, weights["o"][mine].to(dtype))
        return self._reduce(out)


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
        places=torch.tensor([i for one in tokens for i in range(len(one))]),
        contexts=[own for own, one in zip(slots, tokens, strict=True) for _ in one],
        **more,
    )


def next_token(token: int, place: int, table: Sequence[int]) -> SimpleNamespace:
    """The model input of a step in which one sequence generates."""
    slots = slots_of(table, place + 1)
    attention = SimpleNamespace(
        num_prefills=0,
        num_prefill_tokens=0,
        seq_lens=[place + 1],
        slot_mapping=torch.tensor(slots[-1:]),
    )
    return SimpleNamespace(
        input_tokens=torch.tensor([token]),
        attn_metadata=attention,
        places=torch.tensor([place]),
        contexts=[slots],
    )


@dataclass
class ModelConfig:
    """As ``VllmConfig.model_config``."""

    model: str
    use_mla: bool = False
    dtype: torch.dtype = torch.float32
    revision: str | None = None
    quantization: str | None = None
    seed: int | None = 0
    max_model_len: int = 512
    values: dict[str, Any] = field(default_factory=lambda: {"rope_theta": 10_000.0})

    @property
    def hf_config(self) -> SimpleNamespace:
        return SimpleNamespace(to_dict=lambda: self.values)

    @property
    def hf_text_config(self) -> SimpleNamespace:
        return SimpleNamespace(num_hidden_layers=LAYERS)

    def get_total_num_kv_heads(self) -> int:
        return HEADS

    def get_head_size(self) -> int:
        return LATENT if self.use_mla else SIZE

    def get_hidden_size(self) -> int:
        return HIDDEN


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
        model_config=ModelConfig(str(folder / "model"), use_mla=latent),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp_size),
        load_config=SimpleNamespace(load_format="auto"),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=stores | settings),
    )
