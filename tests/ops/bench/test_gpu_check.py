"""The report of ``gpu-check``, and what a stage that fails leaves."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from objkv.cli.gpu_check import gpu_document
from objkv.errors import ConfigError, StoreUnavailable
from objkv.ops.bench.gpu_check import CheckedStage, GpuChecks, GpuReport, markdown_of, write_report
from objkv.ops.bench.harness import Section
from objkv.ops.demo import DemoReport

RIGHT = {"name": "a", "description": "b", "is_right": True, "fault": ""}


class Setting:
    quick = True

    def tell(self, name: str, stage: str) -> None:
        pass


def checks(
    monkeypatch: pytest.MonkeyPatch, layouts: Sequence[Any], order: Sequence[Any]
) -> GpuChecks:
    def replicas() -> DemoReport:
        raise StoreUnavailable("no replica started")

    made = GpuChecks(cast("Any", Setting()), True, replicas)
    said = {"gpu_check": layouts, "gpu_order": order}
    monkeypatch.setattr(GpuChecks, "_said", lambda _self, program: iter(said[program]))
    skipped = Section("gpu", (), {}, ("no GPU here",), skipped=True)
    monkeypatch.setattr("objkv.ops.bench.gpu_check.bench_simulated", lambda _setting: skipped)
    return made


def test_a_stage_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = [{"facts": {"device": "x"}}, {"check": "HND", "fault": "wrong"}]
    report = checks(monkeypatch, layouts, [RIGHT]).run()
    assert [stage.passed for stage in report.stages] == [False, True, False, False]
    assert report.stages[0].lines == ("HND: wrong",)
    assert report.stages[3].fault == "no replica started"
    assert not report.passed


def test_an_order_of_which_nothing_was_shown_has_not_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layouts = [{"facts": {"device": "x"}}, {"check": "HND", "fault": ""}]
    wrong = RIGHT | {"is_right": False}
    assert not checks(monkeypatch, layouts, []).run().stages[1].passed
    assert checks(monkeypatch, layouts, [RIGHT, wrong]).run().stages[1].lines == (
        "a (b): wrong bytes",
    )


def test_without_a_device_there_is_nothing_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no GPU here: run this on a machine with one"):
        checks(monkeypatch, [], []).run()


def test_the_report_is_json_and_a_page(tmp_path: Path) -> None:
    stage = CheckedStage("speed", False, 1.4, ("load: 3 GB/s",), "the GPU process failed")
    report = GpuReport(True, {"device": "x", "versions": {"torch": "2"}, "rocm": None}, (stage,))
    page, document = markdown_of(report), gpu_document(report)
    assert "## speed: FAILED (1 s)\n\n- the GPU process failed\n- load: 3 GB/s" in page
    assert "Its times say nothing about a GPU" in page
    assert "- versions: torch 2" in page
    assert "rocm" not in page
    files = write_report(report, tmp_path / "new", document)
    assert json.loads(files[0].read_text())["passed"] is False
    assert files[1].read_text() == page
