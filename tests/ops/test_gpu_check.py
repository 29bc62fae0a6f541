"""``gpu-check``: what becomes of stages, how replicas are compared, and the report."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from objkv.errors import ConfigError, StoreUnavailable
from objkv.ops.bench.harness import BenchRow, Machine, Target
from objkv.ops.demo import DemoAnswer, ReplicaEnd
from objkv.ops.gpu_check import check as module
from objkv.ops.gpu_check.check import GpuChecks
from objkv.ops.gpu_check.replicas import (
    Answers,
    Sharing,
    compare_loading,
    compare_saving,
    compare_times,
    prompt_of,
)
from objkv.ops.gpu_check.report import GpuCase, GpuReport, GpuStage, page
from objkv.ops.programs import ProgramFailed

FACTS = json.dumps({"Device": "a GPU", "Driver": "nvidia 1"})
RIGHT = {"name": "a", "description": "b", "is_right": True, "fault": "", "seconds": 0.1}
MACHINE = Machine("a CPU", 2, 8 << 30, "Linux 6", "3.11.7", 0.5, {"numpy": "2.0"})
LENGTH = 1024


def checks(folder: Path, *, quick: bool = True) -> GpuChecks:
    return GpuChecks("sim", quick, None, folder, folder, lambda name, stage: None)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The output of child programs, which are not run."""
    printed = {
        "gpu_check facts": [FACTS],
        "gpu_check self-test": [json.dumps({"name": "HND", "ok": True})],
        "gpu_order 6 own": [json.dumps(RIGHT)],
        **{f"gpu_order 6 {way}": [json.dumps(RIGHT)] for way in module.WAYS},
    }

    def lines(_self: GpuChecks, program: str, *words: str) -> Iterator[str]:
        yield from printed[" ".join((program, *words))]

    monkeypatch.setattr(GpuChecks, "_lines", lines)
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.setattr(module, "measure_device", lambda *_, **__: object())
    monkeypatch.setattr(module, "rows_of", lambda *_: [BenchRow("load", "GB/s", 1.0)])
    return printed


def ran(checks: GpuChecks) -> GpuReport:
    """The last report."""
    *_, last = checks.reports()
    return last


def outcomes(report: GpuReport) -> list[str]:
    return [stage.outcome for stage in report.stages]


def test_every_stage_has_its_outcome(programs: Mapping[str, list[str]], tmp_path: Path) -> None:
    report = ran(checks(tmp_path))
    assert outcomes(report) == ["passed", "passed", "passed", "passed", "skipped"]
    assert report.passed
    assert report.verdict == "passed, 1 of 5 stages skipped"
    assert (report.device, report.facts["Driver"]) == ("a GPU", "nvidia 1")
    assert report.stages[4].note == "not with --quick"


