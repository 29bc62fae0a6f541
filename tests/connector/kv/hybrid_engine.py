"""vLLM's own scheduler and objkv's connector, whole, over a model that only notes what it computes.

The model's "KV" of a token is the token, its position and a digest of all tokens before it; its
"state" is a digest of all tokens. Before it computes anything it looks whether each of its groups
holds, where vLLM's block tables say, what attention or the recurrence would read: a block that was
loaded wrong, or not at all, is seen at the step that would have used it. All groups share one
storage, as vLLM's do, so that a block that was another group's holds rubbish.
"""

import copy
import hashlib
import itertools
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch

# It keeps the traceback of an import that fails, and so the first engine that would import it.
import vllm.multimodal.media.audio  # noqa: F401

from tests.connector.kv.hybrid_layout import (
    Layer,
    Layout,
    caches_of,
    engine_config,
    kv_cache_config,
    layers_of,
)
from tests.support.served import ServedAgent

_PATIENCE_S = 120.0


@dataclass
class _Running:
    """A request as the worker knows it."""

    tokens: list[int]
    blocks: list[list[int]]
    computed: int
    state_at: int | None = None
    since: int = 0
    """Tokens that were computed when vLLM admitted it."""


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    reason: str = ""
    loaded: int = 0
    """Prompt tokens that a connector brought."""
    local: int = 0
    """Prompt tokens before those that vLLM had, or needed not."""


def digest(tokens: Sequence[int]) -> bytes:
    """16 bytes that say what all these tokens were, and none of which are all zero."""
    return hashlib.blake2b(repr(list(tokens)).encode(), digest_size=16).digest()


def next_token(tokens: Sequence[int]) -> int:
    return 3 + digest(tokens)[0] % 50


