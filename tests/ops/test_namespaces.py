"""Finding a namespace by model, tenant or the first hex digits."""

import json
import re

import pytest

from objkv.errors import UnclearName
from objkv.index.memory import MemoryIndex
from objkv.keys.identity import identity_path
from objkv.ops.listing import find_namespace, named_namespaces
from objkv.stores.memory import MemoryStore

LLAMA_A, LLAMA_B, QWEN, STRAY = (digit * 32 for digit in "abcd")


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
        ("e" * 32, "e" * 32),
    ],
)
def test_one_namespace_has_many_names(bulk: MemoryStore, wanted: str, name: str) -> None:
    assert find_namespace(bulk, MemoryIndex(), wanted) == name


@pytest.mark.parametrize("wanted", ["meta-llama", "Llama-3.1-8B", "blue/", None])
def test_a_choice_lists_model_tenant_age_and_size(bulk: MemoryStore, wanted: str | None) -> None:
    with pytest.raises(UnclearName, match="choose one with --namespace") as caught:
        find_namespace(bulk, MemoryIndex(), wanted)
    line = rf"{LLAMA_B}  meta-llama/Llama-3.1-8B  tenant blue  \d+ \w+ old  –"
    assert any(re.fullmatch(line, choice) for choice in caught.value.choices)


def test_an_unknown_name_lists_what_is_stored(bulk: MemoryStore) -> None:
    with pytest.raises(UnclearName, match="no namespace matches Mistral; choose one of"):
        find_namespace(bulk, MemoryIndex(), "Mistral")


def test_an_empty_store_says_what_may_be_wrong() -> None:
    with pytest.raises(UnclearName, match="either no replica has saved yet, or bulk_url is wrong"):
        find_namespace(MemoryStore(), MemoryIndex(), None)


def test_namespaces_without_a_document_have_no_model(bulk: MemoryStore) -> None:
    found = {one.name: one.model for one in named_namespaces(bulk)}
    assert found[STRAY] is None
    assert found[QWEN] == "Qwen/Qwen3-8B"
