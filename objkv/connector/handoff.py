"""The connector for vLLM's old V0 interface: one process stores the KV and hidden states of whole
prompts, and another uses them as input. The node's agent reads and saves them. Legacy: vLLM removed
this interface with its V0 engine, so V0's objects have no types here. No other module imports this
one, and nothing here imports vLLM. ``docs/models.md`` specifies names and frames. Source: vLLM
0.6-0.10, ``worker/model_runner.py``, and ``get_kv_cache_shape`` in ``attention/backends``."""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import accumulate, chain, pairwise
from threading import Event
from time import monotonic, sleep
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from objkv.agent.client import CALL_S
from objkv.agent.messages import is_held_back
from objkv.agent.payloads import (
    PayloadReader,
    PayloadTransfer,
    PayloadWriter,
    ReadOutcome,
    WriteOutcome,
)
from objkv.assembly.link import AgentLink, Replica
from objkv.background import Steps, StepThread
from objkv.codec.values import Claim, LayerSpec
from objkv.config import Config, load_config
from objkv.connector.guard import guarded
from objkv.connector.model.weights import read_weights
from objkv.connector.wiring import writer_name
from objkv.errors import ConfigError, ObjkvError, StoreUnavailable, TransferError
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import GroupIdentity, Identity, identity_path, name_model, sealed_extra
from objkv.keys.prefix import encode_tokens, next_hash, root_hash
from objkv.keys.topology import RankShard, Topology
from objkv.transfer.paging import DTYPE_NAMES

logger = logging.getLogger(__name__)
T = TypeVar("T")
Agreement = Callable[[bool], bool]
"""A vote of the ranks that compute together, since one that computes would wait for ever for one
that skips: whether all vote True. All call it equally often. Bounded, and never raises."""
_PROMPT_BYTES_MAX, _REASONS_MAX = 1 << 30, 16
"""Largest payload unless ``pinned_bytes_max`` is set, and most different reasons to log."""
_STORED_S, _PAUSE_S, _LOOK_S = 5.0, 30.0, 0.005
"""How long a send waits until the store has what the agent has, how long none waits after one that
did in vain, and how often it looks."""
_HAS_IT = {WriteOutcome[name] for name in ("ACCEPTED", "HELD_BACK", "EXISTED", "REPEATED")}
Pages = Sequence[np.ndarray]
"""The bytes of each frame."""
_BESIDES = ("lora_requests", "prompt_adapter_requests", "multi_modal_kwargs", "inputs_embeds")
"""Inputs beside tokens that may change their KV. A model input has some of them, by version."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by element size. Elements are copied as integers, because some devices cannot copy
fp8 by index, and copying floats may change the bits of a NaN."""
_LAST, _BETWEEN = "hidden_states", "intermediate."
"""Name of the last stage's output, and prefix of those of others, which the model chooses."""


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
    """Return the prompts that this step computes whole, and whether it consists of them only, so
    that their states are its whole output. Waits for the device. Raises ``SkippedError`` if they
    cannot be separated, or if token ids alone do not determine their KV."""
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
    """Return the identity of hand-offs for V0's ``VllmConfig``, equal on every rank and engine that
    may receive them. Reads the model's files, which may take seconds. Raises ``ConfigError``."""
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


class _Handoff(PayloadTransfer):
    """A payload that the agent reads or saves while the forward thread waits."""

    def __init__(self, claim: Claim, layers: tuple[LayerSpec, ...], deadline: float) -> None:
        super().__init__(claim, layers, deadline)
        self.pages: Pages = []
        self._outcome: ReadOutcome | WriteOutcome | None = None
        self._ended = Event()

    def take_pages(self, pages: Sequence[memoryview]) -> None:
        self.pages = [np.frombuffer(one, np.uint8).copy() for one in pages]

    def write_pages(self, pages: memoryview) -> None:
        np.concatenate(self.pages, out=np.frombuffer(pages, np.uint8))

    def end(self, outcome: ReadOutcome | WriteOutcome, nbytes: int) -> None:
        self._outcome = outcome
        self._ended.set()

    def wait(self) -> ReadOutcome | WriteOutcome | None:
        self._ended.wait(max(0.0, self.deadline - monotonic()))
        return self._outcome


