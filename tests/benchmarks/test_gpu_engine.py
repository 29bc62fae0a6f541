"""The program that runs engines on a GPU, as far as a machine without one can run it."""

import json
import subprocess
import sys

import pytest

from tests.support.agents import ROOT


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_engines_answer_the_same_with_and_without_objkv() -> None:
    pytest.importorskip("vllm")
    command = [sys.executable, "-m", "scripts.gpu_engine", "--cpu", "--stages", "base,objkv"]
    command += ["--lengths", "512"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    rows = [json.loads(line[8:]) for line in done.stdout.splitlines()]
    (loaded,) = (row for row in rows if row["kind"] == "loaded")
    assert loaded["served"] == [512] * 4
    assert loaded["equal"] == [True] * 4
