"""What hand-offs use of vLLM's V0 objects, by shape alone: today's vLLM has none of them.

Source: vLLM 0.6-0.10, ``distributed/kv_transfer/kv_connector/base.py``, ``simple_connector.py``,
``worker/model_runner.py`` and ``attention/backends/abstract.py``.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch


class ModelConfig(Protocol):
    """``VllmConfig.model_config``."""

    model: str
    revision: str | None
    dtype: torch.dtype
    quantization: str | None
    seed: int | None
    max_model_len: int
    use_mla: bool
    hf_config: Any
    """The model's own configuration, with ``to_dict``."""
    hf_text_config: Any
    """Of the language model, with ``num_hidden_layers``."""

    def get_total_num_kv_heads(self) -> int:
        """KV heads over all TP ranks."""

    def get_head_size(self) -> int:
        """Elements per head and token of K; with MLA of the latent, rope part included."""

    def get_hidden_size(self) -> int:
        """Elements per token of a hidden state."""


class CacheConfig(Protocol):
    """``VllmConfig.cache_config``."""

    cache_dtype: str


class ParallelConfig(Protocol):
    """``VllmConfig.parallel_config``."""

    tensor_parallel_size: int


class LoadConfig(Protocol):
    """``VllmConfig.load_config``."""

    load_format: Any


class TransferConfig(Protocol):
    """``VllmConfig.kv_transfer_config``."""

    kv_connector_extra_config: dict[str, Any]


class HandoffConfig(Protocol):
    """``VllmConfig``."""

    @property
    def model_config(self) -> ModelConfig:
        """Which model."""

    @property
    def cache_config(self) -> CacheConfig:
        """How KV is kept."""

    @property
    def parallel_config(self) -> ParallelConfig:
        """How it is divided."""

    @property
    def load_config(self) -> LoadConfig:
        """Where its weights come from."""

    @property
    def kv_transfer_config(self) -> TransferConfig:
        """Settings of the connector."""


class IntermediateStates(Protocol):
    """What a pipeline stage gives the next; vLLM's ``IntermediateTensors``."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """By name ``[tokens, width]``."""


States = torch.Tensor | IntermediateStates
"""``[tokens, hidden]`` of the last pipeline stage, or what another stage gives."""


class Layers(Protocol):
    """``model_executable.model``: layers ``[start_layer, end_layer)`` of the whole model."""

    start_layer: int
    end_layer: int


class ModelExecutable(Protocol):
    """The model as this rank runs it. A stage that is not the last also has
    ``make_empty_intermediate_tensors(batch_size, dtype, device)``, as every model with pipeline
    stages."""

    @property
    def model(self) -> Layers:
        """Its layers."""


class AttentionMetadata(Protocol):
    """What attention is told of a batch: prompts first, requests that generate behind them."""

    @property
    def num_prefills(self) -> int:
        """Prompts."""

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of prompts that are computed in this step."""

    @property
    def seq_lens(self) -> Sequence[int] | None:
        """Per request its tokens so far, those of this step included."""

    @property
    def slot_mapping(self) -> torch.Tensor:
        """``[tokens]`` int64: where in the paged cache each token's KV belongs; -1 for nowhere."""


class ModelInput(Protocol):
    """``ModelInputForGPUWithSamplingMetadata``. Handed back as it came; its sampling metadata
    remains valid, because the states of all tokens come back."""

    @property
    def input_tokens(self) -> torch.Tensor | None:
        """``[tokens]``, ids of all tokens of the step."""

    @property
    def attn_metadata(self) -> AttentionMetadata | None:
        """None in a run without attention."""
