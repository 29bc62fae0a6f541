"""The hand-off of vLLM's V0 engines, for those that still run one: KV and hidden states of prompts
that one process computed become the input of another, over the same stores as chunks.

Legacy: vLLM removed this interface with its V0 engine. Nothing here imports vLLM. An engine of
today uses ``ObjKVConnector``, which shares every prefix; a hand-off is of whole prompts only.

No method raises into the engine once it runs, and none waits longer than its deadline.
"""

import logging
import os
import socket
from collections.abc import Sequence
from time import monotonic, time

import numpy as np
import torch

from objkv.assembly.backends import check_backends, open_backends
from objkv.assembly.seal import open_seal
from objkv.cache.tiered import CacheSettings, ChunkCache
from objkv.codec.payload import LayerSpec, Provenance, header_room
from objkv.config import Config, load_config
from objkv.connector.aggregate import Agreement, open_agreement
from objkv.connector.guard import guarded
from objkv.connector.handoff_batch import LeftAloneError, Prompt, read_batch
from objkv.connector.handoff_keys import handoff_claim, read_handoff_identity
from objkv.connector.handoff_stage import Stage, Stages
from objkv.connector.handoff_store import HandoffStore
from objkv.connector.handoff_types import HandoffConfig, ModelExecutable, ModelInput, States
from objkv.errors import ObjkvError, TransferError
from objkv.keys.prefix import token_digest
from objkv.telemetry import NullRecorder, Recorder, Trouble

logger = logging.getLogger(__name__)

_NOTHING: States | None = None
_REASONS_MAX = 16
"""Why prompts were left alone, told once each."""
_BACKGROUND_S = 1.0
"""How long ``close`` waits for what nobody needs: a copy to the hot store."""


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
        self._identity = read_handoff_identity(config, self._config)
        self._namespace = self._identity.namespace()
        tp_size = config.parallel_config.tensor_parallel_size
        self._stages = Stages(config.model_config, self._identity.groups[0], rank, tp_size)
        self._writer = f"{socket.gethostname()}:{os.getpid()}:{local_rank}"
        self._trouble = Trouble(logger, "hand-offs")
        self._reasons: set[str] = set()
        self._closed = False
        # Ranks wait for each other as long as one of them may wait for the stores, and then some.
        bound_ms = max(self._config.step_load_deadline_ms, self._config.save_deadline_ms)
        self._agree = agree or open_agreement(rank, tp_size, timeout_s=2 * bound_ms / 1000)
        self._backends = open_backends(self._config, self._recorder)
        check_backends(self._backends, self._config)
        settings = _cache_settings(self._config, self._writer)
        self._cache = ChunkCache(
            self._backends.bulk,
            self._backends.hot,
            self._backends.index,
            settings,
            self._recorder,
            seal=open_seal(self._config),
        )
        self._store = HandoffStore(
            self._backends,
            self._cache,
            self._identity,
            codec="none" if self._config.codec == "auto" else self._config.codec,
            recorder=self._recorder,
        )
        logger.info(
            "objkv hand-off ready model=%s namespace=%s rank=%d",
            self._identity.model,
            self._namespace,
            rank,
        )

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

    def _save(self, stage: Stage, prompt: Prompt, given: States, deadline: float) -> None:
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

    def _load(self, stage: Stage, prompt: Prompt, deadline: float) -> list[memoryview] | None:
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

    def _layers(self, stage: Stage, prompt: Prompt) -> list[LayerSpec]:
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


def _cache_settings(config: Config, writer: str) -> CacheSettings:
    """Nothing is promoted: a prompt is handed over once, as a rule."""
    return CacheSettings(
        writer,
        config.ttl_s,
        config.lease_ms,
        config.hot_payload_bytes_max,
        config.hot_save_bytes_max,
    )
