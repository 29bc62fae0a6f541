"""A step of a vLLM V0 engine: its prompts that can be handed over, and one rank's caches and states
as the frames of their payloads, and back. ``docs/models.md`` specifies names and frames.

V0's objects have no types here, because current vLLM has none of their classes. Source: vLLM
0.6-0.10, ``worker/model_runner.py``, ``attention/backends/abstract.py``, and ``get_kv_cache_shape``
in ``attention/backends/flash_attn.py`` and ``mla/common.py``.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from objkv.codec.payload import Claim, LayerSpec
from objkv.config import Config
from objkv.connector.model.weights import read_weights
from objkv.errors import ConfigError, TransferError
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import GroupIdentity, Identity, name_model, sealed_extra
from objkv.keys.prefix import encode_tokens, next_hash, root_hash
from objkv.keys.topology import RankShard
from objkv.transfer.paging import DTYPE_NAMES

Pages = Sequence[np.ndarray]
"""The bytes of each frame."""
_BESIDES = ("lora_requests", "prompt_adapter_requests", "multi_modal_kwargs", "inputs_embeds")
"""Inputs beside tokens that may change their KV. A model input has some of them, by version."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by element size. Elements are copied as integers, because some devices cannot copy
fp8 by index, and copying floats may change the bits of a NaN."""
_LAST, _BETWEEN = "hidden_states", "intermediate."
"""Name of the last stage's output, and prefix of the names of another's, which the model chooses.
"""


class SkippedError(TransferError):
    """A step or a prompt is not suitable for a hand-off. The engine computes it."""


class HandoffPrompt(NamedTuple):
    """One prompt: tokens ``[start, end)`` of the step."""

    tokens: tuple[int, ...]
    start: int
    end: int
    slots: torch.Tensor
    """``[tokens]`` int64: slots of its KV in the paged cache, all at least 0."""


def read_prompts(model_input: Any) -> tuple[list[HandoffPrompt], bool]:
    """Return the prompts that this step computes from the first token to the last, and whether the
    step consists of them only, so that their states are its whole output. Waits for the device,
    because the host needs the token ids. Raises ``SkippedError`` if the prompts cannot be
    separated, or if token ids alone do not determine their KV."""
    attention, ids = model_input.attn_metadata, model_input.input_tokens
    if attention is None or ids is None or attention.num_prefill_tokens <= 0:
        return [], False
    for name in _BESIDES:
        value = getattr(model_input, name, None)
        if value is not None and (isinstance(value, torch.Tensor) or len(value)):
            raise SkippedError(f"prompts with {name} are not handed over")
    if getattr(attention, "encoder_seq_lens", None):
        raise SkippedError("prompts of models with an encoder are not handed over")
    total = attention.num_prefill_tokens
    lengths = list(attention.seq_lens or ())[: attention.num_prefills]
    # Lengths include tokens computed in earlier steps, ids and slots do not: such prompts could not
    # be separated.
    if len(lengths) != attention.num_prefills or sum(lengths) != total or min(lengths) <= 0:
        raise SkippedError("prompts computed in parts are not handed over")
    ids, slots = ids.flatten(), attention.slot_mapping.flatten()
    if len(ids) < total or len(slots) < total:
        raise SkippedError(f"{total} tokens of prompts in {len(ids)} ids, {len(slots)} slots")
    tokens = tuple(ids[:total].tolist())
    if min(tokens) < 0 or max(tokens) >= 1 << 32:  # they are encoded in 4 bytes
        raise SkippedError("prompts with positions without a token are not handed over")
    if int(slots[:total].min()) < 0:
        raise SkippedError("prompts whose KV is not completely kept are not handed over")
    bounds = pairwise(accumulate(lengths, initial=0))
    prompts = [HandoffPrompt(tokens[a:b], a, b, slots[a:b]) for a, b in bounds]
    return prompts, len(ids) == total


def read_handoff_identity(config: Any, settings: Config) -> Identity:
    """Return the identity document of hand-offs for V0's ``VllmConfig``, equal on every rank and on
    every engine that may receive them. Reads the model's files, which may take seconds. Raises
    ``ConfigError``, which names the fix."""
    model = config.model_config
    if getattr(config.cache_config, "calculate_kv_scales", False):  # not every version has it
        raise ConfigError("objkv cannot hand over KV with calculate_kv_scales: turn it off")
    values = dict(model.hf_config.to_dict())  # after overrides, for example of rope
    for name in ("_name_or_path", "transformers_version"):
        values.pop(name, None)
    text = json.dumps(values, sort_keys=True, default=str)
    if '"longrope"' in text or '"su"' in text:
        # The maximum length selects the factors that rotate all keys, also for short prompts.
        text += f" max_model_len={model.max_model_len}"
    dtype, kv_dtype = str(model.dtype).removeprefix("torch."), str(config.cache_config.cache_dtype)
    extra = {"dtype": dtype, "hf_config": hashlib.sha256(text.encode()).hexdigest()[:40]}
    extra |= {"hidden": str(model.get_hidden_size()), "scheme": "objkv-handoff-2"}
    heads, size = int(model.get_total_num_kv_heads()), model.get_head_size()
    # Each token is a block: K and V are fused as in chunks, and prompts may have any length.
    group = GroupIdentity(
        kind="full",
        window=None,
        layers=tuple(f"layers.{i}" for i in range(int(model.hf_text_config.num_hidden_layers))),
        heads=1 if model.use_mla else heads,
        content=size if model.use_mla else 2 * size,
        block_size=1,
    )
    return Identity(
        model=name_model(model.model, settings.model_id),
        weights=read_weights(config, settings),
        quantization=model.quantization,
        kv_dtype=dtype if kv_dtype == "auto" else kv_dtype,
        groups=(group,),
        page_layout="handoff-1",
        chunk_tokens=1,
        weights_epoch=settings.weights_epoch,
        tenant=settings.tenant,
        extra=sealed_extra(tuple(sorted(extra.items())), settings.seal_kinds),
    )


class HandoffStage:
    """One step's caches and the form of its output, on this rank. vLLM owns the tensors."""

    def __init__(
        self, executable: Any, model: Any, rank: RankShard, group: GroupIdentity, caches: Any
    ) -> None:
        """Raises ``SkippedError`` for other layers or caches than the rank may have, and for states
        of an unknown form."""
        first, end = executable.model.start_layer, executable.model.end_layer
        if not 0 <= first < end <= len(group.layers) or len(caches) != end - first:
            raise SkippedError(f"{len(caches)} KV caches of layers [{first}, {end})")
        self.rank = replace(rank, shard=replace(rank.shard, layer_start=first, layer_end=end))
        self._heads = rank.shard.head_end - rank.shard.head_start
        self._content, latent = group.content, bool(model.use_mla)
        tail = (group.content,) if latent else (self._heads, group.content // 2)
        for cache in caches:
            dims = cache.shape[:2] if latent else (2, *cache.shape[1:3])
            if cache.shape != (*dims, *tail) or not cache.numel() or cache.dtype not in DTYPE_NAMES:
                raise SkippedError(f"KV caches {tuple(cache.shape)} of {cache.dtype}")
        words = [cache.view(_WORDS[cache.element_size()]) for cache in caches]
        self._caches = [[one] if latent else [one[0], one[1]] for one in words]
        """The latents of each layer, or its K and V."""
        dtypes = [DTYPE_NAMES[cache.dtype] for cache in caches]
        self._dtypes = dict(zip(group.layers[first:end], dtypes, strict=True))
        self._device, self._block_size = caches[0].device, caches[0].shape[-1 - len(tail)]
        self._slots = min(c.shape[-2 - len(tail)] for c in caches) * self._block_size
        self._dtype: torch.dtype = model.dtype
        if self._dtype not in DTYPE_NAMES:
            raise SkippedError(f"hidden states of {model.dtype}")
        self._made_of: type[Any] | None = None
        """Makes the output from tensors by name. None for the last stage, whose output is one."""
        self._widths = {_LAST: int(model.get_hidden_size())}
        """Elements per token of each frame of states."""
        if end < len(group.layers):
            make_empty = getattr(executable, "make_empty_intermediate_tensors", None)
            if make_empty is None:
                raise SkippedError("a pipeline stage does not describe its output for the next one")
            empty = make_empty(batch_size=1, dtype=self._dtype, device=torch.device("cpu"))
            self._widths = {_BETWEEN + n: int(t.shape[-1]) for n, t in empty.tensors.items()}
            self._made_of = type(empty)

    def layers(self, prompt: HandoffPrompt) -> tuple[LayerSpec, ...]:
        """Return the frames of a prompt. Raises ``SkippedError`` for slots that no cache has."""
        if int(prompt.slots.max()) >= self._slots:
            raise SkippedError(f"slots outside the {self._slots} slots of the KV caches")
        tokens, states = len(prompt.tokens), DTYPE_NAMES[self._dtype]
        rows = tokens, self._heads, 1, self._content
        kv = [LayerSpec(name, dtype, rows) for name, dtype in self._dtypes.items()]
        own = [LayerSpec(n, states, (tokens, 1, 1, width)) for n, width in self._widths.items()]
        return (*kv, *own)

    def claim(self, namespace: str, prompt: HandoffPrompt) -> Claim:
        """Return the claim of a prompt's payload: that of a chunk which is the whole prompt."""
        root = root_hash(namespace)
        digest = next_hash(root, encode_tokens(prompt.tokens))
        key = ChunkKey(namespace, digest, 0, self.rank.shard)
        return Claim(key, root, 0, len(prompt.tokens))

    def gather(self, prompt: HandoffPrompt, given: Any) -> Pages:
        """Return copies of a prompt's frames. Only one layer at a time is in device memory twice.
        Raises ``SkippedError`` for states of another form."""
        found = {_LAST: given}
        if not isinstance(given, torch.Tensor):
            found = {_BETWEEN + name: tensor for name, tensor in given.tensors.items()}
        shapes = {name: (one.dtype, tuple(one.shape[1:])) for name, one in found.items()}
        expected = {name: (self._dtype, (width,)) for name, width in self._widths.items()}
        if shapes != expected or any(len(one) < prompt.end for one in found.values()):
            raise SkippedError(f"states {shapes}, expected {expected}")
        block, offset = self._places(prompt.slots)
        kv = (torch.cat([part[block, offset] for part in parts], -1) for parts in self._caches)
        own = (found[name][prompt.start : prompt.end] for name in self._widths)
        states = (one.clone(memory_format=torch.contiguous_format) for one in own)
        return [rows.view(torch.uint8).flatten().cpu().numpy() for rows in chain(kv, states)]

    def scatter(self, prompt: HandoffPrompt, pages: Pages) -> Pages:
        """Write a prompt's verified KV to its slots. Returns the pages of its states."""
        block, offset = self._places(prompt.slots)
        # Index by block and offset. A permuted cache has no flat view: reshape would copy it, and
        # the rows would be written to the copy.
        for parts, page in zip(self._caches, pages, strict=False):
            rows = torch.from_numpy(page).view(parts[0].dtype).to(self._device)
            rows = rows.view(len(prompt.tokens), self._heads, self._content)
            for part, values in zip(parts, rows.chunk(len(parts), -1), strict=True):
                part[block, offset] = values.reshape(-1, *part.shape[2:])
        return pages[len(self._caches) :]

    def join(self, prompts: Sequence[Pages]) -> Any:
        """Return the stage's output for all prompts, from the pages of their states."""
        joined = {}
        for number, (name, width) in enumerate(self._widths.items()):
            raw = torch.from_numpy(np.concatenate([pages[number] for pages in prompts]))
            states = raw.view(self._dtype).view(-1, width).to(self._device)
            joined[name.removeprefix(_BETWEEN)] = states
        return joined[_LAST] if self._made_of is None else self._made_of(joined)

    def _places(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slots = slots.to(self._device, torch.int64)
        return slots // self._block_size, slots % self._block_size
