"""``objkv warm``, against servers that talk as vLLM's do."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Machine, Run, refused
from tests.ops.warm.fake_vllm import ADAPTER, ADAPTER_DIGEST, LONGEST, FakeVllm, Gate, Place
from tests.support.samples import CHUNK, NAMESPACE, TOKENS, save, save_identity
from tests.support.servers.redis import valkey_server, wait_until

OBJKV = Path(sys.executable).with_name("objkv")
KEYS = [
    "command", "complete", "mode", "namespace", "model", "ending", "prompts", "stored_before",
    "short", "warmed", "shared", "failed", "left", "prompt_tokens", "asked_tokens",
    "cached_tokens", "saved_chunks", "saved_bytes", "retries", "seconds", "endpoints", "failures",
    "resumed", "earlier", "why", "promotion", "omitted",
]  # fmt: skip


@pytest.fixture
def server(machine: Machine) -> Iterator[FakeVllm]:
    with FakeVllm(Place(machine.bulk, machine.index)) as server:
        yield server


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": [*TOKENS, *range(number * CHUNK)]} for number in range(4)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def test_all_is_stored_afterwards_and_match_says_so(
    run: Run, server: FakeVllm, prompts: Path
) -> None:
    ran = run("warm", str(prompts), "--endpoint", server.url)
    assert ran.code == 0
    assert f"namespace {NAMESPACE}, model acme/tiny" in ran.out
    assert "warmed         4" in ran.out
    for line in prompts.read_text().splitlines():
        tokens = json.loads(line)["prompt"]
        matched = run("match", "--json", stdin=json.dumps(tokens)).document
        assert matched["usable_tokens"] == len(tokens)


def test_the_keys_for_machines_are_stable(run: Run, server: FakeVllm, prompts: Path) -> None:
    document = run("warm", str(prompts), "--endpoint", server.url, "--json").document
    assert list(document) == KEYS
    assert (document["warmed"], document["saved_chunks"]) == (4, 6)
    again = run("warm", str(prompts), "--endpoint", server.url, "--json").document
    assert (again["stored_before"], again["warmed"], again["resumed"]) == (4, 0, False)


def test_prompts_come_from_stdin_too(run: Run, server: FakeVllm) -> None:
    stdin = json.dumps({"token_ids": list(TOKENS), "cache_salt": "acme"})
    ran = run("warm", "-", "--endpoint", server.url, "--json", stdin=stdin)
    assert (ran.code, ran.document["warmed"]) == (0, 1)
    assert server.real[0].salt == "acme"


def test_a_prompt_that_could_not_be_warmed_is_1_and_named(
    run: Run, server: FakeVllm, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f"{json.dumps(list(range(LONGEST)))}\n{json.dumps(TOKENS)}\n")
    ran = run("warm", str(file), "--endpoint", server.url)
    assert ran.code == 1
    assert f"{file}:1" in ran.out
    assert "maximum context length" in ran.out


def test_nobody_there_is_3(run: Run, server: FakeVllm, prompts: Path) -> None:
    server.end()
    ran = run("warm", str(prompts), "--endpoint", server.url)
    assert (ran.code, ran.out) == (3, "")
    assert ran.err.count(f"{server.url}/health: connection refused") == 1
    assert "skipped" not in ran.err


def test_text_is_not_checked_without_a_tokenizer(run: Run, machine: Machine) -> None:
    save_identity(machine.bulk)
    save(machine.bulk, machine.index)
    refused(
        run("warm", "-", "--check", stdin='"some words"'), "stdin:1: is text", "set --tokenizer"
    )


def test_adapters_are_known_by_what_they_hold(run: Run, server: FakeVllm) -> None:
    line = json.dumps({"prompt": list(TOKENS), "model": ADAPTER})
    given = ("warm", "-", "--endpoint", server.url, "--json")
    ran = run(*given, stdin=line)
    assert ran.code == 2
    assert f"--lora {ADAPTER}=FOLDER" in ran.err
    ran = run(*given, "--lora", f"{ADAPTER}={ADAPTER_DIGEST.hex()}", stdin=line)
    assert (ran.code, ran.document["warmed"]) == (0, 1)
    matched = run(
        "match", "--json", "--lora-digest", ADAPTER_DIGEST.hex(), stdin=json.dumps(TOKENS)
    ).document
    assert matched["usable_tokens"] == len(TOKENS)


def test_who_may_only_read_may_warm_but_not_promote(
    run: Run, server: FakeVllm, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OBJKV_ROLE", "reader")
    assert run("warm", str(prompts), "--endpoint", server.url).code == 0
    refused(run("warm", "--promote"), "role reader does not allow --promote")


def test_what_is_stored_is_checked_without_anybody_who_computes(
    run: Run, machine: Machine, prompts: Path
) -> None:
    save_identity(machine.bulk)
    save(machine.bulk, machine.index)
    ran = run("warm", str(prompts), "--check")
    assert ran.code == 1
    assert "stored   1" in ran.out
    assert "missing  3" in ran.out
    assert f"{prompts}:2" in ran.out
    assert "3 of 4 chunks are stored" in ran.out
    ran = run("warm", "-", "--check", "--json", "--namespace", NAMESPACE, stdin=json.dumps(TOKENS))
    assert (ran.code, ran.document["stored_before"], ran.document["complete"]) == (0, 1, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "no prompts: name JSON Lines files"),
        (
            ("-", "--endpoint", "http://127.0.0.1:9"),
            "http://127.0.0.1:9/health: connection refused",
        ),
        (("/nowhere.jsonl", "--endpoint", "http://127.0.0.1:9"), "/nowhere.jsonl: no such file"),
        (("/nowhere.jsonl", "--check"), "/nowhere.jsonl: no such file"),
        (("-", "--check", "--promote"), "--check and --promote exclude each other"),
        (("-",), "choose how to compute"),
        (("-", "--endpoint", "x", "--promote"), "choose how to compute"),
        (("-", "--endpoint", "x", "--engine-arg", "a=1"), "--engine-arg needs --model"),
        (("-", "--model", "x", "--engine-arg", "a"), "write NAME=VALUE"),
        (("-", "--endpoint", "x", "--lora", "a=b"), "b is neither a folder nor a digest"),
        (("-", "--endpoint", "x", "--index-url", "memory:"), "index_url is memory:"),
        (("--promote",), "the bulk store has no namespaces"),
    ],
)
def test_wrong_usage_is_a_sentence(
    run: Run, machine: Machine, arguments: tuple[str, ...], words: str
) -> None:
    ran = run("warm", *arguments, stdin='"x"')
    assert ran.code in (2, 3)
    assert words in ran.err
    assert ran.out == ""


def test_a_run_that_is_interrupted_says_what_it_did_and_the_next_one_goes_on(
    run: Run, home: Path, server: FakeVllm, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    every = [list(range(number * 100, number * 100 + CHUNK)) for number in range(1, 9)]
    file.write_text("\n".join(map(json.dumps, every)))
    gate = Gate()
    server.every = lambda handler: len(server.real) > 4 and gate(handler)
    arguments = ("warm", str(file), "--endpoint", server.url, "--concurrency", "1", "--json")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OBJKV_")}
    with subprocess.Popen(
        [str(OBJKV), *arguments],
        env={**environ, "XDG_CACHE_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        wait_until(lambda: len(server.real) == 5, "half of the prompts to be asked", bound_s=120)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    first = json.loads(out)
    assert (process.returncode, err) == (130, b"")
    assert (first["ending"], first["warmed"], first["left"]) == ("interrupted", 4, 4)
    gate.opened.set()
    server.every = None

    second = run(*arguments).document
    assert (second["resumed"], second["earlier"]["warmed"]) == (True, 4)
    assert second["stored_before"] + second["warmed"] == 8
    assert second["complete"]
    assert run(*arguments).document["resumed"] is False  # what is done is done


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_who_says_nothing_does_not_hold_up_an_end(
    machine: Machine, home: Path, prompts: Path, number: int, code: int
) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OBJKV_")}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(120)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with subprocess.Popen(
            [str(OBJKV), "warm", str(prompts), "--endpoint", url],
            env={**environ, "XDG_CACHE_HOME": str(home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            connection, _ = silent.accept()
            with connection:
                assert connection.recv(65_536).startswith(b"GET /health")
                process.send_signal(number)
                process.communicate(timeout=60)
    assert process.returncode == code


def test_what_is_in_a_bucket_becomes_hot_in_redis(
    run: Run, machine: Machine, tmp_path: Path
) -> None:
    with valkey_server(tmp_path / "valkey") as valkey:
        url = f"{valkey.url}/0"
        save_identity(machine.bulk)
        keys = save(machine.bulk, None)
        assert run("rebuild", "--apply", "--index-url", url).code == 0
        ran = run("warm", "--promote", "--index-url", url, "--json")
        assert (ran.code, ran.document["failures"]) == (0, [])
        assert ran.document["promotion"]["promoted"] == len(keys)
        with valkey.client() as client:
            hot = [key for key in client.keys("objkv:p:*") if b"safetensors" in key]
        assert len(hot) == len(keys)
        again = run("warm", "-", "--promote", "--index-url", url, stdin=json.dumps(TOKENS))
        assert again.code == 0
        assert "hot before  3" in again.out
