"""V0 engines in one process, that compute nothing: random KV and states go in, and come out. Their
caches and inputs are laid out as vLLM's V0 engine did it, without vLLM."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from objkv.connector.handoff import Agreement, HandoffConnector
from tests.support.served import ServedAgent

LAYERS, HEADS, SIZE, HIDDEN, LATENT = 3, 4, 8, 24, 12
BLOCK, BLOCKS = 4, 64
PROMPTS = [list(range(10, 17)), list(range(40, 53))]
TABLES, OTHER_TABLES = [[3, 1], [9, 8, 7, 6]], [[20, 21], [30, 33, 31, 32]]
SPOILT = 85
"""What KV is that was forgotten."""


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
        if self.shape.latent:
            return blocks, BLOCK, LATENT
        return 2, blocks, BLOCK, HEADS // self.shape.tp_size, SIZE

    def make_empty_intermediate_tensors(
        self, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> Intermediate:
        empty = torch.zeros(batch_size, HIDDEN, dtype=dtype, device=device)
        return Intermediate({"hidden_states": empty, "residual": empty})


def slots_of(blocks: Sequence[int], tokens: int) -> list[int]:
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


def step(*, elsewhere: bool = False, **more: Any) -> SimpleNamespace:
    """The model input of both prompts."""
    return prompts(PROMPTS, OTHER_TABLES if elsewhere else TABLES, **more)


OPENED: list["Engine"] = []


@dataclass(eq=False)
class Engine:
    """One rank of an engine whose stores are in ``folder``. It has a node and so an agent of its
    own, unless its settings name one."""

    folder: Path
    shape: Shape = field(default_factory=Shape)
    rank: int = 0
    agree: Agreement | None = lambda mine: mine
    cache_dtype: torch.dtype | None = None
    blocks: int = BLOCKS
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = self.shape
        config = engine_config(
            self.folder, latent=shape.latent, tp_size=shape.tp_size, **self.settings
        )
        extra, ends = config.kv_transfer_config.kv_connector_extra_config, ExitStack()
        self.lose_agent = ends.close
        if "agent" not in extra:
            self.agent = ServedAgent(extra)
            ends.callback(self.agent.close)
            extra["agent"] = self.agent.url
            OPENED.append(self)
        config.model_config.dtype = shape.dtype
        if self.cache_dtype is not None:
            config.cache_config.cache_dtype = "fp8"
        self.model = Model(shape)
        self.caches = [
            _random(self.model.cache_shape(self.blocks), self.cache_dtype or shape.dtype, seed)
            for seed in range(shape.end_layer - shape.start_layer)
        ]
        self.connector = HandoffConnector(self.rank, self.rank, config, agree=self.agree)

    def close(self) -> None:
        if self in OPENED:
            OPENED.remove(self)
        if hasattr(self, "connector"):
            self.connector.close()
        self.lose_agent()

    def states(self, tokens: int) -> Any:
        shape = (tokens, HIDDEN)
        if self.shape.end_layer == LAYERS:
            return _random(shape, self.shape.dtype, 50)
        made = self.model.make_empty_intermediate_tensors(1, self.shape.dtype, torch.device("cpu"))
        for seed, name in enumerate(made.tensors, start=60):
            made.tensors[name] = _random(shape, self.shape.dtype, seed)
        return made

    def send(self, what: SimpleNamespace, states: Any = None) -> Any:
        """Send a step; the states that were sent."""
        if states is None:
            states = self.states(len(what.input_tokens))
        self.connector.send_kv_caches_and_hidden_states(self.model, what, self.caches, states)
        return states

    def receive(self, what: SimpleNamespace) -> tuple[Any, bool]:
        states, bypass, same = self.connector.recv_kv_caches_and_hidden_states(
            self.model, what, self.caches
        )
        assert same is what
        assert bypass == (states is not None)
        return states, bypass

    def spoil(self) -> None:
        for cache in self.caches:
            bits(cache).fill_(SPOILT)

    def kv(self, slots: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for cache in self.caches:
            flat = cache if self.shape.latent else cache.movedim(0, 2)
            rows = flat.reshape(-1, *flat.shape[2:])[slots]
            found.append(bits(rows))
        return found

    def payloads(self) -> list[Path]:
        return sorted((self.folder / "chunks").rglob("*.safetensors"))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: NaNs are equal to themselves."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.view(words[tensor.element_size()])


def same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def _random(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    nbytes = torch.empty((), dtype=dtype).element_size()
    raw = (*shape[:-1], shape[-1] * nbytes)
    return torch.randint(0, 256, raw, generator=generator, dtype=torch.uint8).view(dtype)
