"""Each compiled op that the engines call, against plain PyTorch, on outputs full of NaN:
``python -m scripts.gpu_engine.kernels RESULTS``."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from scripts.gpu_engine import Results

DEVICE = "cuda"
BLOCK, BLOCKS, HEADS, CONTENT, HIDDEN, ROWS, EPSILON = 16, 300, 8, 128, 2048, 64, 1e-5
QUERIES = 2 * HEADS
ERROR_MAX = 0.02
CASES = {"prefill": (0, 512, 2), "suffix": (2048, 8, 1), "decode": (1024, 1, 8)}
"""Tokens in the cache, new tokens of each request, and requests."""


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def nan_like(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, float("nan"))


def error_of(got: Tensor, right: Tensor) -> float:
    """The relative error; NaN if any element was not written."""
    got, right = got.double(), right.double()
    return float((got - right).norm() / right.norm())


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON) * weight.float()


def rms_norm(ops: Any) -> float:
    x, weight = random(ROWS, HIDDEN), random(HIDDEN)
    out = nan_like(x)
    ops.rms_norm(out, x, weight, EPSILON)
    return error_of(out, _normed(x, weight))


def fused_add_rms_norm(ops: Any) -> float:
    x, residual, weight = random(ROWS, HIDDEN), random(ROWS, HIDDEN), random(HIDDEN)
    right = _normed((x.float() + residual.float()).bfloat16(), weight)
    ops.fused_add_rms_norm(x, residual, weight, EPSILON)
    return error_of(x, right)


def silu_and_mul(ops: Any) -> float:
    x = random(ROWS, 2 * HIDDEN)
    out = nan_like(x[:, :HIDDEN].contiguous())
    torch.ops._C.silu_and_mul(out, x)
    gate, up = x.float().chunk(2, -1)
    return error_of(out, silu(gate) * up)


def rotary_embedding(ops: Any) -> float:
    positions = torch.arange(ROWS, device=DEVICE)
    exponents = torch.arange(0, CONTENT, 2, device=DEVICE) / CONTENT
    angles = positions[:, None] / 1e4**exponents
    cache = torch.cat((angles.cos(), angles.sin()), -1).bfloat16()
    query, key = random(ROWS, 4 * CONTENT), random(ROWS, 4 * CONTENT)
    cos, sin = (half.float()[:, None, :] for half in cache.chunk(2, -1))
    a, b = query.float().view(ROWS, 4, CONTENT).chunk(2, -1)
    right = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).view(ROWS, -1)
    ops.rotary_embedding(positions, query, key, CONTENT, cache, True)
    return error_of(query, right)


def reshape_and_cache_flash(ops: Any) -> float:
    cache = torch.zeros_like(random(2, BLOCKS, BLOCK, HEADS, CONTENT))
    key, value = random(40, HEADS, CONTENT), random(40, HEADS, CONTENT)
    slots = torch.randperm(BLOCKS * BLOCK, device=DEVICE)[:40]
    one = torch.ones(1, device=DEVICE)
    ops.reshape_and_cache_flash(key, value, cache[0], cache[1], slots, "auto", one, one)
    return error_of(cache.view(2, -1, HEADS, CONTENT)[:, slots], torch.stack((key, value)))


def swap_blocks_batch(ops: Any) -> float:
    cache = random(8, BLOCK * HEADS * CONTENT)
    host = nan_like(cache.cpu()).pin_memory()
    sources, targets = (torch.tensor([row.data_ptr() for row in of]) for of in (cache, host))
    ops.swap_blocks_batch(sources, targets, torch.full((8,), cache[0].nbytes))
    torch.cuda.synchronize()
    return error_of(host, cache.cpu())


def attention(backend: str, cached: int, fresh: int, requests: int) -> float:
    """Paged attention of ``fresh`` tokens after ``cached``, as in the engine."""
    total = cached + fresh
    per_request = -(-total // BLOCK)
    cache = random(2, per_request * requests + 1, BLOCK, HEADS, CONTENT)
    query = random(requests * fresh, QUERIES, CONTENT)
    order = torch.randperm(per_request * requests, device=DEVICE).int() + 1
    blocks, out = order.view(requests, per_request), nan_like(query)
    arguments: dict[str, Any] = {
        "q": query,
        "k": cache[0],
        "v": cache[1],
        "out": out,
        "cu_seqlens_q": torch.arange(requests + 1, device=DEVICE, dtype=torch.int32) * fresh,
        "max_seqlen_q": fresh,
        "seqused_k": torch.full((requests,), total, device=DEVICE, dtype=torch.int32),
        "max_seqlen_k": total,
        "softmax_scale": CONTENT**-0.5,
        "causal": True,
        "block_table": blocks,
    }
    if backend == "FA3":
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        flash_attn_varlen_func(**arguments, fa_version=3)
    else:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention

        no_scales = dict.fromkeys(("q_descale", "k_descale", "v_descale"))
        unified_attention(**arguments, **no_scales, window_size=(-1, -1), softcap=0)
    mask = torch.ones(fresh, total, device=DEVICE, dtype=torch.bool).tril(cached)
    right = []
    for number in range(requests):
        key, value = cache[:, blocks[number].long()].flatten(1, 2)[:, :total].float()
        ours = query[number * fresh : (number + 1) * fresh].float()
        ours, key, value = (x.transpose(0, 1) for x in (ours, key, value))
        found = scaled_dot_product_attention(ours, key, value, mask, enable_gqa=True)
        right.append(found.transpose(0, 1))
    return error_of(out, torch.cat(right))


def main(results: Results) -> None:
    """Check all; what fails is a result."""
    torch.manual_seed(0)

    def check(name: str, work: Callable[..., float], *arguments: Any) -> None:
        try:
            error = work(*arguments)
            torch.cuda.synchronize()
            results.add("kernel", name=name, ok=error < ERROR_MAX, error=round(error, 6))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"[:300]
            results.add("kernel", name=name, ok=False, error=text)

    from vllm import _custom_ops as ops

    for op in (rms_norm, fused_add_rms_norm, silu_and_mul, rotary_embedding,
               reshape_and_cache_flash, swap_blocks_batch):  # fmt: skip
        check(op.__name__, op, ops)
    for name, case in CASES.items():
        for backend in ("FA3", "Triton"):
            check(f"{backend} {name}", attention, backend, *case)


if __name__ == "__main__":
    main(Results(Path(sys.argv[1]), "kernels"))
