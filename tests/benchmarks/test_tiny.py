"""Benchmarks that measure real code run once, in a tiny form."""

import json
import subprocess
import sys
from operator import le
from pathlib import Path
from types import ModuleType

import pytest

from tests.benchmarks.setting import quick

pytest.importorskip("vllm")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


CALLS_MAX = {
    "load": (19, 140, 300),
    "lookup": (25, 136, 250),
    "save-worker": (18, 112, 440),
    "save-agent": (31, 150, 2800),
}
"""Files, functions and calls: a change that makes a path longer raises its bound here. A busy
machine takes some more, since its threads wait more often."""


def printed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    module: ModuleType,
    *options: str,
) -> dict[str, dict[str, float]]:
    monkeypatch.setattr(sys, "argv", ["benchmark", "--rounds", "1", "--json", *options])
    module.main()
    found: dict[str, dict[str, float]] = json.loads(capsys.readouterr().out)
    return found


def test_s3(tmp_path: Path) -> None:
    from benchmarks.s3 import bench_s3

    rows = bench_s3(quick(tmp_path)).rows
    assert {row.limit_name for row in rows} == {"plain recv_into", "plain sendall"}
    assert all(row.ours > 0 and row.limit and row.ratio for row in rows)


def test_steps(tmp_path: Path) -> None:
    from benchmarks.steps import bench_steps

    section = bench_steps(quick(tmp_path))
    assert [row.target is not None for row in section.rows] == [True] * 2


def test_transfers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import transfers

    monkeypatch.setattr(transfers, "CODECS", ("none",))
    rows = transfers.bench_transfers(quick(tmp_path)).rows
    assert [row.name for row in rows] == ["save, none", "first load, none", "load, none"]


def test_agent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import agent

    monkeypatch.setattr(agent, "CHUNKS", 2)
    assert printed(monkeypatch, capsys, agent)["agent"]["gb_per_s"] > 0


def test_calls() -> None:
    """In a process of its own: it profiles all threads."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.calls"], capture_output=True, text=True, check=True
    )
    found = {
        name: [int(one) for one in row[1::2]]
        for name, *row in map(str.split, done.stdout.splitlines())
    }
    for name, bounds in CALLS_MAX.items():
        assert all(map(le, found[name], bounds)), (name, found[name], bounds)


def test_latency(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import latency

    for name, value in {"LENGTH": 512, "CHUNK": 64, "TURNS": 1}.items():
        monkeypatch.setattr(latency, name, value)
    found = printed(monkeypatch, capsys, latency, "--rounds", "2")
    assert set(found) == {"agent", "resident"}
    assert found["agent"]["p50"] > 0


def test_gpu() -> None:
    """In a process of its own: the payloads of a simulated device have no checksums."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--simulated", "--quick", "--rounds", "1"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    assert all(row["ours"] > 0 for row in json.loads(done.stdout)["rows"])
