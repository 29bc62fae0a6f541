"""Copies blocks by id between two sets of caches: host to device, device to host, host to host.

For who keeps a host copy of a paged cache beside the device's. objkv's own loads and saves do not:
they go through slabs and lanes, and no whole cache is held twice.
Source of what it stands in for: vLLM 0.31-0.33, ``copy_kv_blocks`` in
``distributed/kv_transfer/kv_connector/utils.py``, which takes no look at what it is given: ids of
unequal number copy nothing, and one that is out of range is the device's error, if anybody's.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from objkv.errors import TransferError

Direction = Literal["h2d", "d2h"]
Caches = Mapping[str, torch.Tensor]

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of an element's size, as which bytes travel: fp8 has no copy by index on some devices,
and a copy of floats may change the bits of a NaN."""

_STAGED_BYTES_MAX = 32 << 20
"""Of blocks on their way, which take memory of their own on the source's device."""


def copy_blocks(
    src: Caches,
    dst: Caches,
    src_ids: Sequence[int],
    dst_ids: Sequence[int],
    direction: Direction,
) -> None:
    """Write block ``src_ids[i]`` of every layer of ``src`` into block ``dst_ids[i]`` of ``dst``.

    Args:
        src: by layer ``[num_blocks, ...]``, whatever the strides, all on one device.
        dst: the same layers in the same shapes but for the number of blocks, and dtypes; all on one
            device. No element of a tensor may be in two places of it.
        src_ids: may repeat.
        dst_ids: as many, all different.
        direction: ``h2d``: ``src`` is on the host; ``d2h``: ``dst`` is. Both may be.

    Of two tensors that share memory all blocks are read before one is written. When it returns,
    bytes for the host are there; those for a device are ordered before what its current stream does
    next. Raises ``TransferError``, and has then written nothing.
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
        raise TransferError(f"{len(src_ids)} blocks cannot go into {len(dst_ids)}")
    if len(set(dst_ids)) != len(dst_ids):
        raise TransferError("a block would be written twice")


def _check_devices(src: Caches, dst: Caches, direction: Direction) -> None:
    if direction not in ("h2d", "d2h"):
        raise TransferError(f"no direction: {direction!r}")
    for what, caches in (("source", src), ("target", dst)):
        if len({cache.device for cache in caches.values()}) > 1:
            raise TransferError(f"the {what} is on several devices")
    host = src if direction == "h2d" else dst
    for name, cache in host.items():
        if cache.device.type != "cpu":
            raise TransferError(f"{direction}: {name} is on {cache.device}, not on the host")


def _check_layers(src: Caches, dst: Caches, src_ids: Sequence[int], dst_ids: Sequence[int]) -> None:
    if src.keys() != dst.keys():
        raise TransferError(f"not the same layers: {sorted(src.keys() ^ dst.keys())}")
    for name, source in src.items():
        target = dst[name]
        if not source.dim() or not target.dim() or source.shape[1:] != target.shape[1:]:
            shapes = f"{tuple(source.shape)} and {tuple(target.shape)}"
            raise TransferError(f"{name}: blocks of {shapes} are not alike")
        if source.dtype != target.dtype or source.element_size() not in WORDS:
            raise TransferError(f"{name}: {source.dtype} cannot go into {target.dtype}")
        for ids, cache in ((src_ids, source), (dst_ids, target)):
            if ids and not 0 <= min(ids) <= max(ids) < cache.shape[0]:
                raise TransferError(f"{name} has blocks 0 to {cache.shape[0] - 1} only")
        if _overlaps_itself(target):
            raise TransferError(f"{name}: places of the target share memory")


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two places of the tensor may be one element; False for every permuted or padded
    layout. Said of a few other strides too, which no cache has."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach = stride * (size - 1) + reach
    return False
