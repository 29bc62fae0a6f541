"""``objkv match``."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.cli.conftest import Machine, Run
from tests.support.samples import CHUNK, TOKENS


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps([*TOKENS, 1, 2]))
    return path


def test_a_stored_prompt_is_told_chunk_by_chunk(run: Run, machine: Machine, prompt: Path) -> None:
    hashes = machine.fill()
    ran = run("match", "--tokens", str(prompt))
    assert ran.code == 0
    assert all(digest in ran.out for digest in hashes)
    assert "48 of 50 tokens would be served" in ran.out
    assert "the last 2 tokens do not fill a chunk" in ran.out
    for index, hits in (("", "0"), ("--index-url=bulk:", "–")):
        lines = run("match", "--tokens", str(prompt), *filter(None, [index])).out.splitlines()
        assert [line.split()[6] for line in lines if hashes[0] in line] == [hits]


def test_tokens_come_from_standard_input_or_from_text(
    run: Run, machine: Machine, tmp_path: Path
) -> None:
    machine.fill()
    for arguments in ((), ("--tokens", "-")):
        ran = run("match", "--json", *arguments, stdin=" ".join(map(str, TOKENS)))
        assert ran.document["usable_tokens"] == 3 * CHUNK
    words = {f"w{token}": token for token in range(200)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = " ".join(f"w{token}" for token in TOKENS)
    (tmp_path / "prompt.txt").write_text(text)
    for given in (("--text", text), ("--text-file", str(tmp_path / "prompt.txt"))):
        ran = run("match", *given, "--tokenizer", str(tmp_path), "--json")
        assert ran.document["usable_tokens"] == 3 * CHUNK


def test_an_explained_match_counts_no_chunk_that_replicas_would_refuse(
    run: Run, machine: Machine, prompt: Path
) -> None:
    machine.fill()
    before = run("match", "--tokens", str(prompt), "--json").document
    key = next(e.key for e in machine.bulk.scan("") if before["chunks"][0]["prefix_hash"] in e.key)
    payload = bytearray(machine.bulk.get(key) or b"")
    payload[200] ^= 1
    machine.bulk.put(key, bytes(payload))
    ran = run("match", "--explain", "--tokens", str(prompt))
    assert "its payload is corrupt" in ran.out
    assert "\n0 of " in ran.out
    assert "yes" not in [line.split()[3] for line in ran.out.splitlines() if "L0-" in line]
    assert "verify --all --quarantine" in ran.out
