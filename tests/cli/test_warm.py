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

from tests.cli.conftest import Machine, Run
from tests.ops.warm.fake_vllm import LONGEST, FakeVllm, Place
from tests.support.samples import CHUNK, NAMESPACE, TOKENS, save, save_identity

OBJKV = Path(sys.executable).with_name("objkv")


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


def test_who_may_only_read_may_warm_and_match_says_that_all_is_stored(
    run: Run, server: FakeVllm, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OBJKV_ROLE", "reader")
    ran = run("warm", str(prompts), "--endpoint", server.url)
    assert ran.code == 0
    assert f"namespace {NAMESPACE}, model acme/tiny" in ran.out
    assert "warmed         4" in ran.out
    for line in prompts.read_text().splitlines():
        tokens = json.loads(line)["prompt"]
        matched = run("match", "--json", stdin=json.dumps(tokens)).document
        assert matched["usable_tokens"] == len(tokens)


def test_a_prompt_that_could_not_be_warmed_is_1_and_named(
    run: Run, server: FakeVllm, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f"{json.dumps(list(range(LONGEST)))}\n{json.dumps(TOKENS)}\n")
    ran = run("warm", str(file), "--endpoint", server.url)
    assert ran.code == 1
    assert f"{file}:1" in ran.out
    assert "maximum context length" in ran.out


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
    ran = run("warm", str(prompts), "--check", "--model", "none", "--json")
    assert (ran.code, ran.document["mode"], ran.document["stored_before"]) == (1, "check", 1)
    ran = run("warm", "-", "--check", "--namespace", NAMESPACE, stdin='{"prompt": "a text"}')
    assert ran.code == 2
    assert "is text, which a server tokenizes: name one with --endpoint" in ran.err


@pytest.mark.slow
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
                assert connection.recv(65_536).startswith(b"GET /v1/models")
                process.send_signal(number)
                process.communicate(timeout=60)
    assert process.returncode == code
