"""vLLM's own scheduler and objkv's connector, whole, over a model that only notes what it computes.

The model's "KV" of a token is the token, its position and a digest of all tokens before it; its
"state" is a digest of all tokens. Before it computes anything it looks whether each of its groups
holds, where vLLM's block tables say, what attention or the recurrence would read: a block that was
loaded wrong, or not at all, is seen at the step that would have used it. All groups share one
storage, as vLLM's do, so that a block that was another group's holds rubbish.
"""

import copy
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

_MODEL = Path(__file__).parents[3] / ".cache" / "models" / "notes"
_HEADS = 4
_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Layout:
    """A model's groups, each of one layer, and how vLLM is run."""

    kinds: tuple[tuple[str, int], ...]
    """Per group its kind, and its window in tokens; 0 where it has none. Of ``compressed`` and
    ``ring`` the second is the number of tokens that are compressed into one state."""
    block_sizes: tuple[int, ...]
    chunk_tokens: int = 8
    num_blocks: int = 64
    step_tokens: int = 32
    retention: int | None = 0


@dataclass(frozen=True)
class Layer:
    """One layer's cache."""

    name: str
    table: int
    """Number of its group."""
    kind: str
    window: int
    block_size: int
    words: int
    """Numbers per token or state, at most 4."""

    @property
    def ratio(self) -> int:
        """Tokens per state."""
        return self.window if self.kind == "compressed" else 1

    def needed(self, end: int) -> range:
        """The tokens, or the last tokens of states, that are read to continue after ``end``."""
        match self.kind:
            case "compressed":
                return range(self.window - 1, end, self.window)
            case "ring":
                return range(end // self.window * self.window, end)
            case "sliding_window" | "window_mla" | "replayed":
                return range(max(0, end - (self.window - 1)), end)
            case "chunked_local":
                return range(end // self.window * self.window, end)
        return range(end)

    def place(self, table: Sequence[int], token: int) -> tuple[int, int]:
        """Block and slot of a token, or of the state that it completes."""
        at = 0 if self.kind == "ring" else token // self.block_size
        return table[at], token % self.block_size // self.ratio


def layers_of(layout: Layout) -> list[Layer]:
    """The layers of a model: one per group, or two of different widths."""
    layers = []
    for i, ((kind, window), size) in enumerate(zip(layout.kinds, layout.block_sizes, strict=True)):
        widths = (4, 2) if kind in ("sparse", "compressed") else (4,)
        for j, words in enumerate(widths):
            name = f"layer.{'x' * i}{'.index' * j}"
            layers.append(Layer(name, i, kind, window, size, words))
    return layers


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
    """What came of a prompt."""

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
    """What the model says after ``tokens``."""
    return 3 + digest(tokens)[0] % 50


class Engine:
    """One replica on the stores in ``folder``. A context manager."""

    def __init__(self, layout: Layout, folder: Path, **settings: Any) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.v1.core.kv_cache_utils import (
            generate_scheduler_kv_cache_config,
            resolve_kv_cache_block_sizes,
        )
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        from objkv.connector.kv.connector import ObjKVConnector

        self.layout = layout
        self._config = self._configured(folder, settings)
        self._kv = _kv_cache_config(layout)
        sizes = resolve_kv_cache_block_sizes(self._kv, self._config)
        self._kv.hash_block_size = sizes[1]
        self.worker: Any = ObjKVConnector(self._config, KVConnectorRole.WORKER, self._kv)
        self.caches, self._storage = _caches(layout, self._kv)
        self.worker.register_kv_caches(self.caches)
        self.scheduler: Any = Scheduler(
            vllm_config=self._config,
            kv_cache_config=generate_scheduler_kv_cache_config([self._kv]),
            structured_output_manager=StructuredOutputManager(self._config),
            block_size=sizes[0],
            hash_block_size=sizes[1],
            log_stats=True,
        )
        self._sizes = sizes
        self._layers = layers_of(layout)
        self._running: dict[str, _Running] = {}
        self._count = 0

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()

    def _configured(self, folder: Path, settings: dict[str, Any]) -> Any:
        return _configured(self.layout, folder, settings)

    @property
    def chunk_tokens(self) -> int:
        """The effective chunk."""
        return int(self.worker._geometry.chunk_tokens)

    def run(self, prompts: Sequence[Sequence[int]], *, max_tokens: int = 3) -> list[Answer]:
        """Answers to prompts that arrive at once."""
        answers = {self._add(prompt, max_tokens): Answer() for prompt in prompts}
        deadline = time.monotonic() + _PATIENCE_S
        while self.scheduler.has_unfinished_requests():
            assert time.monotonic() < deadline
            self._step(answers)
        return list(answers.values())

    def save_all(self) -> None:
        """Wait until everything that was taken out is stored."""
        assert self.worker._worker._saver.drain(_PATIENCE_S)

    def forget(self) -> None:
        """Drop the replica's own prefix cache."""
        while self.scheduler.has_requests():
            self._step({})
        assert self.scheduler.reset_prefix_cache()

    def _add(self, prompt: Sequence[int], max_tokens: int) -> str:
        from vllm import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self._count += 1
        name = f"r{self._count}"
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)
        params.update_from_generation_config({}, None)
        hasher = get_request_block_hasher(self._sizes[1], hash_function)
        self.scheduler.add_request(Request(name, list(prompt), params, None, block_hasher=hasher))
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
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        worker = self.worker
        worker.handle_preemptions(output.kv_connector_metadata)
        self._update_states(output)
        worker.bind_connector_metadata(output.kv_connector_metadata)
        if output.has_sync_kv_loads:
            worker.start_load_kv(None)
        sampled = self._forward(output)
        if not output.has_sync_kv_loads:
            worker.start_load_kv(None)
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
        for block in output.new_block_ids_to_zero or ():
            self._storage[block] = 0
        for source, target in output.kv_cache_block_copies or ():
            self._storage[target] = self._storage[source]
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
        for layer in self._layers:
            if layer.kind != "mamba":
                continue
            before = one.state_at
            if before is None:
                before = (one.computed - 1) // layer.block_size
            now = -(-(one.computed + count) // layer.block_size) - 1
            if before not in (-1, now):
                cache, table = self.caches[layer.name], one.blocks[layer.table]
                cache[table[now]] = cache[table[before]]
        sizes = [layer.block_size for layer in self._layers if layer.kind == "mamba"]
        if sizes:
            one.state_at = -(-(one.computed + count) // sizes[0]) - 1

    def _look_at_states(self, name: str) -> None:
        """That each state the next tokens go on from is that of the tokens before."""
        one = self._running[name]
        for layer in self._layers:
            if layer.kind == "mamba" and one.computed:
                assert one.state_at is not None
                place = one.blocks[layer.table][one.state_at]
                assert place != 0, (name, "a state in the null block")
                state = self.caches[layer.name][place].flatten().contiguous()
                expected = digest(one.tokens[: one.computed])
                assert state.numpy().tobytes() == expected, (name, layer, one.computed)

    def _look(self, name: str, *, rings: bool) -> None:
        """That everything the next tokens read is what was computed for it, by whomever."""
        one = self._running[name]
        for layer in self._layers:
            cache, table = self.caches[layer.name], one.blocks[layer.table]
            if layer.kind == "mamba" or (layer.kind == "ring") != rings:
                continue
            for token in layer.needed(one.computed):
                if layer.kind == "replayed" and token < one.since:
                    continue  # vLLM computes this window anew, with less of what came before
                place, slot = layer.place(table, token)
                assert place != 0, (name, layer, token, "in the null block")
                found = cache[place, :, slot].flatten()
                expected = self._content(layer, one.tokens, token)
                assert torch.equal(found, expected), (name, layer, token, one.computed)

    def _write(self, one: _Running, count: int) -> None:
        end = one.computed + count
        for layer in self._layers:
            cache, table = self.caches[layer.name], one.blocks[layer.table]
            if layer.kind == "mamba":
                state = torch.frombuffer(bytearray(digest(one.tokens[:end])), dtype=torch.int8)
                cache[table[(end - 1) // layer.block_size]] = state
                continue
            for token in range(one.computed, end):
                if (token + 1) % layer.ratio:
                    continue  # its state is not complete
                block, slot = layer.place(table, token)
                if block != 0:
                    content = self._content(layer, one.tokens, token).reshape(cache.shape[1], -1)
                    cache[block, :, slot] = content

    def _content(self, layer: Layer, tokens: Sequence[int], token: int) -> torch.Tensor:
        """The KV of one token, or the state that it completes."""
        before = int.from_bytes(digest(tokens[:token])[:2], "big")
        values = [before, 100 * token + len(layer.name), tokens[token], layer.words]
        return torch.tensor(values[: layer.words], dtype=torch.float32)


def _caches(layout: Layout, kv: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Views of one storage, ``[num_blocks, page]``: a block belongs to one group at a time, which
    has the pages of its layers side by side."""
    (page,) = {tensor.block_stride for tensor in kv.kv_cache_tensors}
    generator = torch.Generator().manual_seed(1)
    storage = torch.randint(
        1, 100, (layout.num_blocks, page), generator=generator, dtype=torch.int8
    )
    specs = _specs(layout)
    caches = {}
    for tensor in kv.kv_cache_tensors:
        (name,) = tensor.layers
        spec, start = specs[name], tensor.offset
        if not hasattr(spec, "dtype"):
            shape, strides = (
                (layout.num_blocks, 1, 1, spec.state_content_size_bytes),
                (page, 1, 1, 1),
            )
            caches[name] = storage.as_strided(shape, strides, start)
            continue
        heads, content = spec.num_heads, spec.state_content_size_bytes // 4
        shape = (layout.num_blocks, heads, spec.num_states, content)
        strides = (page // 4, spec.num_states * content, content, 1)
        caches[name] = storage.view(torch.float32).as_strided(shape, strides, start // 4)
    return caches, storage


def _specs(layout: Layout) -> dict[str, Any]:
    """vLLM's spec of each layer."""
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        CircularBufferSpec,
        FullAttentionSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowMLASpec,
        SlidingWindowSpec,
    )

    page = _page_bytes(layout)
    specs: dict[str, Any] = {}
    for layer in layers_of(layout):
        plain: dict[str, Any] = {"head_size_v": 0, "dtype": torch.float32}
        plain["block_size"] = size = layer.block_size
        heads = plain | {"head_size": 1, "num_kv_heads": _HEADS, "page_size_padded": page}
        latent = plain | {"head_size": layer.words, "num_kv_heads": 1}
        match layer.kind:
            case "full":
                spec: Any = FullAttentionSpec(**heads)
            case "mla":
                spec = MLAAttentionSpec(**latent, page_size_padded=page)
            case "sparse" | "compressed":
                spec = MLAAttentionSpec(**latent, tokens_per_state=layer.ratio)
            case "sliding_window":
                spec = SlidingWindowSpec(sliding_window=layer.window, **heads)
            case "window_mla" | "replayed":
                replay = layer.kind == "replayed"
                spec = SlidingWindowMLASpec(
                    sliding_window=layer.window, bounded_replay=replay, **latent
                )
            case "chunked_local":
                spec = ChunkedLocalAttentionSpec(attention_chunk_size=layer.window, **heads)
            case "ring":
                spec = CircularBufferSpec(**latent)
            case _:
                form = ((4,),), (torch.float32,)
                spec = MambaSpec(size, *form, page_size_padded=page, mamba_cache_mode="align")
        specs[layer.name] = spec
    return specs


def _page_bytes(layout: Layout) -> int:
    """Bytes of a block of all layers of the largest group, and some more."""
    return 24 * max(layout.block_sizes) + 32


def _kv_cache_config(layout: Layout) -> Any:
    from vllm.v1.kv_cache_interface import (
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
        UniformTypeKVCacheSpecs,
    )

    page, specs = _page_bytes(layout), _specs(layout)
    groups, tensors = [], []
    for table in range(len(layout.kinds)):
        names = [layer.name for layer in layers_of(layout) if layer.table == table]
        own = {name: specs[name] for name in names}
        spec = own[names[0]] if len(own) == 1 else UniformTypeKVCacheSpecs.from_specs(own)
        groups.append(KVCacheGroupSpec(names, spec))
        offset = 0
        for name in names:
            nbytes = own[name].page_size_bytes
            tensors.append(KVCacheTensor(page * layout.num_blocks, [name], nbytes, page, offset))
            offset += nbytes
    return KVCacheConfig(
        num_blocks=layout.num_blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=groups,
        prefix_cache_retention_interval=layout.retention,
    )


def _configured(layout: Layout, folder: Path, settings: dict[str, Any]) -> Any:
    from vllm.config import KVTransferConfig

    config = copy.copy(_vllm_config())
    config.cache_config = copy.copy(config.cache_config)
    config.scheduler_config = copy.copy(config.scheduler_config)
    states = [i for i, (kind, _) in enumerate(layout.kinds) if kind == "mamba"]
    size = layout.block_sizes[states[0]] if states else layout.block_sizes[0]
    config.cache_config.block_size = size
    config.cache_config.num_gpu_blocks = layout.num_blocks
    config.cache_config.mamba_cache_mode = "align" if states else "none"
    config.cache_config.mamba_block_size = size
    config.scheduler_config.max_num_batched_tokens = layout.step_tokens
    config.scheduler_config.max_num_scheduled_tokens = layout.step_tokens
    patient = {"lookup_deadline_ms": 120_000, "load_deadline_ms": 120_000}
    patient |= {"save_deadline_ms": 600_000, "save_queue_max": 4096, "near_miss_ttl_ms": 0}
    extra = {
        "bulk_url": f"file://{folder}/chunks",
        "index_url": f"sqlite://{folder}/index.sqlite",
        "chunk_tokens": layout.chunk_tokens,
        "admission": "always",
        "codec": "none",
        "model_id": "notes",
        "pinned_bytes_max": 64 << 20,
        "load_threads": 2,
        "save_threads": 2,
    }
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="ObjKVConnector",
        kv_connector_module_path="objkv.connector.kv",
        kv_role="kv_both",
        kv_connector_extra_config=extra | patient | settings,
    )
    return config


@cache
def _vllm_config() -> Any:
    from vllm.engine.arg_utils import EngineArgs

    _MODEL.mkdir(parents=True, exist_ok=True)
    model = _MODEL
    (model / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "vocab_size": 64,
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": _HEADS,
                "num_key_value_heads": _HEADS,
                "max_position_embeddings": 512,
            }
        )
    )
    return EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        block_size=32,
    ).create_engine_config()
