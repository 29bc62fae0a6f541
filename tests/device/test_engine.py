"""A real vLLM engine over a slow device computes the same tokens from stored KV, and every load
brings the bytes that were saved. Without an ordering edge that concerns the engine, it does not.

The model itself computes at once, so these mutants are those of copies that come too late.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.device.engine_run import Verdict

ROOT = Path(__file__).parents[2]
ROUNDS, BOUND_S = 6, 600
FOUND = (
    "loads are reported before their copies",
    "marks are not recorded",
    "preempted requests are not fenced",
    "saves are reported before their copies",
)


@pytest.mark.slow
@pytest.mark.timeout(BOUND_S)
def test_answers_from_late_copies_are_those_of_a_cold_run(loaded_sim: ModuleType) -> None:
    command = [sys.executable, "-m", "tests.device.engine_run", str(ROUNDS), *FOUND]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=BOUND_S
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    right, *mutants = [Verdict(**json.loads(line)) for line in lines]
    assert right.is_right, right
    assert right.rounds == ROUNDS
    assert right.hit_share > 0.8  # vLLM computes the last block of each prompt itself
    assert right.compared > 50 * ROUNDS
    assert sorted(mutant.mutant for mutant in mutants) == sorted(FOUND)
    assert not [mutant for mutant in mutants if mutant.is_right or mutant.fault]
