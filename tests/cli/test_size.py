"""``objkv size``."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run, refused

TINY = ("--layers", "4", "--kv-heads", "2", "--head-size", "64")


def test_a_known_model_is_told_for_people(run: Run) -> None:
    ran = run("size", "--model", "llama-3.1-8b", "--rate", "2")
    assert (ran.code, ran.err) == (0, "")
    told = {line.split("  ")[0]: line for line in ran.out.splitlines()}
    assert "128.0 KiB" in told["per token"]
    assert "32.0 MiB" in told["per chunk"]
    assert "config.json of meta-llama/Llama-3.1-8B" in told["model"]
    assert {"bucket", "Redis", "PUT", "GET", "per month", "network, saving"} <= told.keys()


def test_the_keys_for_machines_are_stable(run: Run) -> None:
    document = run("size", *TINY, "--json").document
    assert list(document) == ["sizing", "layout", "load", "prices"]
    assert list(document["sizing"]) == [
        "model", "source", "kv_dtype", "chunk", "prompt_chunks", "loaded_chunks",
        "saved_chunks_per_s", "chunks", "records", "bulk_bytes", "index_bytes", "hot_bytes",
        "puts_per_s", "gets_per_s", "redis_commands_per_s", "save_bytes_per_s",
        "load_bytes_per_s", "storage_month", "requests_month", "month",
    ]  # fmt: skip
    assert list(document["sizing"]["chunk"]) == [
        "tokens", "groups", "payloads", "raw_bytes", "header_bytes", "nbytes",
        "largest_payload_bytes", "token_bytes", "record_bytes",
    ]  # fmt: skip
    assert document["sizing"]["chunk"]["raw_bytes"] == 4 * 2 * 128 * 2 * 256


def test_settings_decide_about_chunks_and_their_life(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OBJKV_CHUNK_TOKENS", "512")
    monkeypatch.setenv("OBJKV_TTL_S", "600")
    document = run("size", *TINY, "--json").document
    assert document["sizing"]["chunk"]["tokens"] == 512
    assert document["load"]["ttl_s"] == 600
    assert run("size", *TINY, "--ttl", "60", "--json").document["load"]["ttl_s"] == 60


def test_payloads_lie_hot_only_with_redis(run: Run) -> None:
    small = (*TINY, "--json", "--tp", "2")
    assert run("size", *small).document["sizing"]["hot_bytes"] == 0
    redis = ("--index-url", "redis://127.0.0.1:1", "--bulk-url", "s3://nowhere/kv")
    assert run("size", *small, *redis).document["sizing"]["hot_bytes"] == 0, "256 KiB and a header"
    less = (*small, *redis, "--kv-dtype", "fp8")
    assert run("size", *less).document["sizing"]["hot_bytes"] > 0


def test_a_folder_is_read(run: Run, tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "head_dim": 64,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    document = run("size", "--model", str(tmp_path), "--json").document
    assert document["sizing"]["chunk"]["raw_bytes"] == 4 * 2 * 128 * 2 * 256
    assert document["sizing"]["source"] == str(tmp_path / "config.json")


def test_models_known_by_name_are_listed(run: Run) -> None:
    assert "meta-llama/Llama-3.1-70B" in run("size", "--list").out
    models = run("size", "--list", "--json").document["models"]
    assert models["qwen3-32b"]["layers"] == 64


def test_prompts_shorter_than_a_chunk_are_told(run: Run) -> None:
    ran = run("size", *TINY, "--prompt-tokens", "100")
    assert ran.code == 0
    assert "shorter than one chunk" in ran.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "no model given"),
        (("--layers", "4"), "no model given"),
        (("--model", "llama-3.1-8b", "--layers", "4"), "give either --model or --layers"),
        (("--model", "no-such"), "no-such is neither a directory nor a built-in model name"),
        (("--model", "lama"), "built-in model name; did you mean llama-3"),
        (("--model", "qwen3"), "did you mean qwen3-0.6b or qwen3-8b or qwen3-32b?"),
        (("--model", "zzzzzz"), "objkv size --list shows all names"),
        (("--model", "/nowhere/llama"), "--model /nowhere/llama: no such directory"),
        ((*TINY, "--rate", "-1"), "--rate -1: must be 0 to 1,000,000,000"),
        ((*TINY, "--codec-ratio", "0"), "--codec-ratio 0: must be 0.1 to 100"),
        ((*TINY, "--used", "nan"), "'nan' is not a duration"),
        ((*TINY, "--kv-dtype", "int3"), "--kv-dtype int3"),
        ((*TINY, "--stored", "2"), "--stored 2: must be 0 to 1"),
        ((*TINY, "--price-gb-month", "nan"), "price"),
        ((*TINY, "--tp", "3"), "3"),
    ],
)
def test_wrong_usage_is_2_and_a_sentence(run: Run, arguments: tuple[str, ...], words: str) -> None:
    refused(run("size", *arguments), words)
