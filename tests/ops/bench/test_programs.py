"""Programs that answer line by line."""

from pathlib import Path

import pytest

from objkv.ops.programs import Program, ProgramFailed

ECHO = "import sys\nfor line in sys.stdin: print(line.strip().upper(), flush=True)"


def test_a_program_that_listens_answers_each_line(tmp_path: Path) -> None:
    with Program("it", ("-c", ECHO), tmp_path / "log", {}, listens=True) as program:
        assert [program.ask(line, bound_s=280) for line in ("a", "b")] == ["A\n", "B\n"]


def test_one_that_does_not_answer_in_time_is_ended(tmp_path: Path) -> None:
    silent = "import time; time.sleep(1e6)"
    with Program("it", ("-c", silent), tmp_path / "log", {}, listens=True) as program:
        with pytest.raises(ProgramFailed, match="did not answer in time"):
            program.ask("a", bound_s=0.01)
        with pytest.raises(ProgramFailed, match="exit status -9"):
            program.check()


def test_one_that_ended_does_not_answer_and_leaves_its_last_words(tmp_path: Path) -> None:
    with Program(
        "it", ("-c", "raise SystemExit('no')"), tmp_path / "log", {}, listens=True
    ) as program:
        with pytest.raises(ProgramFailed) as failed:
            program.ask("a", bound_s=280)
        assert failed.value.tail() == "no"
