"""Untrusted identity documents."""

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest

from objkv.errors import PayloadError
from objkv.keys.encoder import EncoderIdentity
from objkv.keys.identity import canonical_json, identity_path
from objkv.ops.backends_view import (
    DOCUMENT_BYTES_MAX,
    HANDOFF_LAYOUT,
    parse_identity,
    read_identity,
)
from objkv.ops.warm.lookup import known_identities
from objkv.stores.memory import MemoryStore
from tests.support.samples import IDENTITY, NAMESPACE, save_identity


def test_an_identity_comes_back_as_it_was_saved(bulk: MemoryStore) -> None:
    assert read_identity(bulk, NAMESPACE) is None
    save_identity(bulk)
    assert read_identity(bulk, NAMESPACE) == IDENTITY


@pytest.mark.parametrize(
    "change",
    [
        {"tenant": "other"},
        {"format": 2},
        {"hash": "md5"},
        {"unknown": 1},
        {"groups": []},
        {"groups": [1]},
        {"groups": 7},
        {"extra": [["a"]]},
        {"chunk_tokens": 3},
        {"chunk_tokens": None},
    ],
)
def test_a_document_that_is_not_the_namespaces_is_refused(change: dict[str, Any]) -> None:
    document = canonical_json({**IDENTITY.document(), **change})
    with pytest.raises(PayloadError, match=r"identity\.json"):
        parse_identity(document, NAMESPACE)


def test_a_namespace_of_encoder_outputs_is_told_from_one_that_nobody_knows() -> None:
    identity = EncoderIdentity("m", "w", "p", None, "bfloat16", 0, "default")
    with pytest.raises(PayloadError, match="encoder outputs"):
        parse_identity(identity.canonical(), identity.namespace())


@pytest.mark.parametrize(
    "changed",
    [
        {"model": 5},
        {"model": None},
        {"weights_epoch": 0.0},
        {"weights_epoch": True},
        {"tenant": ["a"]},
        {"chunk_tokens": 512.0},
        {"quantization": {"a": 1}},
        {"extra": [["a", 5]]},
        {"groups": []},
    ],
)
def test_a_document_of_other_types_is_none_though_its_digest_is_right(
    changed: dict[str, object],
) -> None:
    document = canonical_json(IDENTITY.document() | changed)
    namespace = hashlib.sha256(document).hexdigest()[:32]
    with pytest.raises(PayloadError):
        parse_identity(document, namespace)


@pytest.mark.parametrize(
    "changed",
    [{"kind": "other"}, {"layers": "ab"}, {"layers": [1]}, {"heads": 1.0}, {"block_size": True}],
)
def test_a_group_of_other_types_is_none_either(changed: dict[str, object]) -> None:
    values = json.loads(IDENTITY.canonical())
    values["groups"][0] |= changed
    document = canonical_json(values)
    with pytest.raises(PayloadError):
        parse_identity(document, hashlib.sha256(document).hexdigest()[:32])


@pytest.mark.parametrize(
    "document", [b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b"\xff", b'"\\ud800"', b""]
)
def test_what_is_no_document_at_all_is_a_payload_error(document: bytes) -> None:
    with pytest.raises(PayloadError):
        parse_identity(document, NAMESPACE)


def test_a_document_of_any_length_is_not_read_whole() -> None:
    bulk = MemoryStore()
    bulk.put(identity_path(NAMESPACE), bytes(DOCUMENT_BYTES_MAX + 1))
    with pytest.raises(PayloadError, match="too long"):
        read_identity(bulk, NAMESPACE)


def test_hand_offs_and_encoder_outputs_are_no_kv_that_is_known() -> None:
    bulk = MemoryStore()
    handoffs = replace(IDENTITY, page_layout=HANDOFF_LAYOUT)
    outputs = EncoderIdentity("m", "w", "p", None, "bfloat16", 0, "default")
    for identity in (IDENTITY, handoffs, outputs):
        bulk.put(identity_path(identity.namespace()), identity.canonical())
    assert known_identities(bulk) == {NAMESPACE: IDENTITY}
