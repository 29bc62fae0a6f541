"""Explanations of why a match ends where it does."""

from collections.abc import Sequence

import pytest

from objkv.index.base import Record
from objkv.keys.prefix import PromptExtras, prefix_hashes
from objkv.ops.explain import Explanation, Question, explain_match
from objkv.ops.match import match_prompt
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.samples import (
    CHUNK,
    CREATED_S,
    IDENTITY,
    LEFT,
    NAMESPACE,
    TOKENS,
    save,
    save_identity,
)

HASHES = prefix_hashes(NAMESPACE, TOKENS, CHUNK)
DAY_S = 86_400


@pytest.fixture
def stored(bulk: MemoryStore, index: MemoryIndex) -> list[str]:
    """Return the paths of the three chunks' payloads."""
    save_identity(bulk)
    return [key.path() for key in save(bulk, index)]


def explain(
    bulk: MemoryStore,
    index: MemoryIndex,
    tokens: Sequence[int] = TOKENS,
    *,
    extras: PromptExtras | None = None,
    age_s: int = 60,
    ttl_s: int = DAY_S,
) -> Explanation:
    told = extras or PromptExtras()
    report = match_prompt(index, IDENTITY, tokens, told)
    clock = CREATED_S + 2 * CHUNK + age_s
    return explain_match(
        Question(bulk, index, IDENTITY, tokens, told, report, None, ttl_s, clock=lambda: clock)
    )


def forget(index: MemoryIndex, number: int) -> Record:
    [record] = index.lookup(NAMESPACE, [HASHES[number]])
    assert record is not None
    index.drop(NAMESPACE, HASHES[number])
    return record


def test_a_whole_match_was_stopped_by_nothing(
    bulk: MemoryStore, index: MemoryIndex, stored: list[str]
) -> None:
    why = explain(bulk, index, [*TOKENS, 1, 2])
    assert (why.cause, why.chunk, why.served_tokens) == ("nothing", None, 3 * CHUNK)
    assert "last 2 tokens do not fill a chunk" in why.evidence[0]
    assert all(one.startswith("whether ") for one in why.unknown)
    assert "last token does not fill a chunk" in explain(bulk, index, [*TOKENS, 1]).evidence[0]
    short = explain(bulk, index, [1, 2])
    assert "shorter than one chunk" in short.sentence
    assert short.unknown == []


def test_a_corrupt_frame_whose_record_was_withdrawn_is_read_to_its_last_byte(
    bulk: MemoryStore, index: MemoryIndex, stored: list[str]
) -> None:
    payload = bytearray(bulk.get(stored[2]) or b"")
    payload[-1] ^= 1
    bulk.put(stored[2], bytes(payload))
    forget(index, 2)
    why = explain(bulk, index)
    assert (why.cause, why.chunk) == ("corrupt", 2)
    assert "objkv sweep --apply" in why.advice[0], "verify reads no payload without a record"
    assert "has no record" in why.sentence


@pytest.mark.parametrize(
    ("age_s", "words"),
    [(2 * DAY_S, "its record is gone"), (60, "a replica is saving the chunk now")],
)
def test_a_payload_without_a_record_is_old_or_young(
    bulk: MemoryStore, index: MemoryIndex, stored: list[str], age_s: int, words: str
) -> None:
    forget(index, 1)
    why = explain(bulk, index, age_s=age_s)
    assert (why.cause, why.chunk) == ("orphan", 1)
    assert words in why.sentence
    assert any("rebuild" in one for one in why.advice)


def test_a_chunk_of_which_a_rank_is_missing_says_which_heads(
    bulk: MemoryStore, index: MemoryIndex
) -> None:
    save_identity(bulk)
    save(bulk, index, shards=(LEFT,))
    why = explain(bulk, index)
    assert (why.cause, why.chunk) == ("incomplete", 0)
    assert "group 0 (full) lacks layers or heads" in why.sentence


def test_a_salt_and_an_adapter_that_were_not_used_when_saving_are_told(
    bulk: MemoryStore, index: MemoryIndex, stored: list[str]
) -> None:
    both = explain(bulk, index, extras=PromptExtras(salt="x", lora_digest=b"y"))
    assert "without the cache_salt and the adapter" in both.sentence
