"""fp8 attention for machines whose processor vLLM has no such kernel for, in plain PyTorch.

    Job(engine={"kv_cache_dtype": "fp8", **FP8_ENGINE})

vLLM's CPU kernels for fp8 need AVX-512 or AMX. With those nothing is changed here. Without them the
two kernels are replaced, and everything around them stays what it is: the cache's tensors, groups,
scales, the connector. Source of what they compute: vLLM 0.32, ``cpu_attn_reshape_and_cache`` and
``cpu_attention_with_kv_cache`` in ``vllm/_custom_ops.py``; the order within a block is K, then V.
"""

from typing import Any

import torch

FP8_ENGINE = {"worker_extension_cls": "tests.engine.fp8_kernels.Extension"}
"""Engine arguments: a worker imports this module before it loads the model."""
_KINDS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}
_KINDS |= {"fp8_e5m2": torch.float8_e5m2}


class Extension:
    """Adds nothing to the worker."""


def write(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    isa: str,
    k_scale: float,
    v_scale: float,
    kv_cache_dtype: str,
) -> None:
    """Quantise the tokens that have a slot, each into its own."""
    kind, size = _KINDS[kv_cache_dtype], key_cache.shape[2]
    tokens = torch.nonzero(slot_mapping >= 0).flatten()
    blocks, places = slot_mapping[tokens] // size, slot_mapping[tokens] % size
    largest = torch.finfo(kind).max
    for source, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        divided = (source[tokens].float() / scale).clamp(-largest, largest)
        cache[blocks, :, places] = divided.to(kind).view(torch.uint8)


def attend(query: Any, key_cache: Any, value_cache: Any, output: Any, **more: Any) -> None:
    """Causal attention of each request's newest tokens to all of its tokens."""
    assert more["causal"]
    assert more["alibi_slopes"] is more["s_aux"] is more["dynamic_causal"] is None
    assert not more["softcap"]
    kind, size, heads = _KINDS[more["kv_cache_dtype"]], key_cache.shape[2], query.shape[1]
    starts = more["query_start_loc"].tolist()
    for number, length in enumerate(more["seq_lens"].tolist()):
        start, end = starts[number], starts[number + 1]
        blocks = more["block_table"][number, : -(-length // size)]

        def read(cache: Any, scale: float, blocks: Any = blocks, length: int = length) -> Any:
            pages = cache[blocks].permute(1, 0, 2, 3).flatten(1, 2)[:, :length]
            values = pages.contiguous().view(kind).float() * scale
            return values.repeat_interleave(heads // values.shape[0], dim=0)

        keys, values = (
            read(key_cache, more["k_scale"]),
            read(value_cache, more["v_scale"]),
        )
        scores = query[start:end].float().transpose(0, 1) @ keys.transpose(1, 2) * more["scale"]
        asked = torch.arange(length - (end - start), length)
        hidden = torch.arange(length)[None] > asked[:, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        output[start:end] = (weights @ values).transpose(0, 1).reshape(output[start:end].shape)


def _replace() -> None:
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends import cpu_attn

    real: dict[str, Any] = {
        name: getattr(ops, name)
        for name in ("cpu_attn_reshape_and_cache", "cpu_attention_with_kv_cache")
    }
    schedule, isa_of = ops.cpu_attn_get_scheduler_metadata, cpu_attn._get_attn_isa

    def update(*args: Any, **more: Any) -> None:
        chosen = write if more["kv_cache_dtype"] in _KINDS else real["cpu_attn_reshape_and_cache"]
        chosen(*args, **more)

    def attention(**more: Any) -> None:
        quantised = more["kv_cache_dtype"] in _KINDS
        (attend if quantised else real["cpu_attention_with_kv_cache"])(**more)

    def plain_schedule(*args: Any, **more: Any) -> Any:
        return schedule(*args, **(more | {"kv_cache_dtype": "auto"}))

    def plain_isa(dtype: Any, block_size: int, head_size: Any = None, kv: Any = None) -> Any:
        return isa_of(dtype, block_size, head_size, None)

    ops.cpu_attn_reshape_and_cache = update
    ops.cpu_attention_with_kv_cache = attention
    ops.cpu_attn_get_scheduler_metadata = plain_schedule
    cpu_attn._get_attn_isa = plain_isa


if not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()):
    _replace()
