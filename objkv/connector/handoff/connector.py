"""Hand-offs for vLLM's V0 engines: one process stores the KV and hidden states of whole prompts,
and another uses them as input. The node's agent reads and saves them, as it does chunks.

Legacy: vLLM removed this interface with its V0 engine. Nothing here imports vLLM.
"""

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Event
from time import monotonic, sleep
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from objkv.agent.client import CALL_S
from objkv.agent.messages import is_held
from objkv.agent.payloads import (
    PayloadReader,
    PayloadTransfer,
    PayloadWriter,
    ReadOutcome,
    WriteOutcome,
)
from objkv.assembly.link import AgentLink, Replica
from objkv.background import Steps, StepThread
from objkv.codec.payload import Claim, LayerSpec
from objkv.config import load_config
from objkv.connector.guard import guarded
from objkv.connector.handoff import step
from objkv.connector.handoff.step import HandoffPrompt, HandoffStage, Pages, SkippedError
from objkv.connector.wiring import writer_name
from objkv.errors import ConfigError, ObjkvError, StoreUnavailable
from objkv.keys.identity import identity_path
from objkv.keys.topology import Topology

logger = logging.getLogger(__name__)
T = TypeVar("T")
Agreement = Callable[[bool], bool]
"""A vote of the ranks that compute together, since one that computes would wait for ever for one
that skips: whether all vote True. All call it equally often. Bounded, and never raises."""
_NOTHING: Any = None
_PROMPT_BYTES_MAX, _REASONS_MAX = 1 << 30, 16
"""Largest payload unless ``pinned_bytes_max`` is set, and most different reasons to log."""
_STORED_S, _PAUSE_S, _LOOK_S = 5.0, 30.0, 0.005
"""How long a send waits until the store has what the agent has, how long none waits after one that
did in vain, and how often it looks."""
_HAS_IT = {WriteOutcome[name] for name in ("ACCEPTED", "HELD_BACK", "EXISTED", "REPEATED")}


class RankAgreement:
    """An ``Agreement`` over a process group of its own. A rank that misses a result votes False
    from then on, because votes and results can no longer be matched."""

    def __init__(self, group: "dist.ProcessGroup") -> None:
        self._group, self._broken = group, False

    def __call__(self, mine: bool) -> bool:
        """Return whether all ranks vote True."""
        answer = torch.tensor([mine], dtype=torch.int32)
        try:
            if not self._broken:
                dist.all_reduce(answer, op=dist.ReduceOp.MIN, group=self._group)
        except Exception as exc:  # any exception of the backend: a rank is gone or very late
            self._broken = True
            logger.warning("ranks cannot agree, computing everything from now on reason=%s", exc)
        return not self._broken and bool(answer.item())


