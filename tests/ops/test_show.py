"""Inspection of a chunk's payloads, correct and damaged."""

from collections.abc import Callable

import pytest

from objkv.codec.payload import CODECS
from objkv.ops.show import inspect_payload
from tests.contracts.memory_store import MemoryStore
from tests.support.samples import CHUNK, CREATED_S, save


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
