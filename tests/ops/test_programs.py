"""Child programs: their output, and that they end with their parent."""

import subprocess
import sys
from pathlib import Path

import pytest

from objkv.ops.programs import Program, ProgramFailed
from tests.support.waiting import wait_until

START_AND_WAIT = """
import sys
from pathlib import Path
from objkv.ops.programs import Program
program = Program("it", ("-c", "import time; time.sleep(1e6)"), Path(sys.argv[1]), {})
print(program._process.pid, flush=True)
sys.stdin.read()
"""


def runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def test_a_program_does_not_outlive_a_demo_that_ends_before_it_has_entered_its_block(
    tmp_path: Path,
) -> None:
    """As one does that is interrupted at the moment when the program starts."""
    command = [sys.executable, "-c", START_AND_WAIT, str(tmp_path / "log")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as demo:
        assert demo.stdout is not None
        pid = int(demo.stdout.readline())
        assert runs(pid)
        demo.kill()
    wait_until(lambda: not runs(pid), "the program to end with the demo")


def test_a_program_imports_nothing_from_the_folder_that_it_is_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with Program("it", ("-m", "planted"), tmp_path / "log", {}) as program:
        with pytest.raises(ProgramFailed):
            list(program.lines(bound_s=60))
        assert "No module named planted" in (tmp_path / "log").read_text()


def test_a_program_sees_its_own_settings_and_none_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OBJKV_TENANT", "mine")
    shown = "import os; print(sorted(n for n in os.environ if n.startswith('OBJKV')))"
    with Program("it", ("-c", shown), tmp_path / "log", {"OBJKV_CODEC": "none"}) as program:
        assert list(program.lines(bound_s=280)) == ["['OBJKV_AGENT', 'OBJKV_CODEC']\n"]


def test_a_program_that_fails_leaves_its_last_words(tmp_path: Path) -> None:
    with Program("it", ("-c", "raise SystemExit('no')"), tmp_path / "log", {}) as program:
        with pytest.raises(ProgramFailed, match="it ended with exit status 1") as failed:
            list(program.lines(bound_s=280))
        assert failed.value.tail() == "no"


def test_one_that_does_not_end_in_time_is_ended(tmp_path: Path) -> None:
    silent = "import time; time.sleep(1e6)"
    with Program("it", ("-c", silent), tmp_path / "log", {}) as program:
        with pytest.raises(ProgramFailed, match="did not finish within"):
            list(program.lines(bound_s=0.01))
        assert program._process.wait(60) == -9
