"""Which prompts of a V0 batch can be handed over: whole ones, that their token ids alone name."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from objkv.errors import TransferError

# What hand-offs use of vLLM's V0 objects, by shape alone: today's vLLM has none of them.
#
# Source: vLLM 0.6-0.10, ``distributed/kv_transfer/kv_connector/base.py``, ``simple_connector.py``,
# ``worker/model_runner.py`` and ``attention/backends/abstract.py``.


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


class LeftAloneError(TransferError):
    """A step, or a prompt, that is not for a hand-off: nothing failed, the engine computes it."""


_IDS_END = 1 << 32
"""Of token ids, as they are encoded."""
_BESIDE_TOKENS = (
    "lora_requests",
    "prompt_adapter_requests",
    "multi_modal_kwargs",
    "inputs_embeds",
)
"""What else may change a prompt's KV. Which of them a model input has depends on its version."""


@dataclass(frozen=True, slots=True)
class HandoffPrompt:
    """One prompt: tokens ``[start, end)`` of the batch."""

    tokens: tuple[int, ...]
    start: int
    end: int
    slots: torch.Tensor
    """``[tokens]`` int64, where in the paged cache its KV belongs; all at least 0."""


@dataclass(frozen=True, slots=True)
class HandoffBatch:
    """The prompts of one step."""

    prompts: tuple[HandoffPrompt, ...]
    whole: bool
    """Whether there is nothing but these prompts: only then can their states be all of it."""


def read_batch(model_input: ModelInput) -> HandoffBatch:
    """The prompts that this step computes from their first token to their last.

    Waits for the device: token ids are named by the host. Raises ``LeftAloneError`` for a batch
    whose prompts cannot be told apart, or are not named by their token ids.
    """
    attention, ids = model_input.attn_metadata, model_input.input_tokens
    if attention is None or ids is None or attention.num_prefill_tokens <= 0:
        return HandoffBatch((), whole=False)
    for name in _BESIDE_TOKENS:
        value = getattr(model_input, name, None)
        if value is not None and (isinstance(value, torch.Tensor) or len(value)):
            raise LeftAloneError(f"prompts with {name} are not handed over")
    if getattr(attention, "encoder_seq_lens", None):
        raise LeftAloneError("prompts of models with an encoder are not handed over")
    total = attention.num_prefill_tokens
    lengths = list(attention.seq_lens or ())[: attention.num_prefills]
    # Where tokens were computed in an earlier step these lengths count them too, but neither ids
    # nor slots of them are here: nothing would say where one prompt ends and the next begins.
    if len(lengths) != attention.num_prefills or sum(lengths) != total or min(lengths) <= 0:
        raise LeftAloneError("prompts computed in parts are not handed over")
    ids, slots = ids.flatten(), attention.slot_mapping.flatten()
    if len(ids) < total or len(slots) < total:
        raise LeftAloneError(f"{total} tokens of prompts in {len(ids)} ids, {len(slots)} slots")
    prompts = _prompts(ids[:total], slots[:total], lengths)
    return HandoffBatch(tuple(prompts), whole=len(ids) == total)


def _prompts(ids: torch.Tensor, slots: torch.Tensor, lengths: list[int]) -> Iterator[HandoffPrompt]:
    known = ids.tolist()
    if min(known) < 0 or max(known) >= _IDS_END:
        raise LeftAloneError("prompts with places that are no tokens are not handed over")
    if int(slots.min()) < 0:
        raise LeftAloneError("prompts of which not all KV is kept are not handed over")
    start = 0
    for length in lengths:
        end = start + length
        yield HandoffPrompt(tuple(known[start:end]), start, end, slots[start:end])
        start = end
