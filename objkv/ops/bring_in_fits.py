"""What a payload that is brought in must be: what the replicas of its namespace would accept.

An identity tells all of it but two things, of which any is taken: the scales of a quantised cache,
and, where replicas deal tokens into blocks of their own size, that size. A reader compares both
with its own.
"""

from typing import Final

from objkv.cache.match import keeps_all, stored_blocks
from objkv.codec.payload import Claim, Header
from objkv.errors import PayloadError
from objkv.keys.identity import GroupIdentity, Identity
from objkv.keys.prefix import root_hash
from objkv.ops.manifest import Line

_STATE: Final = "I8"
"""States are bytes of several things."""
_PLAIN: Final = {"bfloat16": "BF16", "float16": "F16", "half": "F16", "float32": "F32"}
_FP8: Final = {
    "fp8": {"F8_E4M3"},
    "fp8_e4m3": {"F8_E4M3"},
    "fp8_e5m2": {"F8_E5M2"},
    "fp8_fnuz": {"F8_E4M3FNUZ"},
    "fp8_e4m3_fnuz": {"F8_E4M3FNUZ"},
    "fp8_e5m2_fnuz": {"F8_E5M2FNUZ"},
}
_BYTES: Final = {"U8", "I8"}
"""Of every other quantised cache: its elements are the kernel's own."""
_CHECKPOINTS: Final = {"F8_E4M3", "F8_E4M3FNUZ"}
"""What a quantised checkpoint may choose where nobody said what the cache is kept as."""


def check_told(header: Header, line: Line) -> None:
    """Raises ``PayloadError`` unless the payload is the one that the manifest tells of."""
    claim = header.claim
    if claim.key.path() != line.key:
        raise PayloadError(f"claims to be {claim.key.path()}")
    told = (line.token_start, line.token_end, line.parent)
    if told != (claim.token_start, claim.token_end, claim.parent_hash.hex()):
        raise PayloadError("its tokens, or the chunk before it, are not those of the manifest")


def check_fits(header: Header, identity: Identity) -> None:
    """Raises ``PayloadError`` unless replicas of ``identity`` could load the payload."""
    claim = header.claim
    number, shard = claim.key.group, claim.key.shard
    if number >= len(identity.groups):
        raise PayloadError(f"of group {number}, which the model does not have")
    group = identity.groups[number]
    if shard.layer_end > len(group.layers) or shard.head_end > group.heads:
        raise PayloadError(
            f"of shard {shard}, and group {number} has {len(group.layers)} layers and "
            f"{group.heads} heads"
        )
    _check_place(claim, identity)
    names = group.layers[shard.layer_start : shard.layer_end]
    found = header.frames.layers
    if tuple(layer.name for layer in found) != names:
        raise PayloadError(f"its layers are not those of group {number}")
    dtype = found[0].dtype
    if dtype not in _dtypes(identity, group):
        raise PayloadError(f"its pages are {dtype}, which is not how {identity.kv_dtype} is kept")
    pages = _pages(identity, group, shard.head_end - shard.head_start, found[0].shape[2])
    if pages is None:
        raise PayloadError(f"of group {number}, which has no payloads in such chunks")
    is_plain = group.kind == "mamba" or dtype in _PLAIN.values()
    for layer in found:
        if (layer.dtype, layer.shape) != (dtype, pages):
            told, due = "x".join(map(str, layer.shape)), "x".join(map(str, pages))
            raise PayloadError(f"layer {layer.name}: {layer.dtype} {told}, not {dtype} {due}")
        if is_plain and layer.scales:
            raise PayloadError(f"layer {layer.name}: has scales, and is not quantised")


def _check_place(claim: Claim, identity: Identity) -> None:
    size = identity.chunk_tokens
    if claim.token_start % size or claim.token_end - claim.token_start != size:
        raise PayloadError(f"its tokens are no chunk of {size}")
    is_first = claim.token_start == 0
    if is_first != (claim.parent_hash == root_hash(claim.key.namespace)):
        raise PayloadError("the chunk before it is not one that could be")


def _dtypes(identity: Identity, group: GroupIdentity) -> set[str]:
    """Those that the pages of a group may have."""
    if group.kind == "mamba":
        return {_STATE}
    plain = _PLAIN.get(identity.kv_dtype)
    if plain is not None:
        return {plain} | (set() if identity.quantization is None else _CHECKPOINTS)
    # Some layers of a quantised cache may be left as the model has them.
    models = _PLAIN.get(dict(identity.extra).get("dtype", ""))
    return _FP8.get(identity.kv_dtype, _BYTES) | (set() if models is None else {models})


def _pages(
    identity: Identity, group: GroupIdentity, heads: int, found_size: int
) -> tuple[int, int, int, int] | None:
    """The shape of a layer's pages: blocks, heads, tokens of a block, content. None where the group
    has no payloads.

    ``found_size``: of the payload's blocks, which may be any where a token can be taken by itself.
    """
    blocks, size = stored_blocks(group, identity.chunk_tokens), group.block_size
    if not blocks:
        return None
    if group.kind == "mamba":
        return 1, heads, 1, group.content
    is_divisible = identity.page_layout == "canonical" and keeps_all(group) and size == 1
    if is_divisible and identity.chunk_tokens % found_size == 0:
        blocks, size = identity.chunk_tokens // found_size, found_size
    return blocks, heads, size, group.content
