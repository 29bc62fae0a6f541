"""``objkv.ops.size.sizing``, compared with the payloads that the saving code really makes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from objkv.codec.payload import Claim, LayerSpec, Provenance, encode
from objkv.config.prices import Prices
from objkv.errors import ConfigError
from objkv.keys.chunk import ChunkKey
from objkv.keys.topology import Shard, frame_name
from objkv.ops.models.layers import CacheLayer
from objkv.ops.size.sizing import Load, ModelShape, ReplicaLayout, Sizing, read_model, size_fleet

TINY = ModelShape("tiny", (CacheLayer("full", 4, 128),) * 3, "bfloat16", "a test")
LAYOUT = ReplicaLayout(chunk_tokens=64, block_size=16, tp_size=1)
LOAD = Load(prompts_per_s=2, prompt_tokens=1000, stored_share=0.5, ttl_s=3600, sweep_every_s=0)
PRICES = Prices(gb_month=0.02, per_1000_puts=5, per_1000_gets=1)
DAY = 86_400


def sized(model: ModelShape = TINY, layout: ReplicaLayout = LAYOUT, load: Load = LOAD) -> Sizing:
    return size_fleet(model, layout, load, PRICES)


def real_payload(model: ModelShape, layout: ReplicaLayout) -> bytes:
    """Return the payload that the ranks would save of one chunk."""
    [group] = model.groups(layout.block_size)
    heads = 4 // layout.tp_size
    shards = [Shard(0, 3, n * heads, (n + 1) * heads) for n in range(layout.tp_size)]
    blocks = layout.chunk_tokens // layout.block_size
    shape = (blocks, heads, layout.block_size, group.content)
    names = [
        name if len(shards) == 1 else frame_name(name, shard)
        for name in group.layers
        for shard in shards
    ]
    specs = [LayerSpec(name, "BF16", shape) for name in names]
    claim = Claim(ChunkKey("a" * 32, b"\x07" * 20, 0), b"\x01" * 20, 0, layout.chunk_tokens)
    provenance = Provenance("0" * 64, "host-1:4242:0123456789ab", 1_700_000_000)
    pages = [bytes(spec.nbytes) for spec in specs]
    return bytes(encode(claim, specs, pages, codec="none", provenance=provenance))


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_a_chunk_is_as_large_as_what_is_saved_of_it(tp_size: int) -> None:
    layout = replace(LAYOUT, tp_size=tp_size)
    chunk = sized(layout=layout).chunk
    header_bytes = len(real_payload(TINY, layout)) - chunk.nbytes
    assert (chunk.payloads, 0 < header_bytes <= 16 << 10) == (1, True)
    assert chunk.largest_payload_bytes == chunk.nbytes


def test_latents_are_saved_once_however_many_ranks_have_them() -> None:
    model = ModelShape("latent", (CacheLayer("mla", 1, 576),) * 61, "bfloat16", "a test")
    found = sized(model, replace(LAYOUT, chunk_tokens=256, tp_size=8))
    assert found.chunk.payloads == 1
    assert found.chunk.raw_bytes == 61 * 576 * 2 * 256
    assert found.load_bytes_per_s == pytest.approx(2 * found.loaded_chunks * found.chunk.nbytes)


def test_only_whole_chunks_count() -> None:
    found = sized()
    assert (found.prompt_chunks, found.loaded_chunks) == (1000 // 64, 500 // 64)
    assert sized(load=replace(LOAD, prompt_tokens=63)).bulk_bytes == 0
    everything = sized(load=replace(LOAD, stored_share=1))
    assert (everything.loaded_chunks, everything.saved_chunks_per_s) == (15, 0)


def test_what_is_kept_is_what_is_saved_times_how_long_it_lives() -> None:
    found = sized()
    assert found.saved_chunks_per_s == 2 * (15 - 7)
    assert found.chunks == found.records == 16 * 3600
    assert found.bulk_bytes == 16 * 3600 * found.chunk.nbytes
    used = sized(load=replace(LOAD, used_s=3600))
    assert used.bulk_bytes == 2 * found.bulk_bytes
    swept = sized(load=replace(LOAD, sweep_every_s=2 * 3600))
    assert (swept.bulk_bytes, swept.records) == (2 * found.bulk_bytes, found.records)
    young = sized(load=replace(LOAD, grace_s=3 * 3600))  # sweeps leave what has expired by then
    assert (young.bulk_bytes, young.records) == (3 * found.bulk_bytes, found.records)


def test_requests_and_money_follow_from_it() -> None:
    found = sized()
    assert (found.puts_per_s, found.gets_per_s) == (16, 2 * 7)
    assert found.redis_commands_per_s == 2 * (15 + 7) + 16 * 2
    assert found.storage_month == pytest.approx(found.bulk_bytes / 1e9 * 0.02)
    assert found.requests_month == pytest.approx((16 * 5 + 14 * 1) / 1000 * 30 * DAY)
    assert found.month == found.storage_month + found.requests_month


def test_large_payloads_are_read_in_several_requests() -> None:
    large = replace(TINY, layers=TINY.layers[:1] * 1100)
    found = sized(large)
    ranges = -(-found.chunk.nbytes // (8 << 20))
    assert ranges == 9
    assert (found.puts_per_s, found.gets_per_s) == (16, 14 * ranges)


def test_of_windows_only_their_end_is_kept_and_loaded() -> None:
    layers = (CacheLayer("full", 4, 128), CacheLayer("sliding_window", 4, 128, 32))
    model = ModelShape("windows", layers, "bfloat16", "a test")
    found = sized(model)
    assert (found.chunk.groups, found.chunk.payloads) == (2, 2)
    assert found.chunk.raw_bytes == 4 * 128 * 2 * (64 + 32)
    assert found.gets_per_s == 2 * (7 + 1)


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "torch_dtype": "bfloat16",
}
FULL = CacheLayer("full", 2, 128)


def written(folder: Path, **changes: Any) -> Path:
    document = {name: value for name, value in {**LLAMA, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(document))
    return folder


def test_a_plain_model_is_read(tmp_path: Path) -> None:
    shape = read_model(written(tmp_path))
    assert shape.layers == (FULL,) * 4
    assert (shape.kv_dtype, shape.name) == ("bfloat16", tmp_path.name)
    assert read_model(tmp_path / "config.json").layers == shape.layers
    assert read_model(written(tmp_path, torch_dtype="float32")).kv_dtype == "bfloat16"
    assert read_model(tmp_path, "fp8").kv_dtype == "fp8"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": "4"}, "but '4'"),
        ({"layer_types": ["linear_attention"] * 4, "model_type": "mamba2"}, "no num_heads"),
        ({"layer_types": ["sliding_attention"] * 4}, "no sliding_window"),
        ({"torch_dtype": "int4"}, "--kv-dtype"),
        (
            {"model_type": "deepseek_v4", "compress_ratios": [1] * 4},
            "has compressed layers, .*: let a replica save some and use objkv ls",
        ),
    ],
)
def test_what_the_file_does_not_tell_is_not_guessed(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        read_model(written(tmp_path, **changes))
