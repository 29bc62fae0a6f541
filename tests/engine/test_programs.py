"""``objkv demo`` as it is, and the real replicas of ``objkv gpu-check``."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from objkv.ops.gpu_check import GpuCase, GpuCheck
from tests.engine.harness import VLLM_CACHE, run_program
from tests.support.agents import agent_folder
from tests.support.waiting import wait_for_server

pytestmark = pytest.mark.slow
COMMAND = (sys.executable, "-c", "from objkv.cli.app import main; main()")
PATIENCE_S = 300


def ran(folder: Path, *arguments: str) -> Any:
    return json.loads(run_program(*COMMAND, *arguments, folder=folder))


def test_the_demos_second_replica_is_served_what_the_first_computed(tmp_path: Path) -> None:
    report = ran(tmp_path, "demo", "--small", "--json")
    # Whole chunks of 256 tokens: of a prompt that A was asked too, and of a document alone.
    assert [row["prompt_tokens"] for row in report["rows"]] == [812, 812, 1324, 1324]
    assert [row["served_tokens"] for row in report["rows"]] == [768, 512, 1280, 1024]
    assert report["load_failures"] == 0
    assert all(row["identical"] for row in report["rows"])
    assert report["fine"]
    # What it stored can be looked at afterwards.
    settings = report["stored"]["settings"]
    options = ("--bulk-url", settings["OBJKV_BULK_URL"], "--index-url", settings["OBJKV_INDEX_URL"])
    listed = ran(tmp_path, "ls", "--json", *options)["namespaces"]
    assert [found["payloads"] for found in listed] == [report["stored"]["chunks"]]
    prompt = tmp_path / "cache/objkv/demo/prompts/document-2-question-2.json"
    matched = ran(tmp_path, "match", "--json", "--tokens", str(prompt), *options)
    assert matched["usable_tokens"] == 1280


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_it_leaves_no_replica_behind(tmp_path: Path, number: signal.Signals) -> None:
    models = tmp_path / "objkv/demo/models"
    with subprocess.Popen(
        [*COMMAND, "demo", "--small"],
        env={**os.environ, **VLLM_CACHE, "XDG_CACHE_HOME": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            wait_for_server(
                lambda: process.poll() is not None or _running(models), bound_s=PATIENCE_S
            )
            assert process.poll() is None
            process.send_signal(number)
            assert process.wait(PATIENCE_S) == 128 + number
        finally:
            process.kill()
    # One that was just being started is ended by the system, which takes its moment.
    wait_for_server(lambda: not _running(models), bound_s=PATIENCE_S)


def _running(models: Path) -> bool:
    """Whether a process was told of these models."""
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it ended meanwhile
            if os.fsencode(models) in cmdline.read_bytes():
                return True
    return False


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
