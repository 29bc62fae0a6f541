"""``objkv size``."""

import pytest

from tests.cli.conftest import Run

TINY = ("--model", "qwen3-32b")


def test_a_known_model_is_told_for_people(run: Run) -> None:
    ran = run("size", "--model", "llama-3.1-8b", "--rate", "2")
    assert (ran.code, ran.err) == (0, "")
    told = {line.split("  ")[0]: line for line in ran.out.splitlines()}
    assert "128 KiB" in told["per token"]
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


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "auto            all if a replica computes fewer than 12,628 prompt tokens/s"),
        ({"OBJKV_SAVE_TO_BUCKET": "all"}, "all             save_to_bucket says so"),
        ({"OBJKV_AGENT_DISK_URL": "file:///disk"}, "reused          agent_disk_url keeps the rest"),
        (
            {"OBJKV_BULK_URL": "s3://kv", "OBJKV_S3_ENDPOINT_URL": "https://minio:9000"},
            "all             minio, a private address: no price",
        ),
    ],
)
def test_what_is_put_into_the_bucket_and_why(
    settings: dict[str, str], said: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    ran = run("size", "--model", "llama-3.1-70b", "--tp", "4", "-o", "wide")
    (told,) = [line for line in ran.out.splitlines() if line.startswith("save_to_bucket")]
    assert " ".join(said.split()) in " ".join(told.split())
