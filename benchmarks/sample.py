"""Test data of the benchmarks: pages that compress about as well as a real model's KV."""

import numpy as np
import numpy.typing as npt
from numpy.random import default_rng

from objkv.ops.bench.sample import Shape

PAYLOAD_1_MIB = Shape("1 MiB", layers=15, layer_bytes=64 << 10)
PAYLOAD_32_MIB = Shape("32 MiB", layers=32, layer_bytes=1 << 20)
"""One chunk of 256 tokens of an 8B model: 32 layers, 8 KV heads of 128."""
_CONTENT = 256


def kv_like(nbytes: int, seed: int = 0) -> bytes:
    """Return BF16 numbers that shuffled zstd makes 1.46 times smaller and shuffled lz4 1.15 to 1.2
    times. As in a trained model, some channels of K are far from zero, and scales differ."""
    source = default_rng(seed)
    values: npt.NDArray[np.float32] = source.standard_normal(
        (nbytes // 2 // _CONTENT, _CONTENT), dtype=np.float32
    )
    far = _CONTENT // 4
    values[:, :far] += 8 * source.standard_normal(far, dtype=np.float32)
    values *= np.exp(source.standard_normal(_CONTENT, dtype=np.float32) / 2)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def make_tokens(count: int) -> list[int]:
    """Return the token ids of a prompt."""
    return [(number * 7919) % 128_000 for number in range(count)]
