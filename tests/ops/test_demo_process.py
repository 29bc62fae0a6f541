"""Programs of the demo end with it, however it ends; ``tests/cli/test_demo.py`` has the rest."""

import subprocess
import sys
from pathlib import Path

import pytest

from objkv.ops.programs import Program, ProgramFailed
from tests.support.servers.redis import wait_until

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
