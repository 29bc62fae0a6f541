"""Finding a namespace by model, tenant or the first hex digits."""

import json
import re
from dataclasses import replace

import pytest

from objkv.errors import UnclearName
from objkv.index.base import ChunkEntry, ShardRecord
from objkv.keys.identity import identity_path
from objkv.ops.backends_view import HANDOFF_LAYOUT
from objkv.ops.listing import find_namespace
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.samples import IDENTITY, NAMESPACE, save_identity

LLAMA_A, LLAMA_B, QWEN, STRAY, GHOST = (digit * 32 for digit in "abcde")


@pytest.fixture
def bulk() -> MemoryStore:
    store = MemoryStore()
    for name, model, tenant in (
        (LLAMA_A, "meta-llama/Llama-3.1-8B", "red"),
        (LLAMA_B, "meta-llama/Llama-3.1-8B", "blue"),
        (QWEN, "Qwen/Qwen3-8B", "blue"),
    ):
        document = {"model": model, "tenant": tenant}
        store.put(identity_path(name), json.dumps(document).encode())
    store.put(f"{STRAY}/00/{'0' * 40}/0.L0-1_H0-1.safetensors", b"x")
    return store


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        (QWEN, QWEN),
        ("c", QWEN),
        ("cccccccc", QWEN),
        ("Qwen/Qwen3-8B", QWEN),
        ("Qwen3-8B", QWEN),
        ("Qw", QWEN),
        ("blue/Qwen3", QWEN),
        ("red/meta-llama/Llama-3.1-8B", LLAMA_A),
        ("blue/Llama-3.1-8B", LLAMA_B),
        ("red/", LLAMA_A),
        ("ddd", STRAY),
        (GHOST, GHOST),
    ],
)
def test_one_namespace_has_many_names(bulk: MemoryStore, wanted: str, name: str) -> None:
    assert find_namespace(bulk, MemoryIndex(), wanted) == name


@pytest.mark.parametrize("wanted", ["meta-llama", "Llama-3.1-8B", "blue/", None])
def test_a_choice_lists_model_tenant_age_and_size(bulk: MemoryStore, wanted: str | None) -> None:
    with pytest.raises(UnclearName, match=r"; choose one\n|; choose one$") as caught:
        find_namespace(bulk, MemoryIndex(), wanted)
    line = rf"{LLAMA_B}  meta-llama/Llama-3.1-8B  tenant blue  \d+ \w+ old  –"
    assert any(re.fullmatch(line, choice) for choice in caught.value.choices)


def test_an_unknown_name_lists_what_is_stored(bulk: MemoryStore) -> None:
    with pytest.raises(UnclearName, match="no namespace matches Mistral; choose one of"):
        find_namespace(bulk, MemoryIndex(), "Mistral")


def test_an_empty_store_says_what_may_be_wrong() -> None:
    with pytest.raises(UnclearName, match="either no replica has saved yet, or bulk_url is wrong"):
        find_namespace(MemoryStore(), MemoryIndex(), None)


def test_hex_digits_also_find_a_namespace_of_the_index_alone(bulk: MemoryStore) -> None:
    index = MemoryIndex()
    shard = ShardRecord(1, 1, True, False, "", 1)
    for name in (GHOST, GHOST[:31] + "f"):
        index.publish(
            ChunkEntry(name, bytes(20), bytes(20), 0, 16), {"0.L0-1_H0-1": shard}, ttl_s=9
        )
        if name == GHOST:
            assert find_namespace(bulk, index, "eee") == GHOST
    with pytest.raises(UnclearName, match="2 namespaces match eeeeeeee") as caught:
        find_namespace(bulk, index, "eeeeeeee")
    assert re.fullmatch(f"{GHOST}  unknown model  tenant –  –  1 B", caught.value.choices[0])


def test_an_unknown_whole_name_is_refused_where_it_must_exist(bulk: MemoryStore) -> None:
    assert find_namespace(bulk, MemoryIndex(), QWEN, must_exist=True) == QWEN
    with pytest.raises(UnclearName, match="no namespace matches e"):
        find_namespace(bulk, MemoryIndex(), GHOST, must_exist=True)


def test_an_empty_name_never_stands_for_the_only_namespace() -> None:
    store = MemoryStore()
    save_identity(store)
    with pytest.raises(UnclearName, match="is empty"):
        find_namespace(store, MemoryIndex(), "")


def test_without_a_name_only_namespaces_with_kv_are_a_choice() -> None:
    store = MemoryStore()
    save_identity(store)
    save_identity(store, replace(IDENTITY, page_layout=HANDOFF_LAYOUT))
    assert find_namespace(store, MemoryIndex(), None) == NAMESPACE