def open_agreement(rank: int, tp_size: int, timeout_s: float) -> Agreement:
    """Return the agreement of ``rank``'s group of ``tp_size`` consecutive ranks. Every rank of the
    world calls it, in the same order relative to its collective calls. Raises ``ConfigError``."""
    if tp_size == 1:
        return lambda mine: mine
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            f"tensor_parallel_size is {tp_size}, so ranks must agree on what they skip: "
            "initialize torch.distributed before the connector"
        )
    world, timeout = dist.get_world_size(), timedelta(seconds=timeout_s)
    if world % tp_size or not 0 <= rank < world:
        raise ConfigError(f"rank {rank} of {world} has no group of {tp_size} ranks")
    # All ranks of the world must make each group, also the ranks outside it.
    members = [list(range(first, first + tp_size)) for first in range(0, world, tp_size)]
    groups = [dist.new_group(ranks, timeout=timeout, backend="gloo") for ranks in members]
    return RankAgreement(groups[rank // tp_size])


class _Handoff(PayloadTransfer):
    """A payload that the agent reads or saves while the forward thread waits."""

    def __init__(self, claim: Claim, layers: tuple[LayerSpec, ...], deadline: float) -> None:
        super().__init__(claim, layers, deadline)
        self.pages: Pages = []
        self._outcome: ReadOutcome | WriteOutcome | None = None
        self._ended = Event()

    def take(self, pages: Sequence[memoryview]) -> None:
        self.pages = [np.frombuffer(one, np.uint8).copy() for one in pages]

    def write(self, pages: memoryview) -> None:
        np.concatenate(self.pages, out=np.frombuffer(pages, np.uint8))

    def end(self, outcome: ReadOutcome | WriteOutcome, nbytes: int) -> None:
        self._outcome = outcome
        self._ended.set()

    def wait(self) -> ReadOutcome | WriteOutcome | None:
        self._ended.wait(max(0.0, self.deadline - monotonic()))
        return self._outcome


class HandoffConnector:
    """Implements vLLM's V0 ``KVConnectorBase``. The forward thread calls all methods. They raise
    nothing, and wait for their deadline at most, or 2 s longer for an agent that hangs. Source of
    the contract: vLLM 0.6-0.10, ``distributed/kv_transfer/kv_connector/base.py``."""

    def __init__(
        self, rank: int, local_rank: int, config: Any, *, agree: Agreement | None = None
    ) -> None:
        """Raises ``ConfigError``, which names the fix. ``config``: V0's ``VllmConfig``. ``rank``:
        in the world; tensor-parallel ranks of one stage are consecutive. ``agree``: by default by
        torch.distributed, which must be initialized if there are several ranks."""
        transfer, self._model = config.kv_transfer_config, config.model_config
        settings = load_config(transfer.kv_connector_extra_config)
        self._identity = step.read_handoff_identity(config, settings)
        self._namespace, group = self._identity.namespace(), self._identity.groups[0]
        layers, heads, self._group = len(group.layers), group.heads, group
        size = config.parallel_config.tensor_parallel_size
        try:
            held = Topology(size, heads, (layers,)).held(rank % size)
        except ValueError as exc:
            raise ConfigError(str(exc)) from exc
        assert held is not None
        self._rank = held
        self._load_s = settings.step_load_deadline_ms / 1000
        self._save_s = settings.save_deadline_ms / 1000
        # Ranks wait for each other twice as long as one of them may wait for its agent.
        self._agree = agree or open_agreement(rank, size, 2 * max(self._load_s, self._save_s))
        self._is_announced, self._hasty_until, self._said = False, 0.0, set[str]()
        nbytes = settings.pinned_bytes_max or _PROMPT_BYTES_MAX
        writer = writer_name(self)
        link = AgentLink(settings, Replica(str(getattr(transfer, "engine_id", writer))))
        self._link = link
        self._reader = PayloadReader(link.connect, "hand-offs")
        self._writer = PayloadWriter(link.connect, nbytes, "hand-offs", writer=writer, puts=True)
        self._lookups = StepThread("objkv-lookup", answer_s=CALL_S)
        link.await_agent()
        logger.info("objkv hand-off ready namespace=%s rank=%d", self._namespace, rank)

    def send_kv_caches_and_hidden_states(
        self,
        model_executable: Any,
        model_input: Any,
        kv_caches: list[torch.Tensor],
        hidden_or_intermediate_states: Any,
    ) -> None:
        """Store every whole prompt of the step that was just computed. When it returns, all
        tensor-parallel ranks have stored or dropped each prompt, so a receiver can start at once,
        and nothing is read any more."""
        self._send(model_executable, model_input, kv_caches, hidden_or_intermediate_states)
        self._agree(True)  # only to wait for the others

    def recv_kv_caches_and_hidden_states(
        self, model_executable: Any, model_input: Any, kv_caches: list[torch.Tensor]
    ) -> tuple[Any, bool, Any]:
        """Receive the prompts of the step that is about to be computed. Writes only their slots,
        each prompt's after all its KV and states were verified. Returns the states of all tokens
        and True, if the step consists of whole prompts and every rank of the group received all of
        them, otherwise None and False: compute the whole step. ``model_input`` is unchanged."""
        states = self._receive(model_executable, model_input, kv_caches)
        is_whole = self._agree(states is not None)
        return states if is_whole else None, is_whole, model_input

    @guarded(None)
    def close(self) -> None:
        """Close connections. Later calls are misses or drops. Idempotent."""
        self._reader.close()
        self._writer.close(0.0)
        self._lookups.close(0.0)
        self._link.calls.close()

    @guarded(None)
    def _send(self, executable: Any, model_input: Any, caches: Any, states: Any) -> None:
        deadline, sent = monotonic() + self._save_s, list[Claim]()
        try:
            prompts, _ = step.read_prompts(model_input)
            for prompt in prompts:
                stage = HandoffStage(executable, self._model, self._rank, self._group, caches)
                sent += self._save(stage, prompt, states, deadline)
            if sent:
                self._await_stored(sent, deadline)
        except ObjkvError as exc:
            self._skip(exc)

    @guarded(_NOTHING)
    def _receive(self, executable: Any, model_input: Any, caches: Any) -> Any:
        deadline, received = monotonic() + self._load_s, list[Pages]()
        try:
            prompts, is_whole = step.read_prompts(model_input)
            if not is_whole:
                return None
            stage = HandoffStage(executable, self._model, self._rank, self._group, caches)
            for prompt in prompts:
                if (pages := self._load(stage, prompt, deadline)) is None:
                    return None
                received.append(pages)
            return stage.join(received)
        except ObjkvError as exc:
            return self._skip(exc)

    def _save(
        self, stage: HandoffStage, prompt: HandoffPrompt, states: Any, deadline: float
    ) -> list[Claim]:
        """Save a prompt. Returns its claim, or nothing if it is dropped."""
        try:
            one = _Handoff(stage.claim(self._namespace, prompt), stage.layers(prompt), deadline)
            if not stage.rank.writes(one.claim.key.prefix_hash):
                return []  # another rank has the same shard and saves it
            one.pages = stage.gather(prompt, states)
        except SkippedError as exc:
            return self._skip(exc) or []
        self._writer.write(one)
        return [one.claim] if one.wait() in _HAS_IT else []

    def _load(self, stage: HandoffStage, prompt: HandoffPrompt, deadline: float) -> Pages | None:
        """Load a prompt's KV into its slots. Returns the pages of its states, None for a miss."""
        one = _Handoff(stage.claim(self._namespace, prompt), stage.layers(prompt), deadline)
        key = one.claim.key
        find = self._link.calls.find(self._namespace, [key.prefix_hash], (key.field,))
        (shards,) = self._ask(find)
        if shards is None:
            return None
        self._reader.read([one])
        return stage.scatter(prompt, one.pages) if one.wait() is ReadOutcome.READ else None

    def _await_stored(self, claims: Sequence[Claim], deadline: float) -> None:
        """Wait until the store has what the agent has, so that other nodes find it."""
        end = min(deadline, monotonic() + _STORED_S)
        field, hashes = claims[0].key.field, [claim.key.prefix_hash for claim in claims]
        while monotonic() >= self._hasty_until:
            found = self._ask(self._link.calls.find(self._namespace, hashes, (field,)))
            if not any(one is None or is_held(one[field]) for one in found):
                if not self._is_announced:  # only now, since the store works
                    documents, text = self._link.calls, self._identity.canonical()
                    put = documents.put_if_absent(identity_path(self._namespace), text)
                    self._ask(put)
                    self._is_announced = True
                return
            if monotonic() >= end:
                self._hasty_until = end + _PAUSE_S
            sleep(_LOOK_S)

    def _ask(self, question: Steps[T]) -> T:
        """Wait for what the agent answers. Raises ``StoreError``."""
        future = self._lookups.start(question)
        if future is None:
            raise StoreUnavailable("this replica ends")
        return cast("T", future.result())

    def _skip(self, reason: ObjkvError) -> Any:
        """Log each reason once, because such prompts may come in every step. Returns None."""
        if str(reason) not in self._said and len(self._said) < _REASONS_MAX:
            self._said.add(str(reason))
            logger.info("not handed over reason=%s", reason)
