"""Copies blocks by id between two sets of caches: host to device, device to host, host to host.

For connectors that keep a host copy of the device's paged cache. objkv's own loads and saves use
slabs and lanes instead and never hold a whole cache twice. It replaces ``copy_kv_blocks`` in
``distributed/kv_transfer/kv_connector/utils.py`` of vLLM 0.31-0.33, which does not check its
arguments: with unequal numbers of ids it copies nothing, and an id out of range may be an error on
the device or go unnoticed.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from objkv.errors import TransferError

Direction = Literal["h2d", "d2h"]
Caches = Mapping[str, torch.Tensor]

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by element size. Elements are copied as integers, because some devices cannot copy
fp8 by index, and copying floats may change the bits of a NaN."""

_STAGED_BYTES_MAX = 32 << 20
"""Most bytes of blocks staged at once in extra memory on the source's device."""


def copy_blocks(
    src: Caches,
    dst: Caches,
    src_ids: Sequence[int],
    dst_ids: Sequence[int],
    direction: Direction,
) -> None:
    """Write block ``src_ids[i]`` of every layer of ``src`` into block ``dst_ids[i]`` of ``dst``.

    Args:
        src: ``[num_blocks, ...]`` by layer, with any strides, all on one device.
        dst: the same layers with the same dtypes and shapes, except for the number of blocks. All
            on one device. No two positions of a tensor may share memory.
        src_ids: may repeat.
        dst_ids: the same number of ids, all different.
        direction: ``h2d`` if ``src`` is on the host, ``d2h`` if ``dst`` is. Both may be.

    If two tensors share memory, all blocks are read before any is written. When this returns,
    copies to the host are complete, and copies to a device are ordered before the next work of its
    current stream. Raises ``TransferError`` before anything is written.
    """
    _check_ids(src_ids, dst_ids)
    _check_devices(src, dst, direction)
    _check_layers(src, dst, src_ids, dst_ids)
    if not src_ids:
        return
    read = torch.tensor(src_ids, dtype=torch.int64)
    written = torch.tensor(dst_ids, dtype=torch.int64)
    for name, source in src.items():
        _copy_layer(_words(source), _words(dst[name]), read, written)


def _copy_layer(
    source: torch.Tensor, target: torch.Tensor, read: torch.Tensor, written: torch.Tensor
) -> None:
    block_bytes = max(1, source[0].numel() * source.element_size())
    step = max(1, _STAGED_BYTES_MAX // block_bytes)
    if source.untyped_storage().data_ptr() == target.untyped_storage().data_ptr():
        step = len(read)
    read, written = read.to(source.device), written.to(target.device)
    for first in range(0, len(read), step):
        staged = source.index_select(0, read[first : first + step]).to(target.device)
        target.index_copy_(0, written[first : first + step], staged)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(WORDS[tensor.element_size()])


def _check_ids(src_ids: Sequence[int], dst_ids: Sequence[int]) -> None:
    if len(src_ids) != len(dst_ids):
        raise TransferError(f"{len(src_ids)} source blocks, but {len(dst_ids)} target blocks")
    if len(set(dst_ids)) != len(dst_ids):
        raise TransferError("dst_ids repeats a block, which would be written twice")


def _check_devices(src: Caches, dst: Caches, direction: Direction) -> None:
    if direction not in ("h2d", "d2h"):
        raise TransferError(f"unknown direction {direction!r}: use h2d or d2h")
    for what, caches in (("source", src), ("target", dst)):
        if len({cache.device for cache in caches.values()}) > 1:
            raise TransferError(f"the {what} is on several devices")
    host = src if direction == "h2d" else dst
    for name, cache in host.items():
        if cache.device.type != "cpu":
            raise TransferError(f"{direction}: {name} is on {cache.device}, not on the host")


def _check_layers(src: Caches, dst: Caches, src_ids: Sequence[int], dst_ids: Sequence[int]) -> None:
    if src.keys() != dst.keys():
        raise TransferError(f"layers only in source or target: {sorted(src.keys() ^ dst.keys())}")
    for name, source in src.items():
        target = dst[name]
        if not source.dim() or not target.dim() or source.shape[1:] != target.shape[1:]:
            shapes = f"{tuple(source.shape)} and {tuple(target.shape)}"
            raise TransferError(f"{name}: blocks of {shapes} differ in shape")
        if source.dtype != target.dtype or source.element_size() not in WORDS:
            raise TransferError(f"{name}: cannot copy {source.dtype} to {target.dtype}")
        for ids, cache in ((src_ids, source), (dst_ids, target)):
            if ids and not 0 <= min(ids) <= max(ids) < cache.shape[0]:
                raise TransferError(f"{name} has blocks 0 to {cache.shape[0] - 1} only")
        if _overlaps_itself(target):
            raise TransferError(f"{name}: positions of the target share memory")


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two positions of the tensor may share memory. Exact for permuted and padded layouts;
    may be True without need for unusual strides, which no cache has."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach = stride * (size - 1) + reach
    return False
