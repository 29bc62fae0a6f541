"""Untrusted identity documents."""

import hashlib
import json
from dataclasses import replace

import pytest

from objkv.errors import PayloadError
from objkv.keys.encoder import EncoderIdentity
from objkv.keys.identity import FORMAT, canonical_json, identity_path
from objkv.ops.backends_view import (
    DOCUMENT_BYTES_MAX,
    HANDOFF_LAYOUT,
    parse_identity,
    read_identity,
)
from objkv.ops.warm.lookup import known_identities
from tests.contracts.memory_store import MemoryStore
from tests.support.samples import IDENTITY, NAMESPACE, save_identity


def test_an_identity_comes_back_as_it_was_saved(bulk: MemoryStore) -> None:
    assert read_identity(bulk, NAMESPACE) is None
    save_identity(bulk)
    assert read_identity(bulk, NAMESPACE) == IDENTITY


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
        (FORMAT - 1, "objkv sweep --apply"),
        (FORMAT + 1, "a later version of objkv"),
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
