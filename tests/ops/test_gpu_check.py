"""How ``gpu-check`` compares replicas, and what becomes of one that fails."""

import json
from pathlib import Path

import pytest

from objkv.errors import ConfigError
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

LENGTH = 1024
FACTS = GpuFacts("a GPU", {}, 50.0, 49.0, None, None)


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


def check(folder: Path) -> GpuCheck:
    return GpuCheck(None, folder, folder, lambda name, stage: None, (LENGTH,))


def test_what_is_known_before_a_replica_fails_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log").write_text("out of memory")

    def live(_self: GpuCheck, role: str) -> tuple[Answers, int]:
        if role == "B":
            raise ProgramFailed("replica B ended with exit status -11", tmp_path / "log")
        return {"R": ALONE, "A": SAVING}[role], 0

    monkeypatch.setattr(GpuCheck, "_live", live)
    monkeypatch.setattr(GpuCheck, "facts", lambda _: FACTS)
    report = run_check(check(tmp_path), "0")
    assert [(case.name, case.ok) for case in report.cases] == [
        ("1024, question 1: the same answer while saving", True)
    ]
    assert report.failure == "replica B ended with exit status -11\nout of memory"


@pytest.mark.parametrize("failures", [0, 2])
def test_a_failed_load_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    answers_of = {"R": ALONE, "A": SAVING, "B": LOADING}
    monkeypatch.setattr(GpuCheck, "_live", lambda _, role: (answers_of[role], failures))
    monkeypatch.setattr(GpuCheck, "facts", lambda _: FACTS)
    report = run_check(check(tmp_path), "0")
    assert all(case.ok for case in report.cases) == (not failures)


def test_without_a_gpu_nothing_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = [json.dumps({"device": "x"})]
    monkeypatch.setattr(Program, "lines", lambda *_, **__: iter(printed[1:]))
    with pytest.raises(ConfigError, match="no GPU here"):
        run_check(check(tmp_path), "0")
