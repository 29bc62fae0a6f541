"""Pins as documents: written documents are read, and all others are refused."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objkv.cache.pins import DOCUMENT_BYTES_MAX, Pin, parse_pin, pin_path, read_pins, scan_pins
from objkv.errors import PayloadError, StoreDenied
from tests.contracts.memory_store import MemoryStore

NAMESPACE = "0" * 32
OTHER = "1" * 32
HASHES = tuple(bytes([number]) * 20 for number in range(4))


def pin(*chunks: bytes, until_s: int = 2_000) -> Pin:
    return Pin(NAMESPACE, chunks, 256 * len(chunks), until_s, 1_000)


@given(
    st.lists(st.binary(min_size=20, max_size=20), min_size=1, max_size=9),
    st.integers(0, 2**50),
    st.integers(1, 2**39),
    st.integers(0, 2**50),
)
def test_what_is_written_is_read(
    chunks: list[bytes], tokens: int, until_s: int, created_s: int
) -> None:
    written = Pin(NAMESPACE, tuple(chunks), tokens, until_s, created_s)
    assert parse_pin(written.document(), written.path()) == written


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"namespace": OTHER},
        {"namespace": None},
        {"chunks": []},
        {"chunks": "ab"},
        {"chunks": [7]},
        {"chunks": ["AB" * 20]},
        {"chunks": [HASHES[0].hex()]},
        {"chunks": None},
        {"tokens": "3"},
        {"tokens": True},
        {"until_s": 0},
        {"until_s": 1e9},
        {"until_s": 1 << 60},
        {"created_s": None},
    ],
)
def test_other_documents_are_refused(changes: dict[str, Any]) -> None:
    good = pin(HASHES[0], HASHES[1])
    document = json.dumps(json.loads(good.document()) | changes).encode()
    with pytest.raises(PayloadError, match="not a pin"):
        parse_pin(document, good.path())


def test_chunks_are_pinned_until_the_last_of_their_pins_ends() -> None:
    store = MemoryStore()
    for one in (pin(*HASHES[:2], until_s=30), pin(*HASHES[:3], until_s=20)):
        store.put(one.path(), one.document())
    until = {HASHES[0]: 30, HASHES[1]: 30, HASHES[2]: 20}
    assert read_pins(store, NAMESPACE) == until
    assert read_pins(store, OTHER) == {}


def test_a_document_that_cannot_be_read_pins_nothing_and_is_told() -> None:
    store = MemoryStore()
    good = pin(HASHES[0])
    store.put(good.path(), good.document())
    store.put(pin_path(NAMESPACE, HASHES[1]), b"{}")
    store.put(pin_path(NAMESPACE, HASHES[2]), b" " * (DOCUMENT_BYTES_MAX + 1))
    assert read_pins(store, NAMESPACE) == {HASHES[0]: 2_000}
    found = list(scan_pins(store, NAMESPACE))
    assert [type(one) for one in found] == [Pin, PayloadError, PayloadError]


@pytest.mark.parametrize("filling", ["[", "[],", "{},", '"a",'])
def test_a_document_of_many_values_is_not_taken_apart(
    filling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parsed(document: bytes) -> None:
        raise AssertionError("parsed")

    document = f'{{"chunks":[{filling * 200_000}0]}}'.encode()
    monkeypatch.setattr("objkv.cache.pins.json.loads", parsed)
    with pytest.raises(PayloadError) as told:
        parse_pin(document, pin_path(NAMESPACE, HASHES[0]))
    assert isinstance(told.value.__cause__, ValueError)


@pytest.mark.parametrize("limit", ["_PINS_MAX", "_CHUNKS_MAX"])
def test_more_pins_than_anybody_has_are_refused_and_none_is_left_out(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    for prefix_hash in HASHES[:3]:
        store.put(pin(prefix_hash).path(), pin(prefix_hash).document())
    monkeypatch.setattr(f"objkv.cache.pins.{limit}", 3)
    assert len(read_pins(store, NAMESPACE)) == 3
    monkeypatch.setattr(f"objkv.cache.pins.{limit}", 2)
    with pytest.raises(StoreDenied, match="more than"):
        read_pins(store, NAMESPACE)
