"""``objkv gpu-check``: options, exit codes and output; the device is in ``tests/device``."""

from pathlib import Path

import pytest

from objkv.cli import gpu_check as module
from objkv.ops.gpu_check import GpuCase, GpuCheck, GpuFacts, GpuReport
from tests.cli.conftest import Run, refused

FACTS = GpuFacts("a GPU", {"Driver": "nvidia 1"}, 50.4, 48.0, "32.0 GT/s PCIe, 16 lanes", 63.0)
RIGHT = GpuCase("1024: the same answer", True)
WRONG = GpuCase("1024: the document is loaded", False, "0 of 1,024 tokens")


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[GpuCase | str]:
    """The cases, and the failure of a replica, instead of running any."""
    given: list[GpuCase | str] = [RIGHT]

    def run_check(check: GpuCheck, version: str) -> GpuReport:
        assert check.folder.is_dir()
        cases = tuple(one for one in given if isinstance(one, GpuCase))
        failure = "".join(one for one in given if isinstance(one, str))
        return GpuReport(version, str(check.model), FACTS, cases, failure)

    monkeypatch.setattr(module, "run_check", run_check)
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    return given


def test_rates_and_comparisons_are_printed(
    run: Run, found: list[GpuCase | str], home: Path
) -> None:
    ran = run("gpu-check")
    assert ran.code == 0
    assert "copies to device: 50.4 GB/s, 80% of its link (32.0 GT/s PCIe, 16 lanes)" in ran.out
    assert "1024: the same answer" in ran.out
    assert not list((home / "objkv" / "gpu-check").iterdir())


@pytest.mark.parametrize("wrong", [WRONG, "replica B ended\nout of memory"])
def test_what_is_wrong_is_an_exit_code_and_shown(
    run: Run, found: list[GpuCase | str], wrong: GpuCase | str
) -> None:
    found.append(wrong)
    ran = run("gpu-check")
    assert ran.code == 1
    assert ("0 of 1,024 tokens" if isinstance(wrong, GpuCase) else "out of memory") in ran.out
    assert not run("gpu-check", "--json").document["passed"]


@pytest.mark.parametrize(
    ("options", "model"),
    [((), "Qwen/Qwen3-0.6B"), (("--random",), "None"), (("--model", "me/mine"), "me/mine")],
)
def test_the_model_is_the_given_one(
    run: Run, found: list[GpuCase | str], options: tuple[str, ...], model: str
) -> None:
    document = run("gpu-check", "--json", *options).document
    assert (document["model"], document["passed"]) == (model, True)


def test_wrong_usage_is_told_before_anything_runs(
    run: Run, found: list[GpuCase | str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(run("gpu-check", "--model", "x", "--random"), "brings a model of its own")
    refused(run("gpu-check", "--model", str(tmp_path)), "has no config.json")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    refused(run("gpu-check"), "needs vLLM")
