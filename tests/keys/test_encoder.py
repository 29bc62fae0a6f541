"""Names of encoder outputs: published values, and that every part of a name matters."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objkv.keys.chunk import ChunkKey
from objkv.keys.encoder import encoder_hash, encoder_key, encoder_root

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "encoder.json").read_text())
NAMESPACE = VECTORS["namespace"]


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
