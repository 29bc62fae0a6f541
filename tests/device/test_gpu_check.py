"""The stages of ``gpu-check`` that need a device, on the simulated one, as a user runs them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("program", ["gpu_check", "gpu_order"])
@pytest.mark.usefixtures("loaded_sim")
def test_every_check_passes_on_the_simulated_device(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"objkv.connector.programs.{program}", "sim"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) > 20
    assert not [one for one in found if one.get("fault")]
    assert all(one.get("is_right", True) for one in found)