def said(prompt: Sequence[int], count: int) -> list[int]:
    """What the model answers, without any cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Engine:
    """One replica on the stores in ``folder``. A context manager."""

    def __init__(self, layout: Layout, folder: Path, **settings: Any) -> None:
        from vllm.distributed import parallel_state
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.v1.core.kv_cache_utils import (
            generate_scheduler_kv_cache_config,
            resolve_kv_cache_block_sizes,
        )
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        from objkv.config import load_config
        from objkv.connector.kv.connector import ObjKVConnector
        from objkv.connector.model.identity import read_geometry

        self.layout = layout
        self._config = self._configured(folder, settings)
        extra = self._config.kv_transfer_config.kv_connector_extra_config
        self.agents: list[ServedAgent] = []
        """Its own, one for each node; none if the settings name one."""
        if "agent" not in settings:
            self.agents = [ServedAgent(extra) for _ in range(layout.nodes)]
            extra["agent"] = self.agents[0].url
        self._kv = kv_cache_config(layout)
        self.geometry = read_geometry(self._config, self._kv, load_config(extra))
        sizes = resolve_kv_cache_block_sizes(self._kv, self._config)
        self._kv.hash_block_size = sizes[1]
        self.workers: list[Any] = []
        self.caches: list[dict[str, torch.Tensor]] = []
        """Of each rank."""
        self._storages: list[torch.Tensor] = []
        for rank in range(layout.ranks):
            stage, tp_rank = divmod(rank, layout.tp_size)
            kv = kv_cache_config(layout, stage)
            with patch.multiple(
                parallel_state,
                get_tensor_model_parallel_rank=lambda rank=tp_rank: rank,
                get_pp_group=lambda stage=stage: Mock(rank_in_group=stage),
            ):
                node = rank * layout.nodes // layout.ranks
                worker = ObjKVConnector(self._on_node(node), KVConnectorRole.WORKER, kv)
                caches, storage = caches_of(layout, kv)
                worker.register_kv_caches(caches)
            self.workers.append(worker)
            self.caches.append(caches)
            self._storages.append(storage)
        self._aggregator = KVOutputAggregator(layout.ranks)
        self.scheduler: Any = Scheduler(
            vllm_config=self._config,
            kv_cache_config=generate_scheduler_kv_cache_config([self._kv]),
            structured_output_manager=StructuredOutputManager(self._config),
            block_size=sizes[0],
            hash_block_size=sizes[1],
            log_stats=True,
        )
        self._sizes = sizes
        self._layers, self._numbers = layers_of(layout), itertools.count(1)
        self._running: dict[str, _Running] = {}

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.shutdown()
        for agent in self.agents:
            agent.close()

    @property
    def worker(self) -> Any:
        return self.workers[0]

    def _configured(self, folder: Path, settings: dict[str, Any]) -> Any:
        return engine_config(self.layout, folder, settings)

    @property
    def agent(self) -> ServedAgent | None:
        return self.agents[0] if self.agents else None

    def _on_node(self, node: int) -> Any:
        config = copy.copy(self._config)
        transfer = config.kv_transfer_config = copy.copy(config.kv_transfer_config)
        if self.agents:
            urls = {"agent": self.agents[node].url}
            transfer.kv_connector_extra_config = transfer.kv_connector_extra_config | urls
        return config

    def run(self, prompts: Sequence[Sequence[int]], **how: Any) -> list[Answer]:
        """Answers to prompts that arrive at once. ``how``: see ``_add``."""
        answers = {self._add(prompt, **how): Answer() for prompt in prompts}
        deadline = time.monotonic() + _PATIENCE_S
        while self.scheduler.has_unfinished_requests():
            assert time.monotonic() < deadline
            self._step(answers)
        return list(answers.values())

    def save_all(self) -> None:
        """Wait until everything that was taken out is stored, or with an agent of another process
        handed over."""
        assert all(worker.worker.saver.drain(_PATIENCE_S) for worker in self.workers)
        for agent in self.agents:
            agent.settle()

    def forget(self) -> None:
        while self.scheduler.has_requests():
            self._step({})
        assert self.scheduler.reset_prefix_cache()

    def _add(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 3,
        salt: str | None = None,
        **transfer: Any,
    ) -> str:
        """``transfer``: its ``kv_transfer_params``."""
        from vllm import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        name = f"r{next(self._numbers)}"
        params = SamplingParams(
            temperature=0,
            ignore_eos=True,
            max_tokens=max_tokens,
            extra_args={"kv_transfer_params": transfer},
        )
        params.update_from_generation_config({}, None)
        hasher = get_request_block_hasher(self._sizes[1], hash_function)
        request = Request(name, list(prompt), params, None, cache_salt=salt, block_hasher=hasher)
        self.scheduler.add_request(request)
        return name

    def _step(self, answers: dict[str, Answer]) -> None:
        output = self.scheduler.schedule()
        result = self._execute(output)
        for client in self.scheduler.update_from_output(output, result).values():
            for one in client.outputs:
                answer = answers.get(one.request_id, Answer())
                answer.tokens += one.new_token_ids
                if one.finish_reason is not None:
                    answer.reason = str(one.finish_reason)
                if (stats := one.prefill_stats) is not None:
                    answer.loaded = stats.num_external_cached_tokens
                    answer.local = stats.num_local_cached_tokens

    def _execute(self, output: Any) -> Any:
        """As ``execute_model`` in ``v1/worker/gpu_model_runner.py`` and the mixin for connectors of
        vLLM 0.32, in their order."""
        sent = pickle.dumps(output.kv_connector_metadata)
        plans = [pickle.loads(sent) for _ in self.workers]
        for worker, plan in zip(self.workers, plans, strict=True):
            worker.handle_preemptions(plan)
        self._update_states(output)
        for worker, plan in zip(self.workers, plans, strict=True):
            worker.bind_connector_metadata(plan)
            if output.has_sync_kv_loads:
                worker.start_load_kv(None)
        sampled = self._forward(output)
        if not output.has_sync_kv_loads:
            for worker in self.workers:
                worker.start_load_kv(None)
        results = [self._results(worker, output, sampled) for worker in self.workers]
        return self._aggregator.aggregate(results)

    def _results(self, worker: Any, output: Any, sampled: dict[str, list[int]]) -> Any:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        worker.wait_for_save()
        done = worker.get_transfer_results(output.finished_req_ids)
        told = KVConnectorOutput(
            finished_sending=done.finished_sending,
            finished_recving=done.finished_recving,
            failed_recving=done.failed_recving or set(),
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        names = list(sampled)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=told,
        )

    def _update_states(self, output: Any) -> None:
        for name in output.finished_req_ids:
            self._running.pop(name, None)
        for storage in self._storages:
            for block in output.new_block_ids_to_zero or ():
                storage[block] = 0
            for source, target in output.kv_cache_block_copies or ():
                storage[target] = storage[source]
        for new in output.scheduled_new_reqs:
            self._running[new.req_id] = _Running(
                list(new.prompt_token_ids),
                [list(ids) for ids in new.block_ids],
                new.num_computed_tokens,
                since=new.num_computed_tokens,
            )
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            one, ids = self._running[name], cached.new_block_ids[i]
            one.computed = cached.num_computed_tokens[i]
            if name in cached.resumed_req_ids:
                one.since = one.computed
                one.blocks = [list(group) for group in ids]
                one.state_at = None
            elif ids is not None:
                for table, group in zip(one.blocks, ids, strict=True):
                    table += group

    def _forward(self, output: Any) -> dict[str, list[int]]:
        scheduled = output.num_scheduled_tokens
        for name, count in scheduled.items():
            self._copy_states(self._running[name], count)
        for name in scheduled:
            self._look_at_states(name)
            self._look(name, rings=True)  # the step's own tokens overwrite them
        # A layer writes the KV of all requests before any attends: they may share blocks at once.
        for name, count in scheduled.items():
            self._write(self._running[name], count)
        for name in scheduled:
            self._look(name, rings=False)
        sampled = {}
        for name, count in scheduled.items():
            one = self._running[name]
            sampled[name] = []
            if one.computed + count == len(one.tokens):
                one.tokens.append(next_token(one.tokens))
                sampled[name] = one.tokens[-1:]
        return sampled

    def _copy_states(self, one: _Running, count: int) -> None:
        """``preprocess_mamba`` in ``v1/worker/mamba_utils.py``, without speculation."""
        before = one.state_at
        for layer in (layer for layer in self._layers if layer.kind == "mamba"):
            last = (one.computed - 1) // layer.block_size if before is None else before
            one.state_at = now = -(-(one.computed + count) // layer.block_size) - 1
            if last not in (-1, now):
                cache, table = self.caches[0][layer.name], one.blocks[layer.table]
                cache[table[now]] = cache[table[last]]

    def _look_at_states(self, name: str) -> None:
        """That each state the next tokens go on from is that of the tokens before."""
        one = self._running[name]
        for layer in self._layers:
            if layer.kind == "mamba" and one.computed:
                assert one.state_at is not None
                place = one.blocks[layer.table][one.state_at]
                assert place != 0, (name, "a state in the null block")
                state = self.caches[0][layer.name][place].flatten().contiguous()
                expected = digest(one.tokens[: one.computed])
                assert state.numpy().tobytes() == expected, (name, layer, one.computed)

    def _look(self, name: str, *, rings: bool) -> None:
        """That everything the next tokens read is what was computed for it, by whomever."""
        one = self._running[name]
        for layer in self._layers:
            table = one.blocks[layer.table]
            if layer.kind == "mamba" or (layer.kind == "ring") != rings:
                continue
            for token in layer.needed(one.computed):
                if layer.kind == "replayed" and token < one.since:
                    continue  # vLLM computes this window anew, with less of what came before
                place, slot = layer.place(table, token)
                assert place != 0, (name, layer, token, "in the null block")
                for rank, heads in layer.holders(token):
                    found = self.caches[rank][layer.name][place, :, slot]
                    expected = self._content(layer, one.tokens, token)[heads]
                    assert torch.equal(found, expected), (name, layer, rank, token, one.computed)

    def _write(self, one: _Running, count: int) -> None:
        end = one.computed + count
        for layer in self._layers:
            table = one.blocks[layer.table]
            if layer.kind == "mamba":
                cache = self.caches[0][layer.name]
                state = torch.frombuffer(bytearray(digest(one.tokens[:end])), dtype=torch.int8)
                cache[table[(end - 1) // layer.block_size]] = state
                continue
            for token in range(one.computed, end):
                if (token + 1) % layer.ratio:
                    continue  # its state is not complete
                block, slot = layer.place(table, token)
                if block != 0:
                    for rank, heads in layer.holders(token):
                        content = self._content(layer, one.tokens, token)[heads]
                        self.caches[rank][layer.name][block, :, slot] = content

    def _content(self, layer: Layer, tokens: Sequence[int], token: int) -> torch.Tensor:
        """The KV of one token, or the state that it completes, ``[heads, content]``."""
        before = int.from_bytes(digest(tokens[:token])[:2], "big")
        values = [before, 100 * token + len(layer.name), tokens[token], layer.words]
        content = torch.tensor(values[: layer.words], dtype=torch.float32).view(layer.heads, -1)
        return content.repeat(1, self.layout.head_size) if layer.heads > 1 else content
