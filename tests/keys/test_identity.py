"""The identity document: its one encoding, and that everything in it matters."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from objkv.errors import ConfigError
from objkv.keys.identity import (
    GroupIdentity,
    Identity,
    canonical_json,
    identity_path,
    name_model,
)

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "identities.json").read_text())

FULL = GroupIdentity("full", None, ("model.layers.0.attn", "model.layers.2.attn"), 8, 256, 16)
SLIDING = GroupIdentity("sliding_window", 1024, ("model.layers.1.attn",), 8, 256, 32)
PLAIN = Identity(
    model="org/model-7b",
    weights="sha256:0011",
    quantization=None,
    kv_dtype="bfloat16",
    groups=(FULL,),
    page_layout="canonical",
    chunk_tokens=256,
    weights_epoch=0,
    tenant="default",
)
HYBRID = replace(
    PLAIN,
    model="modèle",
    quantization="fp8",
    kv_dtype="fp8_e4m3",
    groups=(FULL, SLIDING),
    page_layout="opaque:x86-avx512",
    weights_epoch=3,
    tenant="team-a",
    extra=(("rope_theta", "1000000"), ("yarn", '{"factor":4}')),
)

KINDS = replace(
    PLAIN,
    model="org/kinds",
    groups=(
        GroupIdentity("mla", None, ("model.layers.0.attn",), 1, 576, 64),
        GroupIdentity("chunked_local", 8192, ("model.layers.1.attn",), 8, 256, 64),
        GroupIdentity(
            "mamba",
            None,
            ("model.layers.2.mixer",),
            2,
            68608,
            128,
            state="gdn_attention bfloat16[3,512] float32[4,64,64]",
        ),
    ),
)


@pytest.mark.parametrize(
    ("name", "identity"), [("plain", PLAIN), ("hybrid", HYBRID), ("kinds", KINDS)]
)
def test_the_canonical_document_and_namespace_are_the_published_ones(
    name: str, identity: Identity
) -> None:
    vector = VECTORS[name]
    assert identity.canonical() == vector["canonical"].encode("ascii")
    assert identity.namespace() == vector["namespace"]
    assert identity_path(identity.namespace()) == f"{vector['namespace']}/identity.json"


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"weights": "sha256:0012"},
        {"quantization": "awq"},
        {"kv_dtype": "fp8_e5m2"},
        {"groups": (FULL, FULL)},
        {"groups": (replace(FULL, kind="sliding_window", window=64),)},
        {"groups": (replace(FULL, layers=FULL.layers[::-1]),)},
        {"groups": (replace(FULL, heads=4),)},
        {"groups": (replace(FULL, content=128),)},
        {"groups": (replace(FULL, block_size=32),)},
        {"page_layout": "opaque:arm-neon"},
        {"chunk_tokens": 512},
        {"weights_epoch": 1},
        {"tenant": "other"},
        {"extra": (("rope_theta", "1"),)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_everything_in_the_document_changes_the_namespace(change: dict[str, Any]) -> None:
    assert replace(PLAIN, **change).namespace() != PLAIN.namespace()


def test_what_a_state_is_made_of_changes_the_namespace() -> None:
    *others, state = KINDS.groups
    changed = (*others, replace(state, state="gdn_attention float32[3,512] bfloat16[4,64,64]"))
    assert replace(KINDS, groups=changed).namespace() != KINDS.namespace()


@pytest.mark.parametrize(
    "change",
    [{"kind": "full"}, {"window": None}, {"window": 0}, {"state": "s"}, {"kind": "mamba"}],
    ids=str,
)
def test_a_group_has_what_its_kind_has_and_no_more(change: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        replace(SLIDING, **change)


def test_a_number_that_json_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"x": float("nan")})


def test_everything_but_printable_ascii_is_escaped_as_documented() -> None:
    text = '/"\\\b\t\n\f\r\x00\x1f\x7fé\U0001f600'
    escaped = rb'"/\"\\\b\t\n\f\r\u0000\u001f\u007f\u00e9\ud83d\ude00"'
    assert canonical_json(text) == escaped


def test_a_folder_has_one_name_however_its_path_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "llama"
    (folder / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(folder)
    paths = [".", "./", "inner/..", "../llama", "../llama/.", str(folder), f"{folder}/"]
    assert {name_model(path, None) for path in paths} == {"llama"}
    monkeypatch.chdir("inner")
    assert name_model("..", None) == "llama"
    assert name_model(str(tmp_path / "link"), None) == "link", "as it was always called"
    assert name_model("org/llama", None) == "org/llama"
    assert name_model(".", "mine") == "mine"


def test_a_model_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no name for its model: set model_id"):
        name_model("/", None)
    assert name_model("/", "mine") == "mine"
