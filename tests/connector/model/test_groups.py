"""vLLM's groups in objkv's words: every kind, and those that are refused."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    MambaSpec,
    RSWASpec,
)

from objkv.connector.model.groups import DraftGroups, Geometry, read_chunk_tokens, read_group
from objkv.connector.model.subgroups import SubGroup
from objkv.errors import ConfigError
from objkv.keys.identity import GroupIdentity

PLAIN: dict[str, Any] = {
    "block_size": 32,
    "num_kv_heads": 2,
    "head_size": 64,
    "dtype": torch.bfloat16,
}
GDN = MambaAttentionBackendEnum.GDN_ATTN
STATE = MambaSpec(
    160,
    ((3, 512), (4, 64, 64)),
    (torch.bfloat16, torch.float32),
    page_size_padded=81_920,
    mamba_type=GDN,
    mamba_cache_mode="align",
)
LOCAL = GroupIdentity("chunked_local", 64, ("a",), heads=4, content=128, block_size=32)
FULL = GroupIdentity("full", None, ("a",), heads=4, content=128, block_size=32)
KEPT = GroupIdentity("mamba", None, ("b",), heads=2, content=9, block_size=48, state="s")


def config(*, tp_size: int = 2, **cache: Any) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 4),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp_size),
        cache_config=SimpleNamespace(**cache),
    )


def read(spec: KVCacheSpec, **more: Any) -> GroupIdentity:
    return read_group(config(**more), SubGroup(0, ("a", "b"), spec))


def test_a_state_of_an_unknown_kind_is_shared_among_replicas_of_as_many_ranks() -> None:
    """How it is split over them is the model's business, and so is what its bytes mean."""
    strange = replace(STATE, mamba_type=MambaAttentionBackendEnum.MAMBA1)
    group = read(strange)
    assert (group.kind, group.heads, group.block_size) == ("mamba", 2, 160)
    assert group.content == 3 * 512 * 2 + 4 * 64 * 64 * 4
    assert group.state == "mamba1 bfloat16[3,512] float32[4,64,64]"
    assert read(strange, tp_size=4).heads == 4
    assert read(replace(STATE, tp_replicated=True)).heads == 1


@pytest.mark.parametrize(
    ("spec", "cache", "what"),
    [
        (replace(STATE, mamba_cache_mode="none"), {}, "--enable-prefix-caching"),
        (STATE, {"use_replayssm": True}, "use_replayssm off"),
        (STATE, {"use_kda_recoverssm": True}, "use_kda_recoverssm off"),
        (RSWASpec(**PLAIN, rswa_window=64), {}, "RSWASpec"),
        (HiddenStateCacheSpec(**PLAIN), {}, "HiddenStateCacheSpec"),
        (FullAttentionSpec(**PLAIN, non_causal=True), {}, "later tokens"),
        (ChunkedLocalAttentionSpec(**PLAIN, attention_chunk_size=100), {}, "divisor of 100"),
        (FullAttentionSpec(**(PLAIN | {"num_kv_heads": 1})), {}, "set tensor_parallel_size"),
    ],
    ids=str,
)
def test_what_is_refused_says_what_to_do(
    spec: KVCacheSpec, cache: dict[str, Any], what: str
) -> None:
    with pytest.raises(ConfigError, match=what):
        read(spec, **cache)


def test_layers_may_have_other_heads_than_most() -> None:
    assert read(FullAttentionSpec(**(PLAIN | {"num_kv_heads": 3}))).heads == 6
    assert read(FullAttentionSpec(**(PLAIN | {"num_kv_heads": 1})), tp_size=1).heads == 1


def test_chunks_of_a_model_with_states_are_as_small_as_its_blocks_allow() -> None:
    assert read_chunk_tokens(256, [FULL]) == 256
    assert read_chunk_tokens(256, [FULL, KEPT]) == 96


def test_a_model_of_which_nothing_could_ever_be_loaded_is_refused() -> None:
    with pytest.raises(ConfigError, match="lower chunk_tokens"):
        read_chunk_tokens(64, [LOCAL])
    assert read_chunk_tokens(64, [LOCAL, FULL]) == 64
    assert read_chunk_tokens(32, [LOCAL]) == 32


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_planes_of_k_and_v_are_not_taken_for_heads(tp_size: int) -> None:
    """Some backends keep two of them, which looks like two heads of another content."""
    heads = 4 // tp_size
    plain = FullAttentionSpec(**PLAIN | {"num_kv_heads": heads})
    planes = replace(plain, num_head_slots=2, state_content_bytes=heads * 64 * 2)
    with pytest.raises(ConfigError, match="planes"):
        read(planes, tp_size=tp_size)


def test_only_groups_that_keep_all_tokens_forget_their_block_size() -> None:
    """And none where pages are the kernel's own."""
    latent, window = replace(FULL, kind="mla"), replace(FULL, kind="sliding_window", window=48)
    groups = FULL, latent, window, replace(LOCAL, window=128)
    one = Geometry(groups, 64, 32, tp_size=2, canonical=True)
    assert [group.block_size for group in one.stored_groups] == [1, 1, 32, 32]
    shapes = [one.shape(group, 0) for group in range(4)]
    assert [shape.divisible for shape in shapes if shape] == [True, True, False, False]
    own = replace(one, canonical=False)
    assert own.stored_groups == own.groups
    assert not any(shape.divisible for g in range(4) if (shape := own.shape(g, 0)))


LATENT = GroupIdentity("mla", None, ("a", "b"), heads=1, content=576, block_size=32)
HEADS = replace(FULL, layers=("a", "b"))


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(
    ("canonical", "page", "sizes", "parts"),
    [
        (True, None, {"dcp_size": 2, "dcp_interleave": 16}, "T0of2i16 T1of2i16"),
        (True, None, {"dcp_size": 2, "dcp_interleave": 2}, "T0of2i2 T1of2i2"),
        (True, None, {"dcp_size": 3}, "T0of3 T1of3 T2of3"),
        (False, None, {"dcp_size": 2}, "T0of2 T1of2"),
        (True, 576, {"dcp_size": 2}, "T0of2 T1of2"),
    ],
    ids=["interleave 16", "interleave 2", "three ranks", "kernel's pages", "own pages"],
)
def test_tokens_that_others_cannot_combine_are_written_and_read_in_parts_only(
    canonical: bool, page: int | None, sizes: dict[str, int], parts: str, nodes: int
) -> None:
    group = replace(LATENT, page=page)
    one = Geometry((group,), 192, 96, tp_size=6, canonical=canonical, nodes=nodes, **sizes)
    assert {one.joined(0, rank)[1] for rank in range(6)} == {1}
    assert one.fields(0) == one.all_fields() == {f"0.L0-2_H0-1_{part}" for part in parts.split()}


def test_each_group_is_joined_or_not_and_drafts_have_numbers_of_their_own() -> None:
    """A draft's one head, which all ranks have, is whole also on several nodes."""
    drafted = DraftGroups(1, 70_000, lags=True)
    one = Geometry((HEADS, LATENT), 192, 96, tp_size=2, drafted=drafted, nodes=2)
    halves = {"0.L0-2_H0-2", "0.L0-2_H2-4"}
    assert (one.fields(0), one.fields(1)) == (halves, {"70000"})
    assert one.all_fields() == halves | {"0", "70000"}
    assert replace(one, nodes=1).all_fields() == {"0", "70000"}
