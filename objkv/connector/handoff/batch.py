"""Selects the prompts of a V0 batch that can be handed over: whole prompts of plain token ids."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from objkv.errors import TransferError

# The parts of vLLM's V0 objects that hand-offs use, as protocols, because current vLLM has none of
# these classes.
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
    """The language model's configuration, with ``num_hidden_layers``."""

    def get_total_num_kv_heads(self) -> int:
        """KV heads over all TP ranks."""

    def get_head_size(self) -> int:
        """Elements per head and token of K. With MLA, of the latent including its rope part."""

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
        """The model."""

    @property
    def cache_config(self) -> CacheConfig:
        """The form of the KV cache."""

    @property
    def parallel_config(self) -> ParallelConfig:
        """The sizes of the parallel groups."""

    @property
    def load_config(self) -> LoadConfig:
        """The source of the weights."""

    @property
    def kv_transfer_config(self) -> TransferConfig:
        """The settings of the connector."""


class IntermediateStates(Protocol):
    """A pipeline stage's output for the next stage: vLLM's ``IntermediateTensors``."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """``[tokens, width]`` by name."""


States = torch.Tensor | IntermediateStates
"""``[tokens, hidden]`` of the last pipeline stage, or the output of another stage."""


class Layers(Protocol):
    """``model_executable.model``: layers ``[start_layer, end_layer)`` of the whole model."""

    start_layer: int
    end_layer: int


class ModelExecutable(Protocol):
    """The model as this rank runs it. Every stage except the last also has
    ``make_empty_intermediate_tensors(batch_size, dtype, device)``."""

    @property
    def model(self) -> Layers:
        """The layers of this rank."""


class AttentionMetadata(Protocol):
    """Metadata of a batch: first the prompts, then the generating requests."""

    @property
    def num_prefills(self) -> int:
        """Number of prompts."""

    @property
    def num_prefill_tokens(self) -> int:
        """Number of prompt tokens computed in this step."""

    @property
    def seq_lens(self) -> Sequence[int] | None:
        """Number of tokens per request, including those of this step."""

    @property
    def slot_mapping(self) -> torch.Tensor:
        """``[tokens]`` int64: slot of each token's KV in the paged cache, or -1 for none."""


class ModelInput(Protocol):
    """``ModelInputForGPUWithSamplingMetadata``. Returned unchanged. Its sampling metadata stays
    valid, because the states of all tokens are returned."""

    @property
    def input_tokens(self) -> torch.Tensor | None:
        """``[tokens]``, ids of all tokens of the step."""

    @property
    def attn_metadata(self) -> AttentionMetadata | None:
        """None in a run without attention."""


class SkippedError(TransferError):
    """A step or a prompt is not suitable for a hand-off. The engine computes it."""


_IDS_END = 1 << 32
"""End of the range of token ids in their encoding."""
_BESIDE_TOKENS = (
    "lora_requests",
    "prompt_adapter_requests",
    "multi_modal_kwargs",
    "inputs_embeds",
)
"""Other inputs that may change a prompt's KV. A model input has some of them, by version."""


@dataclass(frozen=True, slots=True)
class HandoffPrompt:
    """One prompt: tokens ``[start, end)`` of the batch."""

    tokens: tuple[int, ...]
    start: int
    end: int
    slots: torch.Tensor
    """``[tokens]`` int64: slots of its KV in the paged cache, all at least 0."""


@dataclass(frozen=True, slots=True)
class HandoffBatch:
    """The prompts of one step."""

    prompts: tuple[HandoffPrompt, ...]
    whole: bool
    """Whether the step consists of these prompts only, so that their states are the whole
    output."""


def read_batch(model_input: ModelInput) -> HandoffBatch:
    """Return the prompts that this step computes from the first token to the last.

    Waits for the device, because the host needs the token ids. Raises ``SkippedError`` if the
    batch's prompts cannot be separated, or if token ids alone do not determine their KV.
    """
    attention, ids = model_input.attn_metadata, model_input.input_tokens
    if attention is None or ids is None or attention.num_prefill_tokens <= 0:
        return HandoffBatch((), whole=False)
    for name in _BESIDE_TOKENS:
        value = getattr(model_input, name, None)
        if value is not None and (isinstance(value, torch.Tensor) or len(value)):
            raise SkippedError(f"prompts with {name} are not handed over")
    if getattr(attention, "encoder_seq_lens", None):
        raise SkippedError("prompts of models with an encoder are not handed over")
    total = attention.num_prefill_tokens
    lengths = list(attention.seq_lens or ())[: attention.num_prefills]
    # These lengths include tokens computed in earlier steps, but the ids and slots do not. Prompts
    # with such tokens could not be separated.
    if len(lengths) != attention.num_prefills or sum(lengths) != total or min(lengths) <= 0:
        raise SkippedError("prompts computed in parts are not handed over")
    ids, slots = ids.flatten(), attention.slot_mapping.flatten()
    if len(ids) < total or len(slots) < total:
        raise SkippedError(f"{total} tokens of prompts in {len(ids)} ids, {len(slots)} slots")
    prompts = _prompts(ids[:total], slots[:total], lengths)
    return HandoffBatch(tuple(prompts), whole=len(ids) == total)


def _prompts(ids: torch.Tensor, slots: torch.Tensor, lengths: list[int]) -> Iterator[HandoffPrompt]:
    known = ids.tolist()
    if min(known) < 0 or max(known) >= _IDS_END:
        raise SkippedError("prompts with positions without a token are not handed over")
    if int(slots.min()) < 0:
        raise SkippedError("prompts whose KV is not completely kept are not handed over")
    start = 0
    for length in lengths:
        end = start + length
        yield HandoffPrompt(tuple(known[start:end]), start, end, slots[start:end])
        start = end
