"""Hidden states of a prompt as frames of its payload, and back: of the last pipeline stage one
tensor, of the others what they give to the next stage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from objkv.codec.payload import LayerSpec
from objkv.connector.handoff_batch import LeftAloneError
from objkv.connector.handoff_pages import host_rows
from objkv.connector.handoff_types import ModelExecutable, States
from objkv.transfer.paging import DTYPE_NAMES

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
