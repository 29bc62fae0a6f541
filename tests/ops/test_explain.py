"""Matches of prompts, prompts as operators write them, and why a match ends where it does."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from objkv.errors import ConfigError
from objkv.index.base import Record
from objkv.keys.prefix import PromptExtras, prefix_hashes
from objkv.keys.tokenizer import Tokenizers
from objkv.ops.chat import LocalTokenizer
from objkv.ops.explain import Explanation, Question, explain_match
from objkv.ops.match import match_prompt, parse_tokens
from objkv.ops.warm.prompts import WarmPrompt
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
    [(2 * DAY_S, "the record may have expired"), (60, "a replica is saving the chunk now")],
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


NONE = PromptExtras()


def test_a_stored_prompt_is_served_up_to_its_last_whole_chunk(
    bulk: MemoryStore, index: MemoryIndex
) -> None:
    keys = save(bulk, index)
    report = match_prompt(index, IDENTITY, [*TOKENS, 1, 2], NONE)
    assert (report.namespace, report.model, report.chunk_tokens) == (NAMESPACE, "acme/tiny", CHUNK)
    assert (report.prompt_tokens, report.usable_tokens) == (3 * CHUNK + 2, 3 * CHUNK)
    assert [chunk.prefix_hash for chunk in report.chunks] == [key.prefix_hash for key in keys]
    first = report.chunks[0]
    assert (first.token_start, first.token_end) == (0, CHUNK)
    assert first.payloads == ("0",)
    assert (first.groups_missing, first.usable, first.created_s) == ((), True, CREATED_S)
    assert first.nbytes == len(bulk.get(keys[0].path()) or b"")


def test_what_follows_a_hole_or_a_chunk_without_some_heads_is_stored_but_not_served(
    bulk: MemoryStore, index: MemoryIndex
) -> None:
    keys = save(bulk, index)
    for shards, stored in (((), 2), ((LEFT,), 3)):
        index.drop(NAMESPACE, keys[1].prefix_hash)
        save(bulk, index, TOKENS[: 2 * CHUNK], shards=shards)
        report = match_prompt(index, IDENTITY, TOKENS, NONE)
        assert (report.usable_tokens, report.stored_chunks) == (CHUNK, stored)
        assert [chunk.usable for chunk in report.chunks] == [True, False, False]
        assert report.chunks[1].groups_missing == (0,)


@pytest.mark.parametrize("text", ["[1, 2, 3]", "1 2 3", "1,2,3", "1, 2,\n3\n", " \n[1,2,3]"])
def test_token_ids_are_read_as_json_or_separated(text: str) -> None:
    assert parse_tokens(text) == [1, 2, 3]
    assert parse_tokens(" \n") == []


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2", "[1, true]", "[1.5]", "[[1]]", "1 x", "-1", "4294967296", "[-1]", "٣", "[" * 9999,
        "9" * 9999, f'["{"9" * 9999}"]', f"[{'9' * 9999}]", "[NaN]", "[1e999]", "x" * 9999,
    ],
)  # fmt: skip
def test_what_is_no_token_id_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="token id") as caught:
        parse_tokens(text)
    assert len(str(caught.value)) < 300


def test_truncation_and_padding_saved_with_a_tokenizer_are_ignored_as_by_vllm(
    tmp_path: Path,
) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 5, "b": 6, "?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizers(None).tokens("a b a", tmp_path) == [5, 6, 5]
    assert Tokenizers(None).tokens("b", tmp_path / "tokenizer.json") == [6]
    tokenizers = Tokenizers(tmp_path)
    assert tokenizers.tokens("a b a", tokenizers.place_of("m")) == [5, 6, 5]
    assert LocalTokenizer(tmp_path).tokenize(WarmPrompt("p", text="a b a")) == [5, 6, 5]


def test_text_with_half_of_a_character_is_refused(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"?": 0}, unk_token="?")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="half of a character"):
        Tokenizers(None).tokens("a\udcff", tmp_path)
    with pytest.raises(ConfigError, match="half of a character"):
        LocalTokenizer(tmp_path).tokenize(WarmPrompt("p", text="a\ud800"))


def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a file: name a tokenizer\.json"):
        Tokenizers(None).tokens("a", tmp_path)
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    with pytest.raises(ConfigError, match=r"is not a valid tokenizer\.json"):
        Tokenizers(None).tokens("a", broken)