class HandoffStage:
    """One step's caches and the form of its output, on this rank. vLLM owns the tensors."""

    def __init__(
        self, executable: Any, model: Any, rank: RankShard, group: GroupIdentity, caches: Any
    ) -> None:
        """Raises ``SkippedError`` for other layers or caches than the rank may have."""
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

    def handoff(self, namespace: str, prompt: HandoffPrompt, deadline: float) -> _Handoff:
        """Return the payload of a prompt, whose claim is that of a chunk which is the whole prompt.
        Raises ``SkippedError`` for slots that no cache has."""
        if int(prompt.slots.max()) >= self._slots:
            raise SkippedError(f"slots outside the {self._slots} slots of the KV caches")
        tokens, states = len(prompt.tokens), DTYPE_NAMES[self._dtype]
        rows = tokens, self._heads, 1, self._content
        kv = [LayerSpec(name, dtype, rows) for name, dtype in self._dtypes.items()]
        own = [LayerSpec(n, states, (tokens, 1, 1, width)) for n, width in self._widths.items()]
        root = root_hash(namespace)
        digest = next_hash(root, encode_tokens(prompt.tokens))
        key = ChunkKey(namespace, digest, 0, self.rank.shard)
        return _Handoff(Claim(key, root, 0, tokens), (*kv, *own), deadline)

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
    if world % tp_size or rank >= world:
        raise ConfigError(f"rank {rank} of {world} has no group of {tp_size} ranks")
    # All ranks of the world must make each group, also the ranks outside it.
    members = [list(range(first, first + tp_size)) for first in range(0, world, tp_size)]
    groups = [dist.new_group(ranks, timeout=timeout, backend="gloo") for ranks in members]
    return RankAgreement(groups[rank // tp_size])


class HandoffConnector:
    """Implements vLLM's V0 ``KVConnectorBase``. The forward thread calls all methods. They raise
    nothing, and wait for their deadline at most, or 2 s longer for an agent that hangs. Source of
    the contract: vLLM 0.6-0.10, ``distributed/kv_transfer/kv_connector/base.py``."""

    def __init__(
        self, rank: int, local_rank: int, config: Any, *, agree: Agreement | None = None
    ) -> None:
        """``config``: V0's ``VllmConfig``. ``rank``: in the world; tensor-parallel ranks of one
        stage are consecutive. ``agree``: by default by torch.distributed, which must be initialized
        if there are several ranks. Raises ``ConfigError``."""
        transfer, self._model = config.kv_transfer_config, config.model_config
        settings = load_config(transfer.kv_connector_extra_config)
        self._identity = read_handoff_identity(config, settings)
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
        tensor-parallel ranks have stored or dropped each prompt, and nothing is read any more."""
        self._send(model_executable, model_input, kv_caches, hidden_or_intermediate_states)
        self._agree(True)  # only to wait for the others

    def recv_kv_caches_and_hidden_states(
        self, model_executable: Any, model_input: Any, kv_caches: list[torch.Tensor]
    ) -> tuple[Any, bool, Any]:
        """Receive the prompts of the step that is about to be computed. Writes only their slots,
        each prompt's after all its KV and states were verified. Returns the states of all tokens
        and True if the step is of whole prompts and every rank of the group received all of them,
        otherwise None and False: compute the whole step. ``model_input`` is unchanged."""
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
            prompts, _ = read_prompts(model_input)
            for prompt in prompts:
                stage = HandoffStage(executable, self._model, self._rank, self._group, caches)
                sent += self._save(stage, prompt, states, deadline)
            if sent:
                self._await_stored(sent, deadline)
        except ObjkvError as exc:
            self._skip(exc)

    @guarded(None)
    def _receive(self, executable: Any, model_input: Any, caches: Any) -> Any:
        deadline, received = monotonic() + self._load_s, list[Pages]()
        try:
            prompts, is_whole = read_prompts(model_input)
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
            one = stage.handoff(self._namespace, prompt, deadline)
            if not stage.rank.writes(one.claim.key.prefix_hash):
                return []  # another rank has the same shard and saves it
            one.pages = stage.gather(prompt, states)
        except SkippedError as exc:
            return self._skip(exc) or []
        self._writer.write(one)
        return [one.claim] if one.wait() in _HAS_IT else []

    def _load(self, stage: HandoffStage, prompt: HandoffPrompt, deadline: float) -> Pages | None:
        """Load a prompt's KV into its slots. Returns the pages of its states, None for a miss."""
        one = stage.handoff(self._namespace, prompt, deadline)
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
            if not any(one is None or is_held_back(one[field]) for one in found):
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
        if (future := self._lookups.start(question)) is None:
            raise StoreUnavailable("this replica ends")
        return cast("T", future.result())

    def _skip(self, reason: ObjkvError) -> Any:
        """Log each reason once, because such prompts may come in every step. Returns None."""
        if str(reason) not in self._said and len(self._said) < _REASONS_MAX:
            self._said.add(str(reason))
            logger.info("not handed over reason=%s", reason)
