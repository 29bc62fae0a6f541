"""What one rank of a V0 engine holds of the model, and what it computes with it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from objkv.codec.payload import LayerSpec
from objkv.connector.handoff_batch import LeftAloneError, Prompt
from objkv.connector.handoff_pages import SlotCaches, SlotShape
from objkv.connector.handoff_states import StateForm, state_form
from objkv.connector.handoff_types import ModelConfig, ModelExecutable, States
from objkv.errors import ConfigError
from objkv.keys.identity import GroupIdentity
from objkv.keys.topology import RankShard, rank_shard


@dataclass(frozen=True, slots=True)
class Stage:
    """One step's caches and the form of its output, on this rank."""

    rank: RankShard
    caches: SlotCaches
    form: StateForm

    def layers(self, tokens: int) -> list[LayerSpec]:
        """What a payload of so many tokens must hold: KV layer by layer, then states."""
        return [*self.caches.layers(tokens), *self.form.layers(tokens)]

    def rows(self, prompt: Prompt, given: States) -> Iterator[torch.Tensor]:
        """Of each of ``layers`` what the device has; a layer at a time, so that only one of them is
        in the device's memory twice. Raises ``LeftAloneError`` for states of another form."""
        states = self.form.rows(given, prompt.start, prompt.end)  # refused before KV is read
        for layer in range(self.caches.count):
            yield self.caches.gather(layer, prompt.slots)
        yield from states


class Stages:
    """Makes the stage of each step: V0 says with every call which layers and caches it has."""

    def __init__(self, model: ModelConfig, group: GroupIdentity, rank: int, tp_size: int) -> None:
        """Raises ``ConfigError`` if heads cannot be split so."""
        self._model = model
        self._group = group
        try:
            self._rank = rank_shard(
                layers=len(group.layers),
                heads=group.heads,
                tp_rank=rank % tp_size,
                tp_size=tp_size,
            )
        except ValueError as exc:
            raise ConfigError(str(exc)) from exc

    def open(self, executable: ModelExecutable, kv_caches: Sequence[torch.Tensor]) -> Stage:
        """Raises ``LeftAloneError`` for layers, caches or states that objkv does not know."""
        first, end, total = (
            executable.model.start_layer,
            executable.model.end_layer,
            len(self._group.layers),
        )
        if not 0 <= first < end <= total:
            raise LeftAloneError(f"layers [{first}, {end}) of {total}")
        shard = replace(self._rank.shard, layer_start=first, layer_end=end)
        shape = SlotShape(shard, self._group.content, self._model.use_mla)
        form = state_form(
            executable,
            layers=total,
            hidden=self._model.get_hidden_size(),
            dtype=self._model.dtype,
        )
        return Stage(replace(self._rank, shard=shard), SlotCaches(shape, kv_caches), form)
