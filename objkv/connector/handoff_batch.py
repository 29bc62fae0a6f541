"""Which prompts of a V0 batch can be handed over: whole ones, that their token ids alone name."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from objkv.connector.handoff_types import ModelInput
from objkv.errors import TransferError


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
class Prompt:
    """One prompt: tokens ``[start, end)`` of the batch."""

    tokens: tuple[int, ...]
    start: int
    end: int
    slots: torch.Tensor
    """``[tokens]`` int64, where in the paged cache its KV belongs; all at least 0."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The prompts of one step."""

    prompts: tuple[Prompt, ...]
    whole: bool
    """Whether there is nothing but these prompts: only then can their states be all of it."""


def read_batch(model_input: ModelInput) -> Batch:
    """The prompts that this step computes from their first token to their last.

    Waits for the device: token ids are named by the host. Raises ``LeftAloneError`` for a batch
    whose prompts cannot be told apart, or are not named by their token ids.
    """
    attention, ids = model_input.attn_metadata, model_input.input_tokens
    if attention is None or ids is None or attention.num_prefill_tokens <= 0:
        return Batch((), whole=False)
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
    return Batch(tuple(prompts), whole=len(ids) == total)


def _prompts(ids: torch.Tensor, slots: torch.Tensor, lengths: list[int]) -> Iterator[Prompt]:
    known = ids.tolist()
    if min(known) < 0 or max(known) >= _IDS_END:
        raise LeftAloneError("prompts with places that are no tokens are not handed over")
    if int(slots.min()) < 0:
        raise LeftAloneError("prompts of which not all KV is kept are not handed over")
    start = 0
    for length in lengths:
        end = start + length
        yield Prompt(tuple(known[start:end]), start, end, slots[start:end])
        start = end
