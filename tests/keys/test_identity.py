"""The identity documents of KV and of encoder outputs: their one encoding, and that everything in
them matters."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from objkv.errors import ConfigError
from objkv.keys.encoder import EncoderIdentity
from objkv.keys.identity import GroupIdentity, Identity, canonical_json, identity_path, name_model

FOLDER = Path(__file__).parents[1] / "vectors"
VECTORS = json.loads((FOLDER / "identities.json").read_text())
OF_ENCODERS = json.loads((FOLDER / "encoder.json").read_text())["identities"]

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


ENCODER = EncoderIdentity(
    model="org/vlm-7b",
    weights="sampled:0011",
    processor="sha256:2233",
    quantization=None,
    dtype="bfloat16",
    weights_epoch=0,
    tenant="default",
)
TUNED = replace(
    ENCODER,
    model="modèle",
    quantization="fp8",
    dtype="float16",
    weights_epoch=3,
    tenant="team-a",
    extra=(("mm_processor_kwargs", '{"max_pixels":1}'), ("x", "1")),
)


@pytest.mark.parametrize(
    ("vector", "identity"),
    [
        (VECTORS["plain"], PLAIN),
        (VECTORS["hybrid"], HYBRID),
        (VECTORS["kinds"], KINDS),
        (OF_ENCODERS["plain"], ENCODER),
        (OF_ENCODERS["tuned"], TUNED),
    ],
)
def test_the_canonical_document_and_namespace_are_the_published_ones(
    vector: dict[str, str], identity: Identity | EncoderIdentity
) -> None:
    assert identity.canonical() == vector["canonical"].encode("ascii")
    assert identity.namespace() == vector["namespace"]
    assert identity_path(identity.namespace()) == f"{vector['namespace']}/identity.json"


OF_BOTH: list[dict[str, Any]] = [
    {"model": "other"},
    {"weights": "sha256:0012"},
    {"quantization": "awq"},
    {"weights_epoch": 1},
    {"tenant": "other"},
    {"extra": (("rope_theta", "1"),)},
]
OF_KV: list[dict[str, Any]] = [
    {"kv_dtype": "fp8_e5m2"},
    {"groups": (FULL, FULL)},
    *(
        {"groups": (replace(FULL, **change),)}
        for change in (
            {"kind": "sliding_window", "window": 64},
            {"layers": FULL.layers[::-1]},
            {"heads": 4},
            {"content": 128},
            {"block_size": 32},
        )
    ),
    {"page_layout": "opaque:arm-neon"},
    {"chunk_tokens": 512},
]
STATE = replace(KINDS.groups[-1], state="gdn_attention float32[3,512] bfloat16[4,64,64]")


@pytest.mark.parametrize(
    ("identity", "change"),
    [
        *((PLAIN, change) for change in OF_BOTH + OF_KV),
        (KINDS, {"groups": (*KINDS.groups[:-1], STATE)}),
        *((ENCODER, change) for change in OF_BOTH),
        (ENCODER, {"processor": "sha256:2234"}),
        (ENCODER, {"dtype": "float32"}),
    ],
)
def test_everything_in_the_document_changes_the_namespace(
    identity: Identity | EncoderIdentity, change: dict[str, Any]
) -> None:
    assert replace(identity, **change).namespace() != identity.namespace()


def test_the_document_of_encoder_outputs_is_not_one_of_kv() -> None:
    assert ENCODER.document()["hash"] != PLAIN.document()["hash"]
    assert ENCODER.document()["format"] == PLAIN.document()["format"]


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
