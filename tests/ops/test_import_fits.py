"""Only what replicas of a namespace would accept is brought into it."""

from dataclasses import replace

import pytest

from objkv.codec.payload import Claim, Header, LayerSpec, Provenance, encode, read_header
from objkv.errors import PayloadError
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import GroupIdentity, Identity
from objkv.keys.prefix import prefix_hashes, root_hash, token_digest
from objkv.keys.topology import Shard
from objkv.ops.export.import_ import check_fits, check_told
from objkv.ops.export.manifest import ManifestLine
from tests.ops.world import CHUNK, IDENTITY, LEFT, TOKENS, WHOLE

FULL = IDENTITY.groups[0]
SCALES = "0.5 0.25"


def payload(
    identity: Identity,
    shape: tuple[int, int, int, int],
    *,
    dtype: str = "BF16",
    shard: Shard = WHOLE,
    names: tuple[str, ...] = ("l.0", "l.1"),
    start: int = 0,
    parent: bytes | None = None,
    scales: str = "",
    group: int = 0,
) -> Header:
    """What the header of a payload of one chunk says, of its second chunk if ``start`` is not 0."""
    name = identity.namespace()
    digest = prefix_hashes(name, TOKENS, CHUNK)[0]
    claim = Claim(
        ChunkKey(name, digest, group, shard), parent or root_hash(name), start, start + CHUNK
    )
    layers = [LayerSpec(layer, dtype, shape, scales) for layer in names]
    pages = [bytes(layer.nbytes) for layer in layers]
    told = Provenance(token_digest(TOKENS[:CHUNK]), "w", 1)
    return read_header(encode(claim, layers, pages, codec="none", provenance=told))


def test_a_right_payload_fits() -> None:
    check_fits(payload(IDENTITY, (2, 2, 8, 8)), IDENTITY)
    check_fits(payload(IDENTITY, (2, 1, 8, 8), shard=LEFT), IDENTITY)
    one_layer = payload(IDENTITY, (2, 2, 8, 8), shard=Shard(1, 2, 0, 2), names=("l.1",))
    check_fits(one_layer, IDENTITY)
    later = payload(IDENTITY, (2, 2, 8, 8), start=CHUNK, parent=bytes(20))
    check_fits(later, IDENTITY)


@pytest.mark.parametrize(
    "header",
    [
        payload(IDENTITY, (2, 2, 8, 8), dtype="F16"),
        payload(IDENTITY, (2, 2, 8, 8), dtype="F32"),
        payload(IDENTITY, (2, 1, 8, 8)),
        payload(IDENTITY, (2, 2, 8, 4)),
        payload(IDENTITY, (1, 2, 8, 8)),
        payload(IDENTITY, (1, 2, 16, 8)),
        payload(IDENTITY, (2, 2, 8, 8), shard=Shard(0, 64, 0, 2)),
        payload(IDENTITY, (2, 4, 8, 8), shard=Shard(0, 2, 0, 4)),
        payload(IDENTITY, (2, 2, 8, 8), names=("l.1", "l.0")),
        payload(IDENTITY, (2, 2, 8, 8), group=1),
        payload(IDENTITY, (2, 2, 8, 8), start=8, parent=bytes(20)),
        payload(IDENTITY, (2, 2, 8, 8), start=CHUNK),
        payload(IDENTITY, (2, 2, 8, 8), parent=bytes(20)),
    ],
    ids=[
        "of float16",
        "of float32",
        "half of the heads",
        "another content",
        "one block",
        "blocks that nobody may deal anew",
        "layers that are not there",
        "heads that are not there",
        "layers in another order",
        "another group",
        "no whole chunk",
        "a later chunk without one before it",
        "a first chunk with one before it",
    ],
)
def test_what_no_replica_would_accept_is_refused(header: Header) -> None:
    with pytest.raises(PayloadError):
        check_fits(header, IDENTITY)


def one_group(group: GroupIdentity, kv_dtype: str = "bfloat16") -> Identity:
    return replace(IDENTITY, groups=(group,), kv_dtype=kv_dtype)


