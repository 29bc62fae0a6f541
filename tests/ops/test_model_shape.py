"""``objkv.ops.size.model``: configurations as authors write them, and those that do not tell."""

import json
from pathlib import Path
from typing import Any

import pytest

from objkv.errors import ConfigError
from objkv.ops.size.model import LayerShape, ModelShape, read_model

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "torch_dtype": "bfloat16",
}
FULL = LayerShape("full", 2, 128)
SLIDING = LayerShape("sliding_window", 2, 128, 32)


def written(folder: Path, **changes: Any) -> Path:
    document = {name: value for name, value in {**LLAMA, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(document))
    return folder


def layers_of(folder: Path, **changes: Any) -> tuple[LayerShape, ...]:
    return read_model(written(folder, **changes)).layers


def test_a_plain_model_is_read(tmp_path: Path) -> None:
    shape = read_model(written(tmp_path))
    assert shape.layers == (FULL,) * 4
    assert (shape.kv_dtype, shape.name) == ("bfloat16", tmp_path.name)
    assert read_model(tmp_path / "config.json").layers == shape.layers


def test_the_cache_may_have_another_dtype_than_the_model(tmp_path: Path) -> None:
    assert read_model(written(tmp_path), "fp8").kv_dtype == "fp8"
    assert read_model(written(tmp_path, torch_dtype=None, dtype="float16")).kv_dtype == "float16"
    with pytest.raises(ConfigError, match="--kv-dtype"):
        read_model(written(tmp_path, torch_dtype=None))


def test_what_authors_leave_out_has_its_usual_meaning(tmp_path: Path) -> None:
    assert layers_of(tmp_path, num_key_value_heads=None)[0] == LayerShape("full", 8, 128)
    assert layers_of(tmp_path, head_dim=96)[0] == LayerShape("full", 2, 192)
    assert layers_of(tmp_path, sliding_window=32, use_sliding_window=False) == (FULL,) * 4


def test_the_language_model_of_one_that_sees_is_read(tmp_path: Path) -> None:
    text = {**LLAMA, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", "text_config": text}))
    assert len(read_model(tmp_path).layers) == 3


def test_latents_are_one_head(tmp_path: Path) -> None:
    found = layers_of(tmp_path, kv_lora_rank=512, qk_rope_head_dim=64, v_head_dim=128)
    assert found == (LayerShape("mla", 1, 576),) * 4


def test_layers_are_of_the_kinds_that_the_file_says(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention"] * 2
    assert layers_of(tmp_path, layer_types=types, sliding_window=32) == (SLIDING, FULL) * 2
    assert layers_of(tmp_path, model_type="mistral", sliding_window=32) == (SLIDING,) * 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers is '4'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"hidden_size": None}, "head_dim"),
        ({"sliding_window": 32}, "does not say in which layers"),
        ({"layer_types": ["full_attention"]}, "does not name 4 layers"),
        ({"layer_types": ["linear_attention"] * 4}, "objkv ls"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window is None"),
        ({"mamba_d_state": 16}, "layer_types"),
        ({"index_topk": 2048}, "index_topk"),
        ({"v_head_dim": 32}, "differ in size"),
        ({"torch_dtype": "int4"}, "--kv-dtype"),
    ],
)
def test_what_the_file_does_not_tell_is_not_guessed(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        read_model(written(tmp_path, **changes))


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\x00"])
def test_other_files_are_no_configuration(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="no model's configuration"):
        read_model(tmp_path)


def test_a_folder_without_one_is_told_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_model(tmp_path)
    assert str(caught.value) == f"{tmp_path / 'config.json'}: No such file or directory"


@pytest.mark.parametrize(
    ("pattern", "sizes"),
    [
        ("ffff", [4]),
        ("sf" * 12, [12, 12]),
        ("sssssf" * 8, [8] * 6),
        # Twelve and thirteen differ by too little to be cut.
        ("sf" * 12 + "f", [12, 13]),
    ],
)
def test_layers_are_grouped_as_vllm_groups_them(pattern: str, sizes: list[int]) -> None:
    kinds = {"f": FULL, "s": SLIDING}
    shape = ModelShape("x", tuple(kinds[kind] for kind in pattern), "bfloat16", "a test")
    groups = shape.groups(16)
    assert [len(group.layers) for group in groups] == sizes
    named = [name for group in groups for name in group.layers]
    assert sorted(named) == sorted(f"model.layers.{n}.self_attn.attn" for n in range(len(pattern)))
