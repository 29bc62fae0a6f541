"""``objkv gpu-check``: options, exit codes and output; the device is in ``tests/device``."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from objkv.cli import gpu_check as module
from objkv.errors import ConfigError
from objkv.ops.bench.harness import BenchRow, Machine
from objkv.ops.gpu_check.check import GpuChecks
from objkv.ops.gpu_check.report import GpuCase, GpuReport, GpuStage
from tests.cli.conftest import Run, refused

MACHINE = Machine("a CPU", 2, None, "Linux 6", "3.11.7", None, {})
PASSED = GpuStage("Self-test", "passed", 12.3, (GpuCase("HND", True),))
SPEED = GpuStage("Speed", "passed", 3.0, (), (BenchRow("load", "GB/s", 45.0),))
INTERRUPTED = GpuStage("Order", "failed", 0.0)
"""Not a stage: Ctrl-C."""
FAILED = GpuStage("Order", "failed", 1.0, (GpuCase("one", False, "wrong bytes"),), (), "it\nended")


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[GpuStage]:
    """The results of the stages, which are not run."""
    stages = [PASSED, SPEED]

    def reports(self: GpuChecks) -> Iterator[GpuReport]:
        self.tell("Self-test", "running")
        assert self.folder.is_dir()
        simulated = self.kind == "sim"
        report = GpuReport(
            "0.1.0",
            "a GPU",
            simulated,
            self.quick,
            {"Device": "a GPU"},
            MACHINE,
            (),
            "2026-01-02T03:04:05+00:00",
            str(self.model),
            finished=False,
        )
        for number, stage in enumerate(stages):
            if stage is INTERRUPTED:
                raise KeyboardInterrupt
            report = replace(report, stages=(*report.stages, stage))
            yield replace(report, finished=number == len(stages) - 1)

    monkeypatch.setattr(GpuChecks, "reports", reports)
    return stages


def test_the_summary_is_printed_and_the_report_written(
    run: Run, found: list[GpuStage], tmp_path: Path
) -> None:
    ran = run("gpu-check", "--out", str(tmp_path / "new" / "report"))
    assert ran.code == 0
    assert "objkv 0.1.0 on a GPU" in ran.out
    assert "1 of 1 cases passed" in ran.out
    assert "simulated" not in ran.out
    assert "Self-test: running" in ran.err
    document = json.loads((tmp_path / "new" / "report" / "report.json").read_text())
    assert document["passed"]
    assert document["model"] == "Qwen/Qwen3-0.6B"
    page = (tmp_path / "new" / "report" / "report.md").read_text()
    assert page.startswith("# objkv gpu-check: passed")
    assert not list((tmp_path / "objkv" / "gpu-check").iterdir())


def test_a_failed_stage_is_an_exit_code_and_says_why(
    run: Run, found: list[GpuStage], tmp_path: Path
) -> None:
    found.append(FAILED)
    ran = run("gpu-check", "--out", str(tmp_path))
    assert ran.code == 1
    assert "failed: one: wrong bytes" in ran.out
    assert "  ended" in ran.out
    assert not json.loads((tmp_path / "report.json").read_text())["passed"]


@pytest.mark.parametrize(
    ("options", "model"),
    [
        (("--random",), "None"),
        (("--model", "me/mine"), "me/mine"),
        (("--simulated", "--quick"), "None"),
    ],
)
def test_the_document_is_the_report(
    run: Run, found: list[GpuStage], tmp_path: Path, options: tuple[str, ...], model: str
) -> None:
    ran = run("gpu-check", "--json", "--out", str(tmp_path), *options)
    assert ran.document == json.loads((tmp_path / "report.json").read_text())
    assert ran.document["model"] == model
    assert ran.document["simulated"] == ("--simulated" in options)
    assert ran.document["stages"][1]["figures"][0]["ours"] == 45.0


def test_an_interrupted_run_leaves_what_is_finished(
    run: Run, found: list[GpuStage], tmp_path: Path
) -> None:
    found.append(INTERRUPTED)
    ran = run("gpu-check", "--out", str(tmp_path))
    assert ran.code == 130
    assert f"the stages that ended are in {tmp_path / 'report.md'}" in ran.err
    assert (tmp_path / "report.md").read_text().startswith("# objkv gpu-check: not finished")
    assert len(json.loads((tmp_path / "report.json").read_text())["stages"]) == 2


def test_a_simulated_device_is_named_as_such(
    run: Run, found: list[GpuStage], tmp_path: Path
) -> None:
    assert "simulated" in run("gpu-check", "--simulated", "--out", str(tmp_path)).out


def test_wrong_usage_is_told_before_anything_runs(
    run: Run, found: list[GpuStage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    refused(run("gpu-check", "--out", str(tmp_path / "file")), "is not a directory")

    refused(run("gpu-check", "--model", "x", "--random"), "bring a model of their own")
    refused(run("gpu-check", "--model", str(tmp_path)), "has no config.json")
    refused(run("gpu-check", "--out", str(tmp_path / "file" / "x")), "is not a directory")

    def elsewhere() -> Path:
        raise ConfigError("in a clone of the project only")

    monkeypatch.setattr(module, "simulated_source", elsewhere)
    refused(run("gpu-check", "--simulated"), "in a clone of the project only")


def test_without_a_gpu_it_says_what_to_do(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("objkv.ops.gpu_check.check.find_spec", lambda name: object())
    monkeypatch.setattr(GpuChecks, "_lines", lambda *_: iter(()))
    ran = run("gpu-check", "--out", str(tmp_path / "report"))
    assert ran.code == 2
    assert "PyTorch finds no GPU here" in ran.err
    assert "--simulated" in ran.err
    assert not (tmp_path / "report").exists()
