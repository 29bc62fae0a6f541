"""The published prefix hashes, by objkv and by a second implementation written from the spec.

The second one knows hashlib and struct only: what it needs is what a tool in another language
needs, so ``docs/keyspace.md`` must say all of it.
"""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from objkv.keys.prefix import MultimodalItem, PromptExtras, prefix_hashes, root_hash

CASES = json.loads((Path(__file__).parents[1] / "vectors" / "prefix_hashes.json").read_text())


def by_the_book(case: dict[str, Any]) -> list[str]:
    """``docs/keyspace.md``, word by word."""
    size, tokens = case["chunk_tokens"], case["tokens"]
    chain = [sha(field(b"objkv-prefix-1") + field(case["namespace"].encode()))]
    for chunk in range(len(tokens) // size):
        ids = tokens[chunk * size : (chunk + 1) * size]
        encoded = struct.pack(f"<{size}I", *ids)
        chain.append(sha(field(chain[-1]) + field(encoded) + field(extras(case, chunk))))
    return [digest.hex() for digest in chain]


def extras(case: dict[str, Any], chunk: int) -> bytes:
    out = b""
    start, end = chunk * case["chunk_tokens"], (chunk + 1) * case["chunk_tokens"]
    if chunk == 0 and case["lora_digest"] is not None:
        out += extra(b"lora", bytes.fromhex(case["lora_digest"]))
    if chunk == 0 and case["salt"] is not None:
        out += extra(b"salt", case["salt"].encode())
    items = [(s, bytes.fromhex(identifier), n) for identifier, s, n in case["items"]]
    for s, identifier, n in sorted(items):
        if s < end and s + n > start:
            out += extra(b"mm", identifier, struct.pack("<q", s - start), struct.pack("<Q", n))
    if str(chunk) in case["embeds"]:
        out += extra(b"embeds", bytes.fromhex(case["embeds"][str(chunk)]))
    return out


def extra(kind: bytes, *fields: bytes) -> bytes:
    return field(kind) + struct.pack("<Q", len(fields)) + b"".join(map(field, fields))


def field(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def sha(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:20]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_specification_alone_gives_the_published_hashes(case: dict[str, Any]) -> None:
    assert by_the_book(case) == [case["root"], *case["hashes"]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_objkv_gives_the_published_hashes(case: dict[str, Any]) -> None:
    lora = case["lora_digest"]
    prompt_extras = PromptExtras(
        lora_digest=None if lora is None else bytes.fromhex(lora),
        salt=case["salt"],
        items=tuple(MultimodalItem(bytes.fromhex(i), start, n) for i, start, n in case["items"]),
        embeds={int(chunk): bytes.fromhex(digest) for chunk, digest in case["embeds"].items()},
    )
    hashes = prefix_hashes(case["namespace"], case["tokens"], case["chunk_tokens"], prompt_extras)
    assert root_hash(case["namespace"]).hex() == case["root"]
    assert [digest.hex() for digest in hashes] == case["hashes"]


def test_the_published_hashes_are_all_different() -> None:
    assert len({tuple(case["hashes"]) for case in CASES}) == len(CASES)
