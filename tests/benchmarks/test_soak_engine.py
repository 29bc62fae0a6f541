"""The soak of real engines says what is broken, and a short one passes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak_engine import Engine, _growth, broken, prompts

ROOT = Path(__file__).parents[2]


def result(**changes: Any) -> dict[str, Any]:
    """Of a soak in which all was well, but for the changes."""
    fine: dict[str, Any] = {
        "engines": 2,
        "counts": {"answers": 100, "cached tokens": 1000},
        "wrong": [],
        "hangs": [],
        "crashes": [],
        "errors": [],
        "left": {"engine-0": {}, "engine-1": {}},
        "ended": 1,
        "killed": 1,
        "growth": {"engine-0": {"seconds": 300.0, "rss_mib": 3.0, "files": 0.0, "threads": 0.0}},
    }
    return fine | changes


def test_a_soak_in_which_all_was_well_is_not_broken() -> None:
    assert broken(result()) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"wrong": ["wrong answers: prompt 3"]}, "prompt 3"),
        ({"hangs": ["engine-1 has not reported"]}, "has not reported"),
        ({"crashes": ["engine-1 ended unexpectedly"]}, "ended unexpectedly"),
        ({"errors": ["slabs do not add up"]}, "logged as an error: slabs"),
        ({"left": {"engine-0": {"leased slabs": 1}}}, "leased slabs"),
        ({"ended": 0}, "not all engines stopped"),
        ({"counts": {"answers": 100}}, "no cached tokens"),
    ],
)
def test_what_must_not_be_is_told(changes: dict[str, Any], told: str) -> None:
    (text,) = broken(result(**changes))
    assert told in text


@pytest.mark.parametrize(("seconds", "is_broken"), [(300.0, True), (10.0, False)])
def test_memory_that_grows_is_told_where_there_was_time_to_see_it(
    *, seconds: float, is_broken: bool
) -> None:
    growth = {"seconds": seconds, "rss_mib": 400.0, "files": 0.0, "threads": 0.0}
    assert bool(broken(result(growth={"engine-0": growth}))) is is_broken


def test_growth_is_that_of_the_second_half(tmp_path: Path) -> None:
    engine = Engine("engine-0", tmp_path)
    for second in range(100):
        at = 500.0 + second
        rss = 300.0 if second < 50 else 300.0 + 2 * (second - 50)
        engine.lines.append({"at_s": at, "rss_mib": rss, "files": 20, "threads": 5})
    told = _growth(engine)
    assert told["seconds"] == 49
    assert told["rss_mib"] == pytest.approx(98)
    assert (told["files"], told["threads"]) == (0, 0)


def test_prompts_share_stems_and_fit_into_the_engine() -> None:
    drawn = prompts(1)
    assert drawn == prompts(1)
    assert max(map(len, drawn)) + 48 < 832
    assert len({tuple(prompt[:100]) for prompt in drawn}) <= 4


@pytest.mark.engine
@pytest.mark.wide
@pytest.mark.timeout(3_600)
def test_a_short_soak_of_real_engines_passes() -> None:
    command = ["benchmarks/soak.py", "--seconds", "20", "--faults", "--replicas", "1", "--json"]
    run = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=1_800
    )
    assert run.stdout, run.stderr[-4000:]
    told = json.loads(run.stdout)
    assert told["broken"] == []
    assert run.returncode == 0
    assert told["counts"]["answers"] > 0
    assert told["answers spoiled"] > 0
    assert sum(told["faults"].values()) > 3
