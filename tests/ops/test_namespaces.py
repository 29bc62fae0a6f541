"""Namespaces: found by model, tenant or the first hex digits, listed, and untrusted documents."""

import hashlib
import json
import re
from dataclasses import replace

import pytest

from objkv.errors import PayloadError, UnclearName
from objkv.index.base import ChunkEntry, ShardRecord
from objkv.keys.encoder import EncoderIdentity
from objkv.keys.identity import FORMAT, canonical_json, identity_path
from objkv.ops.backends_view import (
    DOCUMENT_BYTES_MAX,
    HANDOFF_LAYOUT,
    parse_identity,
    read_identity,
)
from objkv.ops.listing import find_namespace, list_namespaces
from objkv.ops.warm.run import known_identities
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.samples import (
    CHUNK,
    IDENTITY,
    LEFT,
    NAMESPACE,
    RIGHT,
    save,
    save_identity,
    save_in_format,
)

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
def named() -> MemoryStore:
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
def test_one_namespace_has_many_names(named: MemoryStore, wanted: str, name: str) -> None:
    assert find_namespace(named, MemoryIndex(), wanted) == name


@pytest.mark.parametrize("wanted", ["meta-llama", "Llama-3.1-8B", "blue/", None])
def test_a_choice_lists_model_tenant_age_and_size(named: MemoryStore, wanted: str | None) -> None:
    with pytest.raises(UnclearName, match=r"; choose one\n|; choose one$") as caught:
        find_namespace(named, MemoryIndex(), wanted)
    line = rf"{LLAMA_B}  meta-llama/Llama-3.1-8B  tenant blue  \d+ \w+ old  –"
    assert any(re.fullmatch(line, choice) for choice in caught.value.choices)


@pytest.mark.parametrize(
    ("formats", "wanted", "words"),
    [
        ((), None, "either no replica has saved yet, or bulk_url is wrong"),
        ((FORMAT,), "", "is empty"),
        ((FORMAT,), GONE, "no namespace matches e"),
        ((FORMAT,), "Mistral", "no namespace matches Mistral; choose one of"),
        ((1, 0), None, r"2 namespaces, all of an earlier format .*sweep --apply"),
        ((1, 0, FORMAT), None, "3 namespaces, but none holds chunks"),
    ],
)
def test_where_there_is_no_such_namespace_it_is_said_what_there_is(
    formats: tuple[int, ...], wanted: str | None, words: str
) -> None:
    store = MemoryStore()
    for one in formats:
        if one != FORMAT:
            save_in_format(store, one)
        else:
            layout = HANDOFF_LAYOUT if wanted is None else IDENTITY.page_layout
            save_identity(store, replace(IDENTITY, page_layout=layout))
    with pytest.raises(UnclearName, match=words):
        find_namespace(store, MemoryIndex(), wanted, must_exist=True)


def test_hex_digits_also_find_a_namespace_of_the_index_alone(named: MemoryStore) -> None:
    index = MemoryIndex()
    shard = ShardRecord(1, 1, True, False, "", 1)
    for name in (GONE, GONE[:31] + "f"):
        index.publish(
            ChunkEntry(name, bytes(20), bytes(20), 0, 16), {"0.L0-1_H0-1": shard}, ttl_s=9
        )
        if name == GONE:
            assert find_namespace(named, index, "eee") == GONE
    with pytest.raises(UnclearName, match="2 namespaces match eeeeeeee") as caught:
        find_namespace(named, index, "eeeeeeee")
    assert re.fullmatch(f"{GONE}  unknown model  tenant –  –  1 B", caught.value.choices[0])


def test_without_a_name_only_namespaces_with_kv_are_a_choice() -> None:
    store = MemoryStore()
    save_identity(store)
    save_identity(store, replace(IDENTITY, page_layout=HANDOFF_LAYOUT))
    save_in_format(store, 1)
    store.put(f"{GONE}/{'0' * 40}", b"without its identity document")
    assert find_namespace(store, MemoryIndex(), None) == NAMESPACE
    lost = MemoryStore()
    for name in (GONE, "1" * 32):
        lost.put(f"{name}/{'0' * 40}", b"without its identity document")
    with pytest.raises(UnclearName, match="2 namespaces; choose one"):
        find_namespace(lost, MemoryIndex(), None)


def test_of_namespaces_with_one_name_those_of_an_earlier_format_are_no_choice() -> None:
    store = MemoryStore()
    old = save_in_format(store, 1)
    assert find_namespace(store, MemoryIndex(), IDENTITY.model) == old
    save_identity(store)
    assert find_namespace(store, MemoryIndex(), IDENTITY.model) == NAMESPACE
    assert find_namespace(store, MemoryIndex(), old[:8]) == old
    with pytest.raises(UnclearName, match=f"2 namespaces match {IDENTITY.model}") as caught:
        find_namespace(store, MemoryIndex(), IDENTITY.model, must_exist=True)
    assert {line.split()[0] for line in caught.value.choices} == {NAMESPACE, old}


