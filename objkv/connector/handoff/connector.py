"""Hand-offs for vLLM's V0 engines: one process stores the KV and hidden states of whole prompts,
and another uses them as input. They use the same stores as chunks.

Legacy: vLLM removed this interface with its V0 engine. Nothing here imports vLLM. Current engines
use ``ObjKVConnector``, which shares every prefix, not only whole prompts.

Methods of a running connector raise nothing into the engine and wait no longer than their deadline.
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
    ModelConfig,
    ModelExecutable,
    ModelInput,
    SkippedError,
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
_PROMPT_BYTES_MAX = 1 << 30
"""Largest prompt unless ``pinned_bytes_max`` is set."""


@dataclass(frozen=True, slots=True)
class HandoffStage:
    """One step's caches and the form of its output, on this rank."""

    rank: RankShard
    caches: SlotCaches
    form: StateForm

    def layers(self, tokens: int) -> list[LayerSpec]:
        """Return the frames of a payload of ``tokens`` tokens: KV layer by layer, then states."""
        return [*self.caches.layers(tokens), *self.form.layers(tokens)]

    def rows(self, prompt: HandoffPrompt, given: States) -> Iterator[torch.Tensor]:
        """Yield the rows of each of ``layers`` on the device, one layer at a time, so that only one
        is in device memory twice. Raises ``SkippedError`` for states of another form."""
        states = self.form.rows(given, prompt.start, prompt.end)  # first, because it may raise
        for layer in range(self.caches.count):
            yield self.caches.gather(layer, prompt.slots)
        yield from states


class HandoffStages:
    """Makes the stage of each step, because V0 passes layers and caches with every call."""

    def __init__(self, model: ModelConfig, group: GroupIdentity, rank: int, tp_size: int) -> None:
        """Raises ``ConfigError`` if the heads cannot be divided by the ranks."""
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
        """Make a stage. Raises ``SkippedError`` for unsupported layers, caches or states."""
        first, end, total = (
            executable.model.start_layer,
            executable.model.end_layer,
            len(self._group.layers),
        )
        if not 0 <= first < end <= total:
            raise SkippedError(f"layers [{first}, {end}) of {total}")
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
    """A vote of the ranks that compute together. All of them must call it equally often.

    If one rank skipped the forward pass and another did not, the other would wait for ever. V1
    engines solve this themselves: ``KVOutputAggregator`` counts the workers' reports.
    """

    def __call__(self, mine: bool) -> bool:
        """Return whether all ranks vote True. Waits for the others within a bound. Never raises."""


def alone(mine: bool) -> bool:
    """Return the vote of a single rank."""
    return mine


class RankAgreement:
    """A vote over a separate process group. A rank that misses a result votes False from then on,
    because votes and results can no longer be matched."""

    def __init__(self, group: "dist.ProcessGroup") -> None:
        """``group``: a gloo group with the bound as its timeout, used for nothing else."""
        self._group = group
        self._broken = False

    def __call__(self, mine: bool) -> bool:
        """See ``Agreement``."""
        if self._broken:
            return False
        answer = torch.tensor([mine], dtype=torch.int32)
        try:
            dist.all_reduce(answer, op=dist.ReduceOp.MIN, group=self._group)
        except Exception as exc:  # any exception of the backend: a rank is gone or very late
            self._broken = True
            logger.warning("ranks cannot agree, computing everything from now on reason=%s", exc)
            return False
        return bool(answer.item())


def open_agreement(rank: int, tp_size: int, *, timeout_s: float) -> Agreement:
    """Return the agreement of ``rank``'s tensor-parallel group of ``tp_size`` consecutive ranks.

    Every rank of the world must call it, in the same order relative to its collective calls. Raises
    ``ConfigError`` if torch's process groups are not initialized.
    """
    if tp_size == 1:
        return alone
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            f"tensor_parallel_size is {tp_size}, so ranks must agree on what they skip: "
            "initialize torch.distributed before the connector"
        )
    world = dist.get_world_size()
    if world % tp_size or not 0 <= rank < world:
        raise ConfigError(f"rank {rank} of {world} has no group of {tp_size} ranks")
    mine = None
    for first in range(0, world, tp_size):
        ranks = list(range(first, first + tp_size))
        # All ranks of the world must make each group, also the ranks outside it.
        group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), backend="gloo")
        if rank in ranks:
            mine = group
    assert mine is not None
    return RankAgreement(mine)


