"""One rank's paged caches in a vLLM V0 engine, accessed by slot, with one row per token.

Source of the shapes: vLLM 0.6-0.10, ``get_kv_cache_shape`` in ``attention/backends/flash_attn.py``
and ``mla/common.py``: ``[2, num_blocks, block_size, heads, head_size]``, K and V; with MLA
``[num_blocks, block_size, latent]``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from objkv.codec.payload import LayerSpec
from objkv.connector.handoff.batch import ModelExecutable, SkippedError, States
from objkv.connector.handoff.keys import layer_name
from objkv.keys.topology import Shard
from objkv.transfer.paging import DTYPE_NAMES

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by element size. Elements are copied as integers, because some devices cannot copy
fp8 by index, and copying floats may change the bits of a NaN."""


@dataclass(frozen=True, slots=True)
class SlotShape:
    """The expected shape of a rank's caches."""

    shard: Shard
    """Layers and heads of the rank, counted over all ranks."""
    content: int
    """Elements per head and token: K and V, or the latent."""
    latent: bool


class SlotCaches:
    """The caches of one rank. vLLM owns the tensors. They are never freed or resized here."""

    def __init__(self, shape: SlotShape, caches: Sequence[torch.Tensor]) -> None:
        """Raises ``SkippedError`` for caches of another shape."""
        shard = shape.shard
        if len(caches) != shard.layer_end - shard.layer_start:
            raise SkippedError(f"{len(caches)} KV caches, expected those of layers {shard}")
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
        """The device of the tensors."""
        return self._caches[0].device

    @property
    def count(self) -> int:
        """Number of layers of this rank."""
        return len(self._caches)

    def layers(self, tokens: int) -> list[LayerSpec]:
        """Return the frames of a payload of ``tokens`` tokens: ``[tokens, heads, 1, content]``,
        with K and V of each token and head contiguous."""
        shape = (tokens, self._heads, 1, self._shape.content)
        first = self._shape.shard.layer_start
        return [
            LayerSpec(layer_name(first + i), DTYPE_NAMES[dtype], shape)
            for i, dtype in enumerate(self._dtypes)
        ]

    def check_slots(self, slots: torch.Tensor) -> None:
        """Raise ``SkippedError`` unless all ``slots`` (``[tokens]`` int64) are in the caches."""
        if int(slots.max()) >= self._slots or int(slots.min()) < 0:
            raise SkippedError(f"slots outside the {self._slots} slots of the KV caches")

    def gather(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Return the rows of one layer, ``[tokens, heads, 1, content]`` on the device, as
        integers."""
        cache = self._caches[layer]
        block, offset = self._places(slots)
        if self._shape.latent:
            return cache[block, offset].reshape(len(slots), 1, 1, -1)
        return torch.cat((cache[0][block, offset], cache[1][block, offset]), -1).unsqueeze(2)

    def scatter(self, layer: int, slots: torch.Tensor, pages: memoryview) -> None:
        """Write the verified bytes of a layer's frame to its slots. Does not keep ``pages``."""
        cache = self._caches[layer]
        # Index by block and offset. A permuted cache has no flat view: reshape would copy it, and
        # the rows would be written to the copy.
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
            raise SkippedError(f"a KV cache of shape {found}, expected {wanted}: not supported")
        if cache.dtype not in DTYPE_NAMES:
            raise SkippedError(f"a KV cache of {cache.dtype} is not supported")


def host_rows(pages: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Copy the bytes of a frame into a new tensor, because frames may begin at any address."""
    rows = torch.empty(shape, dtype=dtype)
    rows.view(torch.uint8).flatten().copy_(torch.frombuffer(pages, dtype=torch.uint8))
    return rows


# Converts hidden states of a prompt to frames of its payload and back. The last pipeline stage has
# one tensor, the other stages have their outputs for the next stage.

_LAST = "hidden_states"
_BETWEEN = "intermediate."
"""Prefix of the names of a stage's outputs. The model chooses them, and they must not equal a
layer's name."""


@dataclass(frozen=True, slots=True)
class StateForm:
    """The form of the states of this stage."""

    dtype: torch.dtype
    widths: Mapping[str, int]
    """Elements per token, by the frame's name."""
    made_of: type[Any] | None
    """Makes the stage's output from tensors by name. None for the last stage, whose output is one
    tensor."""

    def layers(self, tokens: int) -> list[LayerSpec]:
        """Return the frames of the states: ``[tokens, 1, 1, width]``."""
        dtype = DTYPE_NAMES[self.dtype]
        return [LayerSpec(name, dtype, (tokens, 1, 1, w)) for name, w in self.widths.items()]

    def rows(self, states: States, start: int, end: int) -> list[torch.Tensor]:
        """Return one tensor per frame for tokens ``[start, end)``, ``[tokens, width]``.

        Raises ``SkippedError`` for states of another form.
        """
        if isinstance(states, torch.Tensor):
            found: Mapping[str, torch.Tensor] = {_LAST: states}
        else:
            found = {_BETWEEN + name: tensor for name, tensor in states.tensors.items()}
        if found.keys() != self.widths.keys():
            raise SkippedError(f"states {sorted(found)}, expected {sorted(self.widths)}")
        for name, tensor in found.items():
            width = self.widths[name]
            if tensor.dim() != 2 or tensor.shape[0] < end or tensor.shape[1] != width:
                raise SkippedError(
                    f"{name} has shape {tuple(tensor.shape)}, expected width {width}"
                )
            if tensor.dtype != self.dtype:
                raise SkippedError(f"{name} has {tensor.dtype}, expected {self.dtype}")
        return [found[name][start:end] for name in self.widths]

    def join(self, prompts: Sequence[Sequence[memoryview]], device: torch.device) -> States:
        """Return the stage's output for all prompts, concatenated on ``device``, as a copy of the
        verified bytes of their frames."""
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
    """Return the form of this stage's output, for a model with ``layers`` layers.

    Raises ``SkippedError`` if the stage does not describe its output.
    """
    if dtype not in DTYPE_NAMES:
        raise SkippedError(f"hidden states of {dtype} are not supported")
    if executable.model.end_layer == layers:
        return StateForm(dtype, {_LAST: hidden}, None)
    make_empty = getattr(executable, "make_empty_intermediate_tensors", None)
    if make_empty is None:
        raise SkippedError("a pipeline stage does not describe its output for the next stage")
    empty = make_empty(batch_size=1, dtype=dtype, device=torch.device("cpu"))
    widths = {_BETWEEN + name: int(t.shape[-1]) for name, t in empty.tensors.items()}
    if not widths:
        raise SkippedError("a pipeline stage has no output for the next stage")
    return StateForm(dtype, widths, type(empty))
