"""The hand-off of vLLM's V0 engines, for those that still run one: KV and hidden states of prompts
that one process computed become the input of another, over the same stores as chunks.

Legacy: vLLM removed this interface with its V0 engine. Nothing here imports vLLM. An engine of
today uses ``ObjKVConnector``, which shares every prefix; a hand-off is of whole prompts only.

No method raises into the engine once it runs, and none waits longer than its deadline.
"""

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from time import monotonic, time
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from objkv.codec.payload import LayerSpec, Provenance, header_room
from objkv.config import load_config
from objkv.connector.guard import guarded
from objkv.connector.handoff.batch import (
    HandoffConfig,
    HandoffPrompt,
    LeftAloneError,
    ModelConfig,
    ModelExecutable,
    ModelInput,
    States,
    read_batch,
)
from objkv.connector.handoff.keys import handoff_claim, read_handoff_identity
from objkv.connector.handoff.payload import SlotCaches, SlotShape, StateForm, state_form
from objkv.connector.handoff.store import HandoffStore
from objkv.connector.wiring import open_cache, open_checked_backends
from objkv.errors import ConfigError, ObjkvError, TransferError
from objkv.keys.identity import GroupIdentity, Identity
from objkv.keys.prefix import token_digest
from objkv.keys.topology import RankShard, rank_shard
from objkv.telemetry import NullRecorder, Recorder, Trouble

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HandoffStage:
    """One step's caches and the form of its output, on this rank."""

    rank: RankShard
    caches: SlotCaches
    form: StateForm

    def layers(self, tokens: int) -> list[LayerSpec]:
        """What a payload of so many tokens must hold: KV layer by layer, then states."""
        return [*self.caches.layers(tokens), *self.form.layers(tokens)]

    def rows(self, prompt: HandoffPrompt, given: States) -> Iterator[torch.Tensor]:
        """Of each of ``layers`` what the device has; a layer at a time, so that only one of them is
        in the device's memory twice. Raises ``LeftAloneError`` for states of another form."""
        states = self.form.rows(given, prompt.start, prompt.end)  # refused before KV is read
        for layer in range(self.caches.count):
            yield self.caches.gather(layer, prompt.slots)
        yield from states


class HandoffStages:
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

    def open(self, executable: ModelExecutable, kv_caches: Sequence[torch.Tensor]) -> HandoffStage:
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
        return HandoffStage(replace(self._rank, shard=shard), SlotCaches(shape, kv_caches), form)


class Agreement(Protocol):
    """One answer of the ranks that compute together: yes only if each says yes. All of them must
    call it, equally often.

    A rank that left the forward pass out while another did not would leave that other waiting for
    ever. V1 engines do this themselves: ``KVOutputAggregator`` counts the workers' reports.
    """

    def __call__(self, mine: bool) -> bool:
        """Whether all say yes. Waits for the others, within a bound; never raises."""


def alone(mine: bool) -> bool:
    """The agreement of a rank that computes by itself."""
    return mine


class RankAgreement:
    """Over a process group of its own. Whoever did not hear from the others says no from then on,
    because nobody can tell any more who answers which question."""

    def __init__(self, group: "dist.ProcessGroup") -> None:
        """``group``: gloo, with the bound as its timeout; used for nothing else."""
        self._group = group
        self._broken = False

    def __call__(self, mine: bool) -> bool:
        """See ``Agreement``."""
        if self._broken:
            return False
        answer = torch.tensor([mine], dtype=torch.int32)
        try:
            dist.all_reduce(answer, op=dist.ReduceOp.MIN, group=self._group)
        except Exception as exc:  # whatever the backend raises: a rank is gone, or very late
            self._broken = True
            logger.warning("ranks out of touch, computing everything from now on reason=%s", exc)
            return False
        return bool(answer.item())


def open_agreement(rank: int, tp_size: int, *, timeout_s: float) -> Agreement:
    """The agreement of ``rank``'s tensor-parallel group: ``tp_size`` ranks that follow each other.

    Every rank of the world must call it, in the same order among its collective calls. Raises
    ``ConfigError`` without torch's process groups.
    """
    if tp_size == 1:
        return alone
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            f"tensor_parallel_size={tp_size}: initialize torch.distributed before the connector, "
            "its ranks must agree on what they leave out"
        )
    world = dist.get_world_size()
    if world % tp_size or not 0 <= rank < world:
        raise ConfigError(f"rank {rank} of {world} has no group of {tp_size} ranks")
    mine = None
    for first in range(0, world, tp_size):
        ranks = list(range(first, first + tp_size))
        # Each group is made by all ranks of the world, also those outside.
        group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), backend="gloo")
        if rank in ranks:
            mine = group
    assert mine is not None
    return RankAgreement(mine)