OTHER_TYPES = (
    *({"format": 1}, {"hash": "md5"}, {"unknown": 1}, {"extra": [["a"]]}, {"extra": [["a", 5]]}),
    *({"groups": []}, {"groups": [1]}, {"groups": 7}, {"model": 5}, {"model": None}),
    *({"chunk_tokens": 3}, {"chunk_tokens": None}, {"chunk_tokens": 512.0}),
    *({"weights_epoch": 0.0}, {"weights_epoch": True}, {"tenant": ["a"]}),
    {"quantization": {"a": 1}},
)
OTHER_GROUPS = (
    *({"kind": "other"}, {"layers": "ab"}, {"layers": [1]}, {"heads": 1.0}, {"block_size": True}),
)
NO_DOCUMENTS = (b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b"\xff", b'"\\ud800"', b"")


def test_what_is_no_document_is_refused_though_its_digest_is_right() -> None:
    values = json.loads(IDENTITY.canonical())
    [group] = values["groups"]
    documents = [canonical_json(values | changed) for changed in OTHER_TYPES]
    documents += [canonical_json(values | {"groups": [group | one]}) for one in OTHER_GROUPS]
    for document in (*documents, *NO_DOCUMENTS):
        with pytest.raises(PayloadError, match=r"identity\.json"):
            parse_identity(document, hashlib.sha256(document).hexdigest()[:32])
    with pytest.raises(PayloadError, match="belongs to another namespace"):
        parse_identity(replace(IDENTITY, tenant="other").canonical(), NAMESPACE)
    for number, words in (
        (FORMAT - 1, r": format 1 is not read any more; objkv sweep --apply deletes its payloads$"),
        (
            FORMAT + 1,
            ": format 3 is unknown, perhaps of a later version of objkv; update objkv here$",
        ),
    ):
        document = canonical_json(values | {"format": number})
        with pytest.raises(PayloadError, match=words):
            parse_identity(document, hashlib.sha256(document).hexdigest()[:32])
    outputs = EncoderIdentity("m", "w", 0, "default", "p", None, "bfloat16")
    with pytest.raises(PayloadError, match="encoder outputs"):
        parse_identity(outputs.canonical(), outputs.namespace())


def test_a_document_of_any_length_is_not_read_whole() -> None:
    bulk = MemoryStore()
    bulk.put(identity_path(NAMESPACE), bytes(DOCUMENT_BYTES_MAX + 1))
    with pytest.raises(PayloadError, match="too long"):
        read_identity(bulk, NAMESPACE)


def test_hand_offs_and_encoder_outputs_are_no_kv_that_is_known() -> None:
    bulk = MemoryStore()
    handoffs = replace(IDENTITY, page_layout=HANDOFF_LAYOUT)
    outputs = EncoderIdentity("m", "w", 0, "default", "p", None, "bfloat16")
    for identity in (IDENTITY, handoffs, outputs):
        bulk.put(identity_path(identity.namespace()), identity.canonical())
    assert known_identities(bulk) == {NAMESPACE: IDENTITY}


def test_a_namespace_is_described_by_its_totals_and_no_record_is_read(
    bulk: MemoryStore, index: MemoryIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_identity(bulk)
    keys = save(bulk, index, shards=(LEFT, RIGHT))
    usage = index.usage()
    monkeypatch.setattr(index, "scan", lambda _: pytest.fail("read the records"))
    monkeypatch.setattr(index, "usage", lambda: usage)
    [summary] = list_namespaces(bulk, index)
    assert (summary.namespace, summary.model, summary.tenant) == (NAMESPACE, "acme/tiny", "default")
    assert (summary.kv_dtype, summary.chunk_tokens) == ("bfloat16", CHUNK)
    assert summary.payloads == 6
    assert summary.nbytes == sum(len(bulk.get(key.path()) or b"") for key in keys)
    assert (summary.chunks, summary.tokens, summary.problem) == (None, None, None)


def test_a_namespace_without_a_readable_document_is_still_listed(
    bulk: MemoryStore, index: MemoryIndex
) -> None:
    save(bulk, index)
    [summary] = list_namespaces(bulk, index)
    assert (summary.model, summary.problem) == (None, "no identity document")
    bulk.put(identity_path(NAMESPACE), b"{}")
    [summary] = list_namespaces(bulk, index)
    assert summary.model is None
    assert "damaged" in (summary.problem or "")
    assert summary.payloads == 3