def test_a_stage_that_fails_does_not_stop_the_others(
    programs: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs["gpu_check self-test"] = []
    wrong = json.dumps(RIGHT | {"name": "c", "is_right": False})
    programs["gpu_order 1 own"] = [*programs["gpu_order 6 own"], wrong]
    programs |= {f"gpu_order 1 {way}": [json.dumps(RIGHT)] for way in module.WAYS}
    log = tmp_path / "log"
    log.write_text("out of memory")

    def fail(*_: object, **__: object) -> None:
        raise ProgramFailed("the GPU process ended with exit status 1", log)

    def unreachable(*_: object) -> None:
        raise StoreUnavailable("no replica started")

    monkeypatch.setattr(module, "measure_device", fail)
    monkeypatch.setattr(Sharing, "run", unreachable)
    report = ran(checks(tmp_path, quick=False))
    assert outcomes(report) == ["failed", "failed", "passed", "failed", "failed"]
    assert not report.passed
    assert "printed nothing" in report.stages[0].note
    assert report.stages[1].cases[1] == GpuCase("c", False, "b: wrong bytes", 0.1)
    assert report.stages[1].summary == "1 of 2 cases passed"
    assert report.stages[3].note.endswith("exit status 1\nThe end of its log:\nout of memory")
    assert "no replica started" in report.stages[4].note


@pytest.mark.parametrize(
    ("missing", "message"), [("torch", "needs vLLM"), ("vllm", "needs vLLM"), (None, "no GPU here")]
)
def test_without_a_device_nothing_is_checked(
    programs: dict[str, list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    missing: str | None,
    message: str,
) -> None:
    programs["gpu_check facts"] = []
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(ConfigError, match=message):
        next(checks(tmp_path).reports())


def test_there_is_a_report_after_each_stage(programs: dict[str, list[str]], tmp_path: Path) -> None:
    reports = list(checks(tmp_path).reports())
    assert [len(one.stages) for one in reports] == [0, 1, 2, 3, 4, 5, 5]
    assert [one.verdict for one in reports[:6]] == ["not finished"] * 6
    assert not any(one.passed for one in reports[:6])
    assert reports[6].finished


def test_a_device_that_cannot_be_read_is_a_failed_stage(
    programs: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    log.write_text("")

    def fail(*_: object) -> Iterator[str]:
        raise ProgramFailed("gpu_check ended with exit status 1", log)

    monkeypatch.setattr(GpuChecks, "_lines", fail)
    (report,) = checks(tmp_path).reports()
    assert report.verdict == "failed"
    assert report.stages[0].note == "gpu_check ended with exit status 1\nIts log is empty."


def test_small_sizes_miss_no_targets(
    programs: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = BenchRow("load", "GB/s", 1.0, 50.0, "plain copy", 0.02, Target(0.85))
    monkeypatch.setattr(module, "rows_of", lambda *_: [row])
    assert ran(checks(tmp_path)).stages[3].summary == "1 figures"


def answers(*given: tuple[int, int, float], token: int = 7) -> Answers:
    """Answers with (question, served tokens, seconds)."""
    found: dict[str, list[DemoAnswer]] = {}
    for question, served, seconds in given:
        name, _ = prompt_of(LENGTH, question)
        answer = DemoAnswer(
            prompt=name, tokens=(token,), served_tokens=served, first_token_s=seconds
        )
        found.setdefault(name, []).append(answer)
    return found


ALONE = answers((1, 0, 3.0), (1, 0, 5.0), (1, LENGTH, 0.1), (2, LENGTH, 0.1))
SAVING = answers((1, 0, 4.0))
LOADING = answers((1, LENGTH, 0.5), (2, LENGTH, 0.6))


def test_prompts_share_documents_and_nothing_else() -> None:
    (_, one), (_, two), (_, other) = prompt_of(64, 1), prompt_of(64, 2), prompt_of(128, 1)
    assert one[:64] == two[:64] != other[:64]
    assert one[64:] == other[128:] != two[64:]


@pytest.mark.parametrize(
    ("saving", "loading", "wrong"),
    [
        (SAVING, LOADING, []),
        (
            answers((1, 0, 4.0), token=8),
            LOADING,
            ["1024, question 1: the same answer while saving"],
        ),
        (
            SAVING,
            answers((1, LENGTH, 0.5), (2, 512, 0.6)),
            ["1024, question 2: the document is loaded"],
        ),
        (
            SAVING,
            {**LOADING, **answers((2, LENGTH, 0.6), token=8)},
            ["1024, question 2: the same answer from loaded KV"],
        ),
    ],
)
def test_answers_must_be_those_of_a_replica_without_objkv(
    saving: Answers, loading: Answers, wrong: list[str]
) -> None:
    cases = [
        *compare_saving([LENGTH], ALONE, saving),
        *compare_loading([LENGTH], ALONE, loading),
    ]
    assert len(cases) == 5
    assert [case.name for case in cases if not case.ok] == wrong


def test_times_are_compared_with_what_offloading_loaded() -> None:
    rows = list(compare_times([LENGTH], ALONE, LOADING, answers((1, 0, 9.0), (1, LENGTH, 0.25))))
    assert [(row.limit_name, row.limit, row.ratio) for row in rows] == [
        ("recompute", 4000.0, 0.125),
        ("vLLM's CPU offloading", 250.0, 2.0),
    ]
    assert len(list(compare_times([LENGTH], ALONE, LOADING, {}))) == 1


def test_offloading_that_fails_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sharing, "_lengths", (LENGTH,))

    def live(_self: Sharing, role: str) -> tuple[Answers, ReplicaEnd]:
        if role == "N":
            raise ProgramFailed("replica N ended with exit status 1", tmp_path / "log")
        found = {"R": ALONE, "A": SAVING, "B": LOADING}[role]
        return found, ReplicaEnd(engine="vLLM", device="x", load_failures=0)

    monkeypatch.setattr(Sharing, "_live", live)
    for on_cpu, reason in ((False, "replica N ended"), (True, "cannot offload on CPUs")):
        cases: list[GpuCase] = []
        rows: list[BenchRow] = []
        Sharing(None, tmp_path, tmp_path, lambda *_: None, on_cpu=on_cpu).run(cases, rows)
        assert not [case for case in cases if case.ok is False]
        assert reason in cases[-1].detail
        assert len(rows) == 1


def test_what_is_known_before_a_replica_fails_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sharing, "_lengths", (LENGTH,))

    def live(_self: Sharing, role: str) -> tuple[Answers, ReplicaEnd]:
        if role == "B":
            raise ProgramFailed("replica B ended with exit status -11", tmp_path / "log")
        found = {"R": ALONE, "A": SAVING}[role]
        return found, ReplicaEnd(engine="vLLM", device="x", load_failures=0)

    monkeypatch.setattr(Sharing, "_live", live)
    cases: list[GpuCase] = []
    with pytest.raises(ProgramFailed):
        Sharing(None, tmp_path, tmp_path, lambda *_: None, on_cpu=False).run(cases, [])
    assert [(case.name, case.ok) for case in cases] == [
        ("1024, question 1: the same answer while saving", True)
    ]


def report(*stages: GpuStage, simulated: bool = False) -> GpuReport:
    return GpuReport(
        "0.1.0",
        "a GPU",
        simulated,
        False,
        {"Link": "16 lanes"},
        MACHINE,
        stages,
        "2026-01-02T03:04:05+00:00",
        "a model",
        finished=True,
    )


def test_the_page_shows_what_failed_first() -> None:
    cases = (GpuCase("HND", True), GpuCase("NHD", False, "a | b"), GpuCase("fp8", None, "no fp8"))
    stage = GpuStage("Self-test", "failed", 1.4, cases)
    text = page(report(stage))
    assert text.startswith("# objkv gpu-check: failed\n\nobjkv 0.1.0 on a GPU.\n")
    assert "| Self-test | failed | 1 s | 1 of 2 cases passed |" in text
    assert "| NHD | **failed** | a \\| b |\n| fp8 | skipped | no fp8 |" in text
    assert text.index("**failed**") < text.index("<details><summary>1 cases passed")
    assert "| Link | 16 lanes |" in text
    assert "simulated" not in text


def test_the_page_shows_figures_and_the_end_of_logs() -> None:
    rows = (
        BenchRow("load", "GB/s", 45.0, 50.0, "plain copy", 0.9, Target(0.85)),
        BenchRow("forward", "µs", 300.0, target=Target(200, at_most=True, of="ours")),
    )
    stage = GpuStage("Speed", "failed", 2.0, (), rows, "it ended\nout of memory")
    text = page(report(stage, simulated=True))
    assert "| load | 45 | 50 | GB/s | 0.90 | ≥ 0.85 ✓ | plain copy |" in text
    assert "| forward | 300 |  | µs |  | ≤ 200 **missed** |  |" in text
    assert "```\nit ended\nout of memory\n```" in text
    assert "1 of 2 targets reached; it ended" in text
    assert "**The device is simulated.**" in text
    assert "show only that it works" in page(replace(report(stage), quick=True))
    running = replace(report(replace(stage, outcome="passed")), finished=False)
    assert page(running).startswith("# objkv gpu-check: not finished")
    skipped = page(report(replace(stage, outcome="skipped", note="not with --quick")))
    assert skipped.startswith("# objkv gpu-check: passed, 1 of 1 stages skipped")
    assert "## Speed" not in skipped
