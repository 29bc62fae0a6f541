"""``objkv size``."""

import pytest

from tests.cli.conftest import Run

TINY = ("--layers", "4", "--kv-heads", "2", "--head-size", "64")


def test_a_known_model_is_told_for_people(run: Run) -> None:
    ran = run("size", "--model", "llama-3.1-8b", "--rate", "2")
    assert (ran.code, ran.err) == (0, "")
    told = {line.split("  ")[0]: line for line in ran.out.splitlines()}
    assert "128.0 KiB" in told["per token"]
    assert "32.0 MiB" in told["per chunk"]
    assert "config.json of meta-llama/Llama-3.1-8B" in told["model"]
    assert {"bucket", "Redis", "PUT", "GET", "per month", "network, saving"} <= told.keys()


def test_settings_decide_about_chunks_and_their_life(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OBJKV_CHUNK_TOKENS", "512")
    monkeypatch.setenv("OBJKV_TTL_S", "600")
    document = run("size", *TINY, "--json").document
    assert document["sizing"]["chunk"]["tokens"] == 512
    assert document["load"]["ttl_s"] == 600
    assert run("size", *TINY, "--ttl", "60", "--json").document["load"]["ttl_s"] == 60


def test_models_known_by_name_are_listed(run: Run) -> None:
    assert "meta-llama/Llama-3.1-70B" in run("size", "--list").out
    models = run("size", "--list", "--json").document["models"]
    assert models["qwen3-32b"]["layers"] == 64
