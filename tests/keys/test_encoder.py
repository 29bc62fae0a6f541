"""Names of encoder outputs: published values, and that every part of a name matters."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objkv.keys.chunk import ChunkKey
from objkv.keys.encoder import (
    EncoderIdentity,
    encoder_hash,
    encoder_key,
    encoder_root,
)
from objkv.keys.identity import GroupIdentity, Identity

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "encoder.json").read_text())
NAMESPACE = VECTORS["namespace"]

PLAIN = EncoderIdentity(
    model="org/vlm-7b",
    weights="sampled:0011",
    processor="sha256:2233",
    quantization=None,
    dtype="bfloat16",
    weights_epoch=0,
    tenant="default",
)
TUNED = replace(
    PLAIN,
    model="modèle",
    quantization="fp8",
    dtype="float16",
    weights_epoch=3,
    tenant="team-a",
    extra=(("mm_processor_kwargs", '{"max_pixels":1}'), ("x", "1")),
)


@pytest.mark.parametrize(("name", "identity"), [("plain", PLAIN), ("tuned", TUNED)])
def test_the_document_and_namespace_are_the_published_ones(
    name: str, identity: EncoderIdentity
) -> None:
    vector = VECTORS["identities"][name]
    assert identity.canonical() == vector["canonical"].encode("ascii")
    assert identity.namespace() == vector["namespace"]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"weights": "sampled:0012"},
        {"processor": "sha256:2234"},
        {"quantization": "awq"},
        {"dtype": "float32"},
        {"weights_epoch": 1},
        {"tenant": "other"},
        {"extra": (("video_pruning", "evs 0.5"),)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_everything_in_the_document_changes_the_namespace(change: dict[str, Any]) -> None:
    assert replace(PLAIN, **change).namespace() != PLAIN.namespace()


def test_the_document_is_not_one_of_kv() -> None:
    group = GroupIdentity("full", None, ("l0",), heads=1, content=8, block_size=16)
    kv = Identity("m", "w", 0, "default", None, "bfloat16", (group,), "canonical", 16)
    assert PLAIN.document()["hash"] != kv.document()["hash"]
    assert PLAIN.document()["format"] == kv.document()["format"]


@pytest.mark.parametrize("item", VECTORS["items"], ids=lambda item: repr(item["identifier"])[:20])
def test_an_item_has_the_published_hash(item: dict[str, Any]) -> None:
    found = encoder_hash(NAMESPACE, item["identifier"], salt=item["salt"])
    assert found.hex() == item["hash"]


def test_the_key_is_that_of_a_chunk_of_one_shard() -> None:
    assert encoder_root(NAMESPACE).hex() == VECTORS["root"]
    key = encoder_key(NAMESPACE, bytes.fromhex(VECTORS["items"][0]["hash"]))
    assert key.path() == VECTORS["path"]
    assert ChunkKey.parse(key.path()) == key
    assert key.field == "0"


Name = tuple[str, str | None]
names = st.tuples(
    st.text(st.characters(), max_size=12), st.none() | st.text(st.characters(), max_size=6)
)


@given(names, names)
def test_different_items_have_different_names(one: Name, other: Name) -> None:
    hashes = [encoder_hash(NAMESPACE, i, salt=s) for i, s in (one, other)]
    assert (hashes[0] == hashes[1]) is (one == other)


def test_namespaces_do_not_share_names() -> None:
    other = "f" * 32
    assert encoder_hash(NAMESPACE, "x") != encoder_hash(other, "x")
    assert encoder_root(NAMESPACE) != encoder_root(other)
