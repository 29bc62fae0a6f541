"""A chunk of one group in the words of vLLM's KV events: its blocks, by vLLM's own hashes.

Field by field what vLLM says of the same blocks on the device, but for the medium. Source: vLLM
0.31-0.33, ``cache_full_blocks`` in ``v1/core/block_pool.py``, ``resolve_block_hashes`` in
``v1/core/kv_cache_utils.py``.
"""

from math import gcd
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core import kv_cache_utils

from objkv.cache.match import stored_blocks
from objkv.connector.geometry import Geometry
from objkv.transfer.plan import ChunkMove

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

MEDIUM = "OBJKV"
"""Of all events: reachable by this replica, in stores that it shares with others."""


class BlockEvents:
    """Makes events. Pure."""

    def __init__(self, geometry: Geometry, hash_tokens: int) -> None:
        """``hash_tokens``: of one of vLLM's block hashes; blocks of all groups are multiples."""
        self._geometry = geometry
        self._hash_tokens = hash_tokens

    def stored(self, request: "Request", move: ChunkMove) -> BlockStored | None:
        """What tells that the chunk's payloads are stored; None where vLLM's hashes of the blocks
        in them are not known."""
        identity, unit = self._geometry.groups[move.group], self._hash_tokens
        size, end = identity.block_size, move.token_end
        start = end - stored_blocks(identity, self._geometry.chunk_tokens) * size
        known = request.block_hashes
        # One hash per unit of tokens, less what a drafter still has to look at.
        if start >= end or end // unit > len(known) or len(known) > request.num_tokens // unit:
            return None
        convert = kv_cache_utils.maybe_convert_block_hash
        hashes = [convert(known[at // unit - 1]) for at in range(start + size, end + 1, size)]
        lora = request.lora_request
        return _made(
            BlockStored,
            block_hashes=hashes,
            parent_block_hash=convert(known[start // unit - 1]) if start else None,
            token_ids=list(request.all_token_ids[start:end]),
            block_size=size,
            lora_id=None if lora is None else lora.adapter_id,
            medium=MEDIUM,
            lora_name=None if lora is None else lora.name,
            extra_keys=_extra_keys(request, start, end, size),
            group_idx=move.group,
        )

    def removed(self, group: int, hashes: list[Any]) -> BlockRemoved:
        """What takes blocks of a group back, by the hashes that were told."""
        return _made(BlockRemoved, block_hashes=hashes, medium=MEDIUM, group_idx=group)


def read_hash_tokens(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", geometry: Geometry
) -> int:
    """How many tokens one of vLLM's block hashes is of."""
    resolve = getattr(kv_cache_utils, "resolve_kv_cache_block_sizes", None)
    if resolve is None:  # not every version has it
        unit = getattr(vllm_config.cache_config, "prefix_match_unit", None)
        return unit or gcd(*(group.block_size for group in geometry.groups))
    return int(resolve(kv_cache_config, vllm_config)[1])


def _extra_keys(request: "Request", start: int, end: int, size: int) -> Any:
    keys = []
    media = 0
    for begin in range(start, end, size):
        mine, media = kv_cache_utils.generate_block_hash_extra_keys(
            request, begin, begin + size, media
        )
        keys.append(mine)
    convert = getattr(kv_cache_utils, "to_event_extra_keys", None)
    return keys if convert is None else convert(keys)


def _made(kind: type[Any], **values: Any) -> Any:
    """An event with those of the fields that this vLLM knows."""
    known = kind.__struct_fields__
    return kind(**{name: value for name, value in values.items() if name in known})
