"""Finding a namespace by model, tenant or the first hex digits."""

import re
from dataclasses import replace

import pytest

from objkv.errors import UnclearName
from objkv.index.base import ChunkEntry, ShardRecord
from objkv.ops.backends_view import HANDOFF_LAYOUT
from objkv.ops.listing import find_namespace
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.samples import IDENTITY, NAMESPACE, save_identity, save_in_format

MODELS = [
    replace(IDENTITY, model=model, tenant=tenant)
    for model, tenant in (
        ("meta-llama/Llama-3.1-8B", "red"),
        ("meta-llama/Llama-3.1-8B", "blue"),
        ("Qwen/Qwen3-8B", "blue"),
    )
]
LLAMA_A, LLAMA_B, QWEN = (identity.namespace() for identity in MODELS)
STRAY, GONE = "d" * 32, "e" * 32


@pytest.fixture
def bulk() -> MemoryStore:
    store = MemoryStore()
    for identity in MODELS:
        save_identity(store, identity)
    store.put(f"{STRAY}/00/{'0' * 40}/0.L0-1_H0-1.safetensors", b"x")
    return store


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        (QWEN, QWEN),
        (QWEN[:6], QWEN),
        (QWEN[:12], QWEN),
        ("Qwen/Qwen3-8B", QWEN),
        ("Qwen3-8B", QWEN),
        ("Qw", QWEN),
        ("blue/Qwen3", QWEN),
        ("red/meta-llama/Llama-3.1-8B", LLAMA_A),
        ("blue/Llama-3.1-8B", LLAMA_B),
        ("red/", LLAMA_A),
        ("ddd", STRAY),
        (GONE, GONE),
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
    for name in (GONE, GONE[:31] + "f"):
        index.publish(
            ChunkEntry(name, bytes(20), bytes(20), 0, 16), {"0.L0-1_H0-1": shard}, ttl_s=9
        )
        if name == GONE:
            assert find_namespace(bulk, index, "eee") == GONE
    with pytest.raises(UnclearName, match="2 namespaces match eeeeeeee") as caught:
        find_namespace(bulk, index, "eeeeeeee")
    assert re.fullmatch(f"{GONE}  unknown model  tenant –  –  1 B", caught.value.choices[0])


def test_an_unknown_whole_name_is_refused_where_it_must_exist(bulk: MemoryStore) -> None:
    assert find_namespace(bulk, MemoryIndex(), QWEN, must_exist=True) == QWEN
    with pytest.raises(UnclearName, match="no namespace matches e"):
        find_namespace(bulk, MemoryIndex(), GONE, must_exist=True)


def test_an_empty_name_never_stands_for_the_only_namespace() -> None:
    store = MemoryStore()
    save_identity(store)
    with pytest.raises(UnclearName, match="is empty"):
        find_namespace(store, MemoryIndex(), "")


def test_without_a_name_only_namespaces_with_kv_are_a_choice() -> None:
    store = MemoryStore()
    save_identity(store)
    save_identity(store, replace(IDENTITY, page_layout=HANDOFF_LAYOUT))
    save_in_format(store, 1)
    assert find_namespace(store, MemoryIndex(), None) == NAMESPACE


def test_of_namespaces_with_one_name_those_of_an_earlier_format_are_no_choice() -> None:
    store = MemoryStore()
    old = save_in_format(store, 1)
    assert find_namespace(store, MemoryIndex(), IDENTITY.model) == old
    save_identity(store)
    assert find_namespace(store, MemoryIndex(), IDENTITY.model) == NAMESPACE
    assert find_namespace(store, MemoryIndex(), old[:8]) == old
