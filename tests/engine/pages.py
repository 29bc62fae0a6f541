"""What the paged cache of a replica holds: called inside it, by a job's ``Call``.

    call(cached_pages, prompts=[[5, 6, 7], ...])

Needs the engine core in the replica's own process, and one worker.
"""

import hashlib
from itertools import chain
from typing import Any


def block_tokens(llm: Any) -> int:
    """What vLLM made of the wish for 32. States must fit into a block of the attention, and how
    large they are depends on the processor's kernels."""
    return int(llm.llm_engine.vllm_config.cache_config.block_size)


def cached_pages(llm: Any, prompts: list[list[int]]) -> list[dict[str, list[str]]]:
    """Per prompt and layer: a digest of each block that the replica's prefix cache has of it.

    A block that the cache does not have, because a window has passed it, is an empty string. At
    least one token of a prompt is never cached: ask for one more than you want to see.
    """
    core = llm.llm_engine.engine_core.engine_core
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    return [_pages(core, layers, tokens) for tokens in prompts]


def _pages(core: Any, layers: dict[str, Any], tokens: list[int]) -> dict[str, list[str]]:
    groups = core.scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
    return {
        name: ["" if block == 0 else _page(layers[name].kv_cache, block) for block in ids]
        for group, ids in zip(groups, _tables(core, tokens), strict=True)
        for name in group.layer_names
    }


def _tables(core: Any, tokens: list[int]) -> list[list[int]]:
    """Per group: the blocks that the prefix cache has of a prompt."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    hasher = core.request_block_hasher
    request = Request("looks", tokens, SamplingParams(), None, block_hasher=hasher)
    blocks = core.scheduler.kv_cache_manager.get_computed_blocks(request)[0].get_block_ids()
    return [list(ids) for ids in blocks]


def _page(cache: Any, block: int) -> str:
    """Of one block: of a layer's page, or of all parts of its state."""
    if isinstance(cache, list | tuple):
        return " ".join(_digest(part[block]) for part in cache)
    return _digest(cache[block])


def _digest(page: Any) -> str:
    import torch

    raw = page.contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]


def cached_heads(llm: Any, prompts: list[list[int]]) -> list[dict[str, list[list[str]]]]:
    """As ``cached_pages``, of a model with one group on any number of ranks: per layer and block a
    digest of each head, over all ranks."""
    core = llm.llm_engine.engine_core.engine_core
    tables = [_tables(core, tokens)[0] for tokens in prompts]
    ranks = llm.collective_rpc(_heads_of_rank, args=(tables,))
    return [
        {
            name: [
                list(chain(*heads))
                for heads in zip(*(rank[i][name] for rank in ranks), strict=True)
            ]
            for name in ranks[0][i]
        }
        for i in range(len(prompts))
    ]


def _heads_of_rank(worker: Any, tables: list[list[int]]) -> list[dict[str, list[list[str]]]]:
    layers = worker.vllm_config.compilation_config.static_forward_context
    names = [name for name, layer in layers.items() if hasattr(layer, "kv_cache")]
    return [
        {
            name: [[_digest(head) for head in layers[name].kv_cache[block]] for block in table]
            for name in names
        }
        for table in tables
    ]


_heads_of_rank.objkv_keeps_weights = True  # type: ignore[attr-defined]


_WATCHED: list[dict[str, list[str]]] = []


def watch_pages(llm: Any) -> None:
    """From now on note what each request's whole blocks hold when it ends; see ``request_pages``.
    For models whose prefix cache vLLM turns off, so that ``cached_pages`` finds nothing."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    free = scheduler._free_request

    def look_and_free(request: Any, *args: Any, **options: Any) -> Any:
        manager = scheduler.kv_cache_manager
        groups = manager.kv_cache_config.kv_cache_groups
        pages: dict[str, list[str]] = {}
        for group, ids in zip(groups, manager.get_block_ids(request.request_id), strict=True):
            whole = ids[: request.num_prompt_tokens // group.kv_cache_spec.block_size]
            for name in group.layer_names:
                pages[name] = [_page(layers[name].kv_cache, block) for block in whole]
        _WATCHED.append(pages)
        return free(request, *args, **options)

    scheduler._free_request = look_and_free


def request_pages(_llm: Any) -> list[dict[str, list[str]]]:
    """Per request that ended since ``watch_pages``, and layer: a digest of each whole block of its
    prompt."""
    return list(_WATCHED)
