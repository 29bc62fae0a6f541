"""Inspection of a chunk's payloads, correct and damaged."""

from collections.abc import Callable

import pytest

from objkv.codec.payload import CODECS
from objkv.ops.show import find_payloads, inspect_payload, is_beginning, promised_payloads
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.samples import CHUNK, CREATED_S, LEFT, NAMESPACE, RIGHT, TOKENS, save


@pytest.mark.parametrize("codec", CODECS)
def test_a_true_payload_is_told_whole(bulk: MemoryStore, codec: str) -> None:
    key = save(bulk, None, codec=codec)[1]
    report = inspect_payload(bulk, key)
    assert (report.verdict, report.problem) == ("ok", None)
    assert (report.key, report.group, report.shard) == (key.path(), 0, "")
    assert (report.token_start, report.token_end) == (CHUNK, 2 * CHUNK)
    assert (report.writer, report.created_s) == ("host-1:4242", CREATED_S + CHUNK)
    assert [(f.layer, f.dtype, f.shape, f.problem) for f in report.frames] == [
        ("l.0", "BF16", (2, 2, 8, 8), None),
        ("l.1", "BF16", (2, 2, 8, 8), None),
    ]
    assert report.nbytes == len(bulk.get(key.path()) or b"")
    assert report.tokens_stored is False


def test_a_flipped_bit_in_a_frame_is_found_and_located(bulk: MemoryStore) -> None:
    key = save(bulk, None)[0]
    payload = bytearray(bulk.get(key.path()) or b"")
    payload[-1] ^= 1
    bulk.put(key.path(), payload)
    report = inspect_payload(bulk, key)
    assert report.verdict == "corrupt"
    assert [frame.problem is None for frame in report.frames] == [True, False]
    assert "l.1" in (report.problem or "")


@pytest.mark.parametrize(
    ("change", "verdict", "problem"),
    [
        (lambda own, other: own[:200] + bytes([own[200] ^ 1]) + own[201:], "corrupt", "header: "),
        *((lambda own, other, n=n: own[:n], "corrupt", "") for n in (0, 1, 100, 4096, -1)),
        (lambda own, other: own + b"x", "corrupt", "but the header states"),
        (lambda own, other: other, "corrupt", "claims to be "),
        (lambda own, other: None, "missing", ""),
    ],
)
def test_every_damage_is_told(
    bulk: MemoryStore, change: Callable[..., bytes | None], verdict: str, problem: str
) -> None:
    one, other, _ = save(bulk, None)
    changed = change(bulk.get(one.path()), bulk.get(other.path()))
    bulk.delete(one.path())
    if changed is not None:
        bulk.put(one.path(), changed)
    report = inspect_payload(bulk, one)
    assert report.verdict == verdict
    assert problem in (report.problem or "")


def test_payloads_are_found_by_the_beginning_of_their_hash(bulk: MemoryStore) -> None:
    keys = save(bulk, None, shards=(LEFT, RIGHT))
    digest = keys[0].prefix_hash
    assert find_payloads(bulk, [NAMESPACE], digest.hex()[:8]) == {(NAMESPACE, digest): keys[:2]}
    assert find_payloads(bulk, [NAMESPACE], digest.hex()) == {(NAMESPACE, digest): keys[:2]}
    assert find_payloads(bulk, ["ab" * 16], digest.hex()) == {}


def test_what_the_index_promises_is_known_without_the_bulk_store(
    bulk: MemoryStore, index: MemoryIndex
) -> None:
    key = save(bulk, index, TOKENS)[0]
    assert promised_payloads(index, NAMESPACE, key.prefix_hash) == [key]
    assert promised_payloads(index, NAMESPACE, b"x" * 20) == []


@pytest.mark.parametrize(
    ("text", "right"), [("abcd", True), ("abc", False), ("ABCD", False), ("a" * 41, False)]
)
def test_a_beginning_is_4_to_40_hex_digits(text: str, right: bool) -> None:
    assert is_beginning(text) is right
