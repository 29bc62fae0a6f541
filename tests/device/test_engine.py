"""A real vLLM engine over a slow device computes the same tokens from stored KV, and every load
brings the bytes that were saved. Without an ordering edge that concerns the engine, it does not.

The model itself computes at once, so these mutants are those of copies that come too late. For
kernels that come late see ``tests.device.test_order``.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from tests.device.engine_run import Verdict

ROOT = Path(__file__).parents[2]
ROUNDS = 12
BOUND_S = 900
pytestmark = pytest.mark.slow
FOUND = {
    "async": (
        "the mark of a lane is recorded on the compute stream",
        "marks are not recorded",
        "marks are always done",
        "slabs of loads are free before their copies",
        "loads are reported before their copies",
        "slabs are reclaimed before their copies",
        "slabs are taken back before their copies",
        "the fence does not hold computing",
        "the oldest mark counts as done",
        "saves are reported before their copies",
        "preempted requests are not fenced",
    ),
    "layerwise": (
        "marks are not recorded",
        "marks hold nothing",
        "no layer holds computing",
        "slabs of loads are free before their copies",
    ),
    "async-agent": (
        "marks are not recorded",
        "loads are reported before their copies",
        "saves are reported before their copies",
    ),
    "layerwise-agent": ("marks hold nothing",),
}
"""Load modes, also by a node agent, and mutants that are found there."""


@pytest.mark.timeout(BOUND_S)
@pytest.mark.parametrize(
    "load_mode",
    FOUND,
)
def test_answers_from_late_copies_are_those_of_a_cold_run(
    loaded_sim: ModuleType, load_mode: str
) -> None:
    right, *mutants = _run(load_mode, FOUND[load_mode])
    assert right.is_right, right
    assert right.rounds == ROUNDS
    assert right.hit_share > 0.8  # vLLM computes the last block of each prompt itself
    assert right.compared > 50 * ROUNDS
    assert {mutant.mutant for mutant in mutants} == set(FOUND[load_mode])
    assert not [mutant for mutant in mutants if mutant.is_right or mutant.fault]


def _run(load_mode: str, mutants: Sequence[str]) -> list[Verdict]:
    command = [sys.executable, "-m", "tests.device.engine_run", load_mode, str(ROUNDS), *mutants]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=BOUND_S
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return [Verdict(**json.loads(line)) for line in lines]
