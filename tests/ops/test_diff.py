"""Explanations of the differences between two identity documents."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objkv.errors import ConfigError
from objkv.keys.identity import GroupIdentity, Identity, sealed_extra
from objkv.ops.diff import REASONS, DiffReport, Document, diff, namespace_of, parse_document

LAYERS = tuple(f"model.layers.{i}.self_attn.attn" for i in range(28))
GROUP = GroupIdentity("full", None, LAYERS, heads=8, content=256, block_size=16)
IDENTITY = Identity(
    model="org/model",
    weights="sampled:" + "1" * 40,
    quantization=None,
    kv_dtype="bfloat16",
    groups=(GROUP,),
    page_layout="opaque:x86_64-avx512-amx",
    chunk_tokens=256,
    weights_epoch=0,
    tenant="default",
    extra=(("dtype", "bfloat16"),),
)


def as_read(identity: Identity) -> Document:
    document: Document = json.loads(identity.canonical())
    return document


def against(**changes: Any) -> DiffReport:
    """Compare the replica above with one that has these changes."""
    return diff(as_read(IDENTITY), as_read(replace(IDENTITY, **changes)))


def in_group(**changes: Any) -> DiffReport:
    return against(groups=(replace(GROUP, **changes),))


def test_equal_documents_share_however_they_are_written() -> None:
    document = as_read(IDENTITY)
    report = diff(document, dict(reversed(document.items())))
    assert (report.share, report.differences) == (True, ())
    assert namespace_of(document) == IDENTITY.namespace()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model": "org/other", "weights": "sampled:2"}, "model"),
        ({"weights": "sampled:" + "2" * 40}, "weights"),
        ({"quantization": "awq"}, "quantization"),
        ({"kv_dtype": "fp8"}, "kv_dtype"),
        ({"page_layout": "opaque:aarch64-default-neon"}, "page_layout"),
        ({"chunk_tokens": 512}, "chunk_tokens"),
        ({"weights_epoch": 1}, "weights_epoch"),
        ({"tenant": "other"}, "tenant"),
        ({"extra": ()}, "extra.dtype"),
        ({"extra": (("dtype", "bfloat16"), ("longrope", "long"))}, "extra.longrope"),
        ({"extra": sealed_extra(IDENTITY.extra, ("signed",))}, "extra.payloads"),
    ],
)
def test_every_field_is_named_and_explained(changes: dict[str, Any], field: str) -> None:
    report = against(**changes)
    assert not report.share
    [found] = [d for d in report.differences if d.field == field]
    assert (found.why, found.fix) == REASONS[field]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kind": "sliding_window", "window": 4096}, "window"),
        ({"layers": LAYERS[:-1]}, "layers"),
        ({"heads": 4}, "heads"),
        ({"content": 128}, "content"),
        ({"block_size": 32}, "block_size"),
    ],
)
def test_groups_are_compared_field_by_field(changes: dict[str, Any], field: str) -> None:
    found = {d.field: d for d in in_group(**changes).differences}
    assert found.keys() == {f"groups[0].{name}" for name in changes}
    name = "groups[].block_size" if field == "block_size" else "groups[]"
    assert found[f"groups[0].{field}"].why == REASONS[name][0]


def test_what_an_identity_has_is_all_explained() -> None:
    assert {f for f in as_read(IDENTITY) if f != "extra"} <= REASONS.keys()


def test_another_dtype_is_one_cause_with_what_follows_from_it() -> None:
    report = against(
        extra=(("dtype", "float32"),), kv_dtype="float32", page_layout="opaque:x86_64-avx512-vec"
    )
    assert [d.field for d in report.differences if d.follows_from is None] == ["extra.dtype"]
    assert report.reason == "they do not share: dtype differs"
    assert {d.follows_from for d in report.differences[1:]} == {"extra.dtype"}


def test_a_reset_replica_is_told_from_one_whose_operator_raised_the_epoch() -> None:
    report = against(weights_epoch=1, extra=(("dtype", "bfloat16"), ("reset", "ab")))
    assert [d.field for d in report.differences if d.follows_from is None] == ["extra.reset"]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
names = st.sampled_from(["groups", "extra", "weights", "kv_dtype", "page_layout", "x"])
documents = st.dictionaries(names | st.text(max_size=3), values, max_size=6)


@given(a=documents, b=documents)
def test_two_share_exactly_when_their_namespaces_are_equal(a: Any, b: Any) -> None:
    report = diff(a, b)
    assert report.share == (namespace_of(a) == namespace_of(b))
    assert report.share == (not report.differences)
    assert diff(b, a).share == report.share
    assert report.reason
    assert diff(a, a).share


def test_a_document_is_read_from_json_or_from_a_log() -> None:
    line = IDENTITY.canonical().decode()
    log = f"INFO other=1 document=none\nINFO objkv identity namespace=x document={line}\nbye\n"
    assert parse_document(line, "f") == parse_document(log, "f") == as_read(IDENTITY)
    later = replace(IDENTITY, tenant="later").canonical().decode()
    assert parse_document(f"{log}document={later}", "f")["tenant"] == "later"


@pytest.mark.parametrize("text", ["", "[]", "7", "document={", '{"a": NaN}', "{" * 100_000])
def test_what_is_no_document_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="replica-b: no identity document"):
        parse_document(text, "replica-b")
