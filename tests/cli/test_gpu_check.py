"""``objkv gpu-check``: how it compares replicas, its exit codes and its output; the device is in
``tests/device``."""

from dataclasses import replace
from pathlib import Path

import pytest

from objkv.cli import demo as module
from objkv.ops.gpu_check import (
    Answers,
    GpuCheck,
    GpuFacts,
    compare_loading,
    compare_saving,
    prompt_of,
    run_check,
)
from objkv.ops.programs import Program, ProgramFailed
from objkv.ops.replica import ReplicaAnswer
from tests.cli.conftest import Run, refused

LENGTH = 1024
FACTS = GpuFacts("a GPU", {"Driver": "nvidia 1"}, 50.4, 48.0, "32.0 GT/s PCIe, 16 lanes", 63.0)


def answers(*given: tuple[int, int, float], token: int = 7) -> Answers:
    """Answers with (question, served tokens, seconds)."""
    found: dict[str, list[ReplicaAnswer]] = {}
    for question, served, seconds in given:
        name = prompt_of(LENGTH, question).name
        answer = ReplicaAnswer(
            prompt=name, tokens=(token,), served_tokens=served, first_token_s=seconds
        )
        found.setdefault(name, []).append(answer)
    return found


ALONE = answers((1, 0, 3.0), (1, 0, 5.0), (1, LENGTH, 0.1), (2, LENGTH, 0.1))
SAVING = answers((1, 0, 4.0))
LOADING = answers((1, LENGTH, 0.5), (2, LENGTH, 0.6))
NOT_LOADED = answers((1, LENGTH, 0.5), (2, 512, 0.6))


def test_prompts_share_documents_and_nothing_else() -> None:
    one, two, other = (prompt_of(*of).tokens for of in ((64, 1), (64, 2), (128, 1)))
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
        (SAVING, NOT_LOADED, ["1024, question 2: the document is loaded"]),
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
    cases = [*compare_saving([LENGTH], ALONE, saving), *compare_loading([LENGTH], ALONE, loading)]
    assert len(cases) == 5
    assert [case.name for case in cases if not case.ok] == wrong


Lives = dict[str, Answers | Exception]


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> Lives:
    """What each replica answers, or how it fails, instead of running any."""
    given: Lives = {"R": ALONE, "A": SAVING, "B": LOADING}

    def live(check: GpuCheck, role: str) -> tuple[Answers, int]:
        assert check.folder.is_dir()
        found = given[role]
        if isinstance(found, Exception):
            raise found
        return found, 0

    monkeypatch.setattr(GpuCheck, "_live", live)
    monkeypatch.setattr(GpuCheck, "facts", lambda _: FACTS)
    monkeypatch.setattr(
        module,
        "run_check",
        lambda check, version: run_check(replace(check, lengths=(LENGTH,)), version),
    )
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    return given


@pytest.mark.usefixtures("lives")
def test_rates_and_comparisons_are_printed(run: Run, home: Path) -> None:
    ran = run("gpu-check")
    assert ran.code == 0
    assert "copies to device: 50.4 GB/s, 80% of its link (32.0 GT/s PCIe, 16 lanes)" in ran.out
    assert "1024, question 1: the same answer" in ran.out
    assert not list((home / "objkv").glob("gpu-check*"))


def test_what_is_wrong_is_an_exit_code_and_shown(run: Run, lives: Lives, tmp_path: Path) -> None:
    lives["B"] = NOT_LOADED
    ran = run("gpu-check")
    assert (ran.code, "512 of 1,024 tokens" in ran.out) == (1, True)
    (tmp_path / "log").write_text("out of memory")
    lives["B"] = ProgramFailed("replica B ended with exit status -11", tmp_path / "log")
    document = run("gpu-check", "--json").document
    assert document["failure"] == "replica B ended with exit status -11\nout of memory"
    assert [case["ok"] for case in document["cases"]] == [True], "what is known is kept"
    assert not document["passed"]


def test_a_failed_load_fails_the_check(
    run: Run, lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GpuCheck, "_live", lambda _, role: (lives[role], 2))
    ran = run("gpu-check")
    assert (ran.code, "2 failed" in ran.out) == (1, True)


@pytest.mark.usefixtures("lives")
@pytest.mark.parametrize(
    ("options", "model"),
    [
        ((), "Qwen/Qwen3-0.6B"),
        (("--random",), "a Llama with random weights"),
        (("--model", "me/mine"), "me/mine"),
    ],
)
def test_the_model_is_the_given_one(run: Run, options: tuple[str, ...], model: str) -> None:
    assert run("gpu-check", "--json", *options).document["model"] == model


@pytest.mark.parametrize(("found", "told"), [(None, "needs vLLM"), (object(), "no GPU here")])
def test_without_vllm_or_a_gpu_nothing_is_checked(
    run: Run, monkeypatch: pytest.MonkeyPatch, found: object, told: str
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: found)
    monkeypatch.setattr(Program, "lines", lambda *_, **__: iter(()))
    refused(run("gpu-check"), told)