_NOTHING: States | None = None
_REASONS_MAX = 16
"""Why prompts were left alone, told once each."""
_BACKGROUND_S = 1.0
"""How long ``close`` waits for what nobody needs: a copy to the hot store."""


def _log_ready(identity: Identity, rank: int) -> None:
    logger.info(
        "objkv hand-off ready model=%s namespace=%s rank=%d",
        identity.model,
        identity.namespace(),
        rank,
    )


class HandoffConnector:
    """vLLM's V0 ``KVConnectorBase``, by shape. All methods are called by the forward thread.

    Settings: ``objkv.config.Config``, from ``OBJKV_*``, a TOML file, and
    ``kv_connector_extra_config``. Source of the contract: vLLM 0.6-0.10,
    ``distributed/kv_transfer/kv_connector/base.py``.
    """

    def __init__(
        self,
        rank: int,
        local_rank: int,
        config: HandoffConfig,
        *,
        agree: Agreement | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """Raises ``ConfigError`` with what to do, and with ``at_start`` strict ``StoreError``.

        Args:
            rank: in the world; tensor-parallel ranks of one stage follow each other.
            agree: asks the other ranks of the stage; by default over torch.distributed, which must
                be initialized if there are others.
        """
        self._config = load_config(config.kv_transfer_config.kv_connector_extra_config)
        self._recorder = recorder or NullRecorder()
        identity = read_handoff_identity(config, self._config)
        self._namespace = identity.namespace()
        tp_size = config.parallel_config.tensor_parallel_size
        self._stages = HandoffStages(config.model_config, identity.groups[0], rank, tp_size)
        self._writer = f"{socket.gethostname()}:{os.getpid()}:{local_rank}"
        self._trouble, self._reasons = Trouble(logger, "hand-offs"), set[str]()
        self._closed = False
        # Ranks wait for each other as long as one of them may wait for the stores, and then some.
        bound_ms = max(self._config.step_load_deadline_ms, self._config.save_deadline_ms)
        self._agree = agree or open_agreement(rank, tp_size, timeout_s=2 * bound_ms / 1000)
        self._backends = open_checked_backends(self._config, self._recorder)
        self._cache = open_cache(
            self._config, self._backends, self._writer, self._recorder, read_once=True
        )
        codec = "none" if self._config.codec == "auto" else self._config.codec
        self._store = HandoffStore(
            self._backends, self._cache, identity, codec=codec, recorder=self._recorder
        )
        _log_ready(identity, rank)

    def send_kv_caches_and_hidden_states(
        self,
        model_executable: ModelExecutable,
        model_input: ModelInput,
        kv_caches: list[torch.Tensor],
        hidden_or_intermediate_states: States,
    ) -> None:
        """Store every whole prompt of the step that was just computed.

        When it returns, each is stored by all tensor-parallel ranks, or dropped: whoever is told
        that the step is over finds what there is. Blocks at most ``save_deadline_ms``, and for the
        slowest rank.

        Args:
            kv_caches: per layer of this stage ``[2, num_blocks, block_size, heads, head_size]``, or
                with MLA ``[num_blocks, block_size, latent]``; read before it returns.
            hidden_or_intermediate_states: ``[tokens, hidden]``, or of a stage that is not the last
                an ``IntermediateTensors`` of such.
        """
        states = hidden_or_intermediate_states
        self._agree(self._send(model_executable, model_input, kv_caches, states))

    def recv_kv_caches_and_hidden_states(
        self,
        model_executable: ModelExecutable,
        model_input: ModelInput,
        kv_caches: list[torch.Tensor],
    ) -> tuple[States | None, bool, ModelInput]:
        """Take over the prompts of the step that is about to be computed.

        Blocks at most ``step_load_deadline_ms``, and for the slowest tensor-parallel rank.

        Args:
            kv_caches: as in ``send_kv_caches_and_hidden_states``; a prompt's slots are written when
                all its KV and states were verified, and no others are.

        Returns:
            The states of all tokens, True, and ``model_input``, if the step has nothing but whole
            prompts, and every rank that computes with this one received all of them. Otherwise
            None, False, and ``model_input`` as it came: compute all of it.
        """
        states = self._receive(model_executable, model_input, kv_caches)
        if not self._agree(states is not None):
            return None, False, model_input
        return states, True, model_input

    @guarded(None)
    def close(self) -> None:
        """Close connections. Idempotent; whatever comes afterwards is a miss or a drop."""
        if not self._closed:
            self._closed = True
            self._cache.close(_BACKGROUND_S)
            self._backends.close()

    @guarded(False)
    def _send(
        self,
        executable: ModelExecutable,
        model_input: ModelInput,
        kv_caches: Sequence[torch.Tensor],
        states: States,
    ) -> bool:
        deadline = monotonic() + self._config.save_deadline_ms / 1000
        try:
            self._refuse_closed()
            batch = read_batch(model_input)
            if not batch.prompts:
                return True
            stage = self._stages.open(executable, kv_caches)
        except ObjkvError as exc:
            return self._dropped(exc)
        stored = True
        for prompt in batch.prompts:
            try:
                self._save(stage, prompt, states, deadline)
                self._trouble.worked()
            except ObjkvError as exc:
                stored = self._dropped(exc)
        return stored

    @guarded(_NOTHING)
    def _receive(
        self,
        executable: ModelExecutable,
        model_input: ModelInput,
        kv_caches: Sequence[torch.Tensor],
    ) -> States | None:
        deadline = monotonic() + self._config.step_load_deadline_ms / 1000
        received = []
        try:
            self._refuse_closed()
            batch = read_batch(model_input)
            if not batch.whole:
                return None
            stage = self._stages.open(executable, kv_caches)
            for prompt in batch.prompts:
                states = self._load(stage, prompt, deadline)
                if states is None:
                    return None
                received.append(states)
        except LeftAloneError as exc:
            self._left_alone(exc)
            return None
        except ObjkvError as exc:
            self._recorder.count("load_errors")
            self._trouble.failed(exc)
            return None
        self._trouble.worked()
        return stage.form.join(received, stage.caches.device)

    def _save(
        self, stage: HandoffStage, prompt: HandoffPrompt, given: States, deadline: float
    ) -> None:
        claim = handoff_claim(self._namespace, prompt.tokens, stage.rank.shard)
        if not stage.rank.writes(claim.key.prefix_hash):
            return  # another rank holds the same, and saves it
        layers = self._layers(stage, prompt)
        tokens = prompt.tokens if self._config.store_tokens else None
        offset = header_room(layers, tokens=len(tokens or ()))
        buffer = np.empty(offset + sum(layer.nbytes for layer in layers), np.uint8)
        for layer, rows in zip(layers, stage.rows(prompt, given), strict=True):
            target = torch.from_numpy(buffer[offset : offset + layer.nbytes])
            target.view(rows.dtype).view(rows.shape).copy_(rows)
            offset += layer.nbytes
        provenance = Provenance(token_digest(prompt.tokens), self._writer, int(time()), tokens)
        seconds = deadline - monotonic()
        self._store.save(claim, layers, buffer.data, provenance, seconds=seconds)

    def _load(
        self, stage: HandoffStage, prompt: HandoffPrompt, deadline: float
    ) -> list[memoryview] | None:
        """The verified states of a prompt whose KV is in its slots; None where it is not."""
        layers = self._layers(stage, prompt)
        claim = handoff_claim(self._namespace, prompt.tokens, stage.rank.shard)
        pages = self._store.load(claim, tuple(layers), seconds=deadline - monotonic())
        if pages is None:
            return None
        count = stage.caches.count
        for layer in range(count):
            stage.caches.scatter(layer, prompt.slots, pages[layer])
        return pages[count:]

    def _layers(self, stage: HandoffStage, prompt: HandoffPrompt) -> list[LayerSpec]:
        """What the prompt's payload must hold. Raises ``LeftAloneError`` for slots that are not
        there, and for a payload that would take more memory than is allowed."""
        stage.caches.check_slots(prompt.slots)
        layers = stage.layers(len(prompt.tokens))
        nbytes = sum(layer.nbytes for layer in layers)
        if nbytes > self._config.pinned_bytes_max:
            raise LeftAloneError(
                f"{len(prompt.tokens)} tokens are {nbytes} bytes, beyond pinned_bytes_max"
            )
        return layers

    def _left_alone(self, reason: LeftAloneError) -> None:
        """Told once for each reason: such prompts may come in every other step."""
        text = str(reason)
        if text not in self._reasons and len(self._reasons) < _REASONS_MAX:
            self._reasons.add(text)
            logger.info("prompts left alone reason=%s", text)

    def _dropped(self, reason: ObjkvError) -> bool:
        if isinstance(reason, LeftAloneError):
            self._left_alone(reason)
            return False
        self._recorder.count("save_errors")
        self._trouble.failed(reason)
        return False

    def _refuse_closed(self) -> None:
        if self._closed:
            raise TransferError("closed")
