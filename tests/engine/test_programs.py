"""``objkv demo`` as it is, and the real replicas of ``objkv gpu-check``."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from objkv.ops.gpu_check import GpuCase, GpuCheck
from tests.engine.harness import VLLM_CACHE
from tests.support.agents import agent_folder
from tests.support.servers.redis import wait_until

pytestmark = pytest.mark.slow
COMMAND = (sys.executable, "-c", "from objkv.cli.app import main; main()")
PATIENCE_S = 300


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments],
        env={**os.environ, **VLLM_CACHE, "XDG_CACHE_HOME": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ran(folder: Path, *arguments: str) -> Any:
    process = started(folder, *arguments)
    out, err = process.communicate(timeout=1_500)
    assert process.returncode == 0, err
    return json.loads(out)


def test_the_demos_second_replica_is_served_what_the_first_computed(folder: Path) -> None:
    report = ran(folder, "demo", "--small", "--json")
    # Whole chunks of 256 tokens: of a prompt that A was asked too, and of a document alone.
    assert [row["prompt_tokens"] for row in report["rows"]] == [812, 812, 1324, 1324]
    assert [row["served_tokens"] for row in report["rows"]] == [768, 512, 1280, 1024]
    assert report["load_failures"] == 0
    assert all(row["identical"] for row in report["rows"])
    assert report["fine"]
    # What it stored can be looked at afterwards.
    settings = report["stored"]["settings"]
    options = ("--bulk-url", settings["OBJKV_BULK_URL"], "--index-url", settings["OBJKV_INDEX_URL"])
    listed = ran(folder, "ls", "--json", *options)["namespaces"]
    assert [found["payloads"] for found in listed] == [report["stored"]["chunks"]]
    prompt = folder / "objkv/demo/prompts/document-2-question-2.json"
    matched = ran(folder, "match", "--json", "--tokens", str(prompt), *options)
    assert matched["usable_tokens"] == 1280


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_it_leaves_no_replica_behind(tmp_path: Path, number: signal.Signals) -> None:
    process = started(tmp_path, "demo", "--small")
    models = tmp_path / "objkv/demo/models"
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not (replicas := _running(models)):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 128 + number
    # One that was just being started is ended by the system, which takes its moment.
    wait_until(lambda: not _running(models), f"{replicas} to end", bound_s=PATIENCE_S)


def _running(models: Path) -> list[str]:
    found = []
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if os.fsencode(models) in cmdline.read_bytes():
                found.append(cmdline.parent.name)
        except OSError:  # it ended meanwhile
            continue
    return found


def test_in_gpu_check_loaded_documents_give_the_answers_of_a_replica_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases: list[GpuCase] = []
    stages = set[str]()
    check = GpuCheck(
        None,
        tmp_path,
        tmp_path / "models",
        lambda name, _: stages.add(name),
        lengths=(1024, 2048),
        repeats=1,
    )
    with agent_folder() as sockets:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(sockets))
        check.cases(cases)
    assert not [case for case in cases if not case.ok]
    loaded = [case for case in cases if case.name.endswith("the document is loaded")]
    assert len(loaded) == 4
    assert {name.partition(" (")[0] for name in stages} == {"replica R", "replica A", "replica B"}
