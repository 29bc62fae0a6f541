"""A rank's V0 paged caches, by slot: one row per token, as payloads keep it.

Source of the shapes: vLLM 0.6-0.10, ``get_kv_cache_shape`` in ``attention/backends/flash_attn.py``
and ``mla/common.py``: ``[2, num_blocks, block_size, heads, head_size]``, K and V; with MLA
``[num_blocks, block_size, latent]``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from objkv.codec.payload import LayerSpec
from objkv.connector.handoff.batch import LeftAloneError, ModelExecutable, States
from objkv.connector.handoff.blocks import WORDS
from objkv.connector.handoff.keys import layer_name
from objkv.keys.topology import Shard
from objkv.transfer.paging import DTYPE_NAMES


@dataclass(frozen=True, slots=True)
class SlotShape:
    """What a rank expects of its caches."""

    shard: Shard
    """Layers and heads that it holds, counted over all ranks."""
    content: int
    """Elements per head and token: K and V, or the latent."""
    latent: bool


class SlotCaches:
    """The caches of one rank. The tensors are vLLM's, never freed or resized here."""

    def __init__(self, shape: SlotShape, caches: Sequence[torch.Tensor]) -> None:
        """Raises ``LeftAloneError`` for caches of another shape."""
        shard = shape.shard
        if len(caches) != shard.layer_end - shard.layer_start:
            raise LeftAloneError(f"{len(caches)} KV caches, expected those of layers {shard}")
        self._shape = shape
        self._heads = shard.head_end - shard.head_start
        for cache in caches:
            self._check(cache)
        self._caches = [cache.view(WORDS[cache.element_size()]) for cache in caches]
        self._dtypes = [cache.dtype for cache in caches]
        block = 0 if shape.latent else 1
        self._block_size = caches[0].shape[block + 1]
        self._slots = min(cache.shape[block] for cache in caches) * self._block_size

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self._caches[0].device

    @property
    def count(self) -> int:
        """Layers of this rank."""
        return len(self._caches)

    def layers(self, tokens: int) -> list[LayerSpec]:
        """What a payload of ``tokens`` tokens must hold of them: ``[tokens, heads, 1, content]``,
        K and V of a token and head one behind the other."""
        shape = (tokens, self._heads, 1, self._shape.content)
        first = self._shape.shard.layer_start
        return [
            LayerSpec(layer_name(first + i), DTYPE_NAMES[dtype], shape)
            for i, dtype in enumerate(self._dtypes)
        ]

    def check_slots(self, slots: torch.Tensor) -> None:
        """Raise ``LeftAloneError`` unless all ``slots`` (``[tokens]`` int64) are in the caches."""
        if int(slots.max()) >= self._slots or int(slots.min()) < 0:
            raise LeftAloneError(f"slots outside the {self._slots} that the KV caches have")

    def gather(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """The rows of one layer, ``[tokens, heads, 1, content]`` on the device, as integers."""
        cache = self._caches[layer]
        block, offset = self._places(slots)
        if self._shape.latent:
            return cache[block, offset].reshape(len(slots), 1, 1, -1)
        return torch.cat((cache[0][block, offset], cache[1][block, offset]), -1).unsqueeze(2)

    def scatter(self, layer: int, slots: torch.Tensor, pages: memoryview) -> None:
        """Write the verified bytes of a layer's frame to its slots; does not keep ``pages``."""
        cache = self._caches[layer]
        # By block and offset rather than through a flat view, which a permuted cache does not have:
        # reshape would then make a copy, and the rows would be written to that.
        block, offset = self._places(slots)
        shape = (len(slots), self._heads, self._shape.content)
        rows = host_rows(pages, cache.dtype, shape).to(cache.device)
        if self._shape.latent:
            cache[block, offset] = rows[:, 0]
            return
        size = self._shape.content // 2
        cache[0][block, offset] = rows[..., :size]
        cache[1][block, offset] = rows[..., size:]

    def _places(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slots = slots.to(self.device, torch.int64)
        return slots // self._block_size, slots % self._block_size

    def _check(self, cache: torch.Tensor) -> None:
        shape, found = self._shape, tuple(cache.shape)
        if shape.latent:
            fits = len(found) == 3 and found[2] == shape.content
            wanted = f"[blocks, block size, {shape.content}]"
        else:
            size = shape.content // 2
            fits = len(found) == 5 and found[0] == 2 and found[3:] == (self._heads, size)
            wanted = f"[2, blocks, block size, {self._heads}, {size}]"
        if not fits or not cache.numel():
            raise LeftAloneError(f"a KV cache of shape {found}, expected {wanted}: not supported")
        if cache.dtype not in DTYPE_NAMES:
            raise LeftAloneError(f"a KV cache of {cache.dtype}, unknown to objkv")


def host_rows(pages: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The bytes of a frame as a tensor of its own: frames may begin at any address."""
    rows = torch.empty(shape, dtype=dtype)
    rows.view(torch.uint8).flatten().copy_(torch.frombuffer(pages, dtype=torch.uint8))
    return rows


# Hidden states of a prompt as frames of its payload, and back: of the last pipeline stage one
# tensor, of the others what they give to the next stage.

_LAST = "hidden_states"
_BETWEEN = "intermediate."
"""Before the names of what a stage gives: they are the model's, and must not be a layer's."""


@dataclass(frozen=True, slots=True)
class StateForm:
    """What the states of this stage look like."""

    dtype: torch.dtype
    widths: Mapping[str, int]
    """Elements per token, by the frame's name."""
    made_of: type[Any] | None
    """Makes the stage's output of tensors by name; None for the last stage, whose output is one."""

    def layers(self, tokens: int) -> list[LayerSpec]:
        """Their frames: ``[tokens, 1, 1, width]``."""
        dtype = DTYPE_NAMES[self.dtype]
        return [LayerSpec(name, dtype, (tokens, 1, 1, w)) for name, w in self.widths.items()]

    def rows(self, states: States, start: int, end: int) -> list[torch.Tensor]:
        """Of tokens ``[start, end)`` one tensor per frame, ``[tokens, width]``.

        Raises ``LeftAloneError`` for states of another form.
        """
        if isinstance(states, torch.Tensor):
            found: Mapping[str, torch.Tensor] = {_LAST: states}
        else:
            found = {_BETWEEN + name: tensor for name, tensor in states.tensors.items()}
        if found.keys() != self.widths.keys():
            raise LeftAloneError(f"states {sorted(found)}, expected {sorted(self.widths)}")
        for name, tensor in found.items():
            width = self.widths[name]
            if tensor.dim() != 2 or tensor.shape[0] < end or tensor.shape[1] != width:
                raise LeftAloneError(
                    f"{name} has shape {tuple(tensor.shape)}, width {width} wanted"
                )
            if tensor.dtype != self.dtype:
                raise LeftAloneError(f"{name} has {tensor.dtype}, expected {self.dtype}")
        return [found[name][start:end] for name in self.widths]

    def join(self, prompts: Sequence[Sequence[memoryview]], device: torch.device) -> States:
        """The stage's output for all prompts, one behind the other, on ``device``, from the
        verified bytes of their frames; in memory of its own."""
        joined = []
        for pages, width in zip(zip(*prompts, strict=True), self.widths.values(), strict=True):
            row_bytes = width * torch.empty((), dtype=self.dtype).element_size()
            parts = [host_rows(p, self.dtype, (len(p) // row_bytes, width)) for p in pages]
            joined.append(torch.cat(parts).to(device))
        if self.made_of is None:
            return joined[0]
        names = [name.removeprefix(_BETWEEN) for name in self.widths]
        made: States = self.made_of(dict(zip(names, joined, strict=True)))
        return made


def state_form(
    executable: ModelExecutable, *, layers: int, hidden: int, dtype: torch.dtype
) -> StateForm:
    """The form of what this stage of a model with ``layers`` layers gives.

    Raises ``LeftAloneError`` for a stage that does not say what it gives.
    """
    if dtype not in DTYPE_NAMES:
        raise LeftAloneError(f"hidden states of {dtype}, unknown to objkv")
    if executable.model.end_layer == layers:
        return StateForm(dtype, {_LAST: hidden}, None)
    make_empty = getattr(executable, "make_empty_intermediate_tensors", None)
    if make_empty is None:
        raise LeftAloneError("a pipeline stage that does not say what it gives to the next")
    empty = make_empty(batch_size=1, dtype=dtype, device=torch.device("cpu"))
    widths = {_BETWEEN + name: int(t.shape[-1]) for name, t in empty.tensors.items()}
    if not widths:
        raise LeftAloneError("a pipeline stage that gives nothing to the next")
    return StateForm(dtype, widths, type(empty))
