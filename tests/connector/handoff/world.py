"""V0 engines in one process, that compute nothing: random KV and states go in, and come out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from objkv.connector.handoff import Agreement, HandoffConnector
from tests.connector.handoff.model import (
    BLOCKS,
    HIDDEN,
    LAYERS,
    Model,
    Shape,
    engine_config,
    prompts,
)
from tests.support.served import ServedAgent

PROMPTS = [list(range(10, 17)), list(range(40, 53))]
TABLES = [[3, 1], [9, 8, 7, 6]]
SPOILT = 85
"""What KV is that was forgotten."""
OTHER_TABLES = [[20, 21], [30, 33, 31, 32]]


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
        extra, self.served = config.kv_transfer_config.kv_connector_extra_config, None
        if "agent" not in extra:
            self.served = ServedAgent(extra)
            extra["agent"] = self.served.url
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

    @property
    def agent(self) -> ServedAgent:
        """That of its node."""
        assert self.served is not None
        return self.served

    def close(self) -> None:
        """End it, and its agent. Idempotent."""
        if self in OPENED:
            OPENED.remove(self)
        if hasattr(self, "connector"):
            self.connector.close()
        self.lose_agent()

    def lose_agent(self) -> None:
        """End its agent. Idempotent."""
        served, self.served = self.served, None
        if served is not None:
            served.close()

    def states(self, tokens: int) -> Any:
        """Random states of a step, of the form that this stage has."""
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
        """Receive a step: the states, and whether there is nothing left to compute."""
        states, bypass, same = self.connector.recv_kv_caches_and_hidden_states(
            self.model, what, self.caches
        )
        assert same is what
        assert bypass == (states is not None)
        return states, bypass

    def spoil(self) -> None:
        """Forget all KV: as an engine that has not computed anything."""
        for cache in self.caches:
            bits(cache).fill_(SPOILT)

    def kv(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """The KV at ``slots``, per layer, bit by bit."""
        found = []
        for cache in self.caches:
            flat = cache if self.shape.latent else cache.movedim(0, 2)
            rows = flat.reshape(-1, *flat.shape[2:])[slots]
            found.append(bits(rows))
        return found

    def payloads(self) -> list[Path]:
        """All payloads in the bulk store."""
        return sorted((self.folder / "chunks").rglob("*.safetensors"))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: NaNs are equal to themselves."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.view(words[tensor.element_size()])


def same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    """Whether they hold the same bits."""
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def _random(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    nbytes = torch.empty((), dtype=dtype).element_size()
    raw = (*shape[:-1], shape[-1] * nbytes)
    return torch.randint(0, 256, raw, generator=generator, dtype=torch.uint8).view(dtype)