_NOTHING: States | None = None
_REASONS_MAX = 16
"""Most different reasons to log for skipped prompts."""
_BACKGROUND_S = 1.0
"""How long ``close`` waits for optional work, such as a copy to the hot store."""


def _log_ready(identity: Identity, rank: int) -> None:
    logger.info(
        "objkv hand-off ready model=%s namespace=%s rank=%d",
        identity.model,
        identity.namespace(),
        rank,
    )


class HandoffConnector:
    """Implements vLLM's V0 ``KVConnectorBase``. All methods are called by the forward thread.

    The settings are those of ``objkv.config.Config``, from ``OBJKV_*``, a TOML file, and
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
        """Raises ``ConfigError``, which names the fix, and with ``at_start`` strict ``StoreError``.

        Args:
            rank: rank in the world. Tensor-parallel ranks of one stage are consecutive.
            agree: the vote of the stage's ranks. By default it uses torch.distributed, which must
                be initialized if there are several.
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
        # Ranks wait for each other twice as long as one of them may wait for the stores.
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

        When it returns, all tensor-parallel ranks have stored each prompt or dropped it, so a
        receiver can start at once. Blocks for at most ``save_deadline_ms``, and for the slowest
        rank.

        Args:
            kv_caches: per layer of this stage ``[2, num_blocks, block_size, heads, head_size]``, or
                with MLA ``[num_blocks, block_size, latent]``. Read before this returns.
            hidden_or_intermediate_states: ``[tokens, hidden]``, or an ``IntermediateTensors`` of
                them if the stage is not the last.
        """
        states = hidden_or_intermediate_states
        self._agree(self._send(model_executable, model_input, kv_caches, states))

    def recv_kv_caches_and_hidden_states(
        self,
        model_executable: ModelExecutable,
        model_input: ModelInput,
        kv_caches: list[torch.Tensor],
    ) -> tuple[States | None, bool, ModelInput]:
        """Receive the prompts of the step that is about to be computed.

        Blocks for at most ``step_load_deadline_ms``, and for the slowest tensor-parallel rank.

        Args:
            kv_caches: as in ``send_kv_caches_and_hidden_states``. Only the slots of a prompt are
                written, after all its KV and states were verified.

        Returns:
            The states of all tokens, True, and ``model_input``, if the step consists of whole
            prompts and every rank of the group received all of them. Otherwise None, False, and the
            unchanged ``model_input``: the engine must compute the whole step.
        """
        states = self._receive(model_executable, model_input, kv_caches)
        if not self._agree(states is not None):
            return None, False, model_input
        return states, True, model_input

    @guarded(None)
    def close(self) -> None:
        """Close connections. Later calls are misses or drops. Idempotent."""
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
        except SkippedError as exc:
            self._skipped(exc)
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
            return  # another rank has the same shard and saves it
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
        """Load a prompt's KV into its slots and return its verified states. None if it is a
        miss."""
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
        """Return the frames of the prompt's payload. Raises ``SkippedError`` for invalid slots,
        and for a payload larger than ``pinned_bytes_max``."""
        stage.caches.check_slots(prompt.slots)
        layers = stage.layers(len(prompt.tokens))
        nbytes = sum(layer.nbytes for layer in layers)
        if nbytes > (self._config.pinned_bytes_max or _PROMPT_BYTES_MAX):
            raise SkippedError(
                f"{len(prompt.tokens)} tokens are {nbytes} bytes, more than pinned_bytes_max"
            )
        return layers

    def _skipped(self, reason: SkippedError) -> None:
        """Log each reason once, because such prompts may come in every step."""
        text = str(reason)
        if text not in self._reasons and len(self._reasons) < _REASONS_MAX:
            self._reasons.add(text)
            logger.info("prompts skipped reason=%s", text)

    def _dropped(self, reason: ObjkvError) -> bool:
        if isinstance(reason, SkippedError):
            self._skipped(reason)
            return False
        self._recorder.count("save_errors")
        self._trouble.failed(reason)
        return False

    def _refuse_closed(self) -> None:
        if self._closed:
            raise TransferError("the connector is closed")