def test_pages_of_any_block_size_fit_where_replicas_deal_tokens_anew() -> None:
    identity = one_group(replace(FULL, block_size=1))
    for size in (1, 4, 16):
        check_fits(payload(identity, (CHUNK // size, 2, size, 8)), identity)
    with pytest.raises(PayloadError):
        check_fits(payload(identity, (1, 2, 8, 8)), identity)
    opaque = replace(identity, page_layout="opaque:x86")
    with pytest.raises(PayloadError):
        check_fits(payload(opaque, (2, 2, 8, 8)), opaque)


def test_a_window_has_only_the_blocks_that_some_end_needs() -> None:
    identity = one_group(replace(FULL, kind="sliding_window", window=5))
    check_fits(payload(identity, (1, 2, 8, 8)), identity)
    with pytest.raises(PayloadError):
        check_fits(payload(identity, (2, 2, 8, 8)), identity)


def test_a_group_without_payloads_has_none() -> None:
    identity = one_group(replace(FULL, kind="chunked_local", window=CHUNK))
    with pytest.raises(PayloadError, match="has no payloads"):
        check_fits(payload(identity, (2, 2, 8, 8)), identity)


def test_a_state_is_one_block_of_bytes() -> None:
    group = replace(FULL, kind="mamba", state="gdn bfloat16[3,4]", block_size=CHUNK, content=24)
    identity = one_group(group)
    check_fits(payload(identity, (1, 1, 1, 24), dtype="I8", shard=LEFT), identity)
    with pytest.raises(PayloadError):
        check_fits(payload(identity, (1, 1, 1, 24), dtype="BF16", shard=LEFT), identity)


@pytest.mark.parametrize(
    ("kv_dtype", "dtype"),
    [
        ("fp8", "F8_E4M3"),
        ("fp8_e4m3", "F8_E4M3"),
        ("fp8_e5m2", "F8_E5M2"),
        ("fp8_fnuz", "F8_E4M3FNUZ"),
        ("fp8_e5m2_fnuz", "F8_E5M2FNUZ"),
        ("fp8_ds_mla", "U8"),
    ],
)
def test_a_quantised_cache_is_of_its_own_kind_and_has_any_scales(kv_dtype: str, dtype: str) -> None:
    identity = one_group(FULL, kv_dtype=kv_dtype)
    check_fits(payload(identity, (2, 2, 8, 8), dtype=dtype, scales=SCALES), identity)
    check_fits(payload(identity, (2, 2, 8, 8), dtype=dtype), identity)
    for other in {"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F16"} - {dtype}:
        with pytest.raises(PayloadError):
            check_fits(payload(identity, (2, 2, 8, 8), dtype=other), identity)


def test_layers_that_a_quantised_cache_leaves_as_they_are_have_no_scales() -> None:
    identity = replace(one_group(FULL, kv_dtype="fp8"), extra=(("dtype", "bfloat16"),))
    check_fits(payload(identity, (2, 2, 8, 8)), identity)
    with pytest.raises(PayloadError):
        check_fits(payload(identity, (2, 2, 8, 8), scales=SCALES), identity)


def test_a_quantised_checkpoint_may_decide_the_dtype_itself() -> None:
    identity = replace(IDENTITY, quantization="compressed-tensors")
    check_fits(payload(identity, (2, 2, 8, 8), dtype="F8_E4M3", scales=SCALES), identity)
    check_fits(payload(identity, (2, 2, 8, 8)), identity)
    with pytest.raises(PayloadError):
        check_fits(payload(identity, (2, 2, 8, 8), dtype="F32"), identity)


def test_what_the_manifest_says_of_a_payload_is_what_it_claims() -> None:
    header = payload(IDENTITY, (2, 2, 8, 8))
    claim = header.claim
    line = ManifestLine(
        claim.key.path(), 0, CHUNK, claim.parent_hash.hex(), header.nbytes, "0" * 64
    )
    check_told(header, line)
    for wrong in (
        replace(line, token_start=1),
        replace(line, token_end=2 * CHUNK),
        replace(line, parent="0" * 40),
        replace(line, key=line.key.replace("H0-2", "H0-1")),
    ):
        with pytest.raises(PayloadError):
            check_told(header, wrong)
