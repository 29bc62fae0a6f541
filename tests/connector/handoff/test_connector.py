"""Ranks in processes of their own, without vLLM: a stage skips a step as a whole or not at all."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("kind", "first_skips"), [("tp", False), ("pp", True)])
def test_a_rank_that_misses_makes_its_whole_stage_compute_and_no_other(
    folder: Path, kind: str, *, first_skips: bool
) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.connector.handoff.job", str(folder), str(rank), kind],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [json.loads(rank.communicate(timeout=300)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [one["skipped"] for one in said] == [[False, True, first_skips], [False, True, False]]
    assert all(one["whole"] and not one["vllm"] for one in said)
