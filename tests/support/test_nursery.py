"""What is forked off another process is a process of its own, and its end is told."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.nursery import Fork, Nursery

SLEEP = ("-n1", "-r1", "import time; time.sleep(600)")
PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def nursery() -> Nursery:
    return Nursery(Path(__file__).parents[2], os.environ, ["wave"])


@pytest.fixture
def fork(nursery: Nursery, tmp_path: Path) -> Callable[..., Fork]:
    def make(module: str, *arguments: str, folder: Path | None = None) -> Fork:
        settings = {"PATH": os.environ["PATH"], "OBJKV_NAMED": "this one"}
        log = tmp_path / "log"
        return nursery.fork(module, *arguments, environment=settings, log=log, folder=folder)

    return make


def test_it_has_its_own_arguments_environment_session_and_log(
    fork: Callable[..., Fork], tmp_path: Path
) -> None:
    script = tmp_path / "tell_of_itself.py"
    script.write_text("""
import json, os, sys
told = [sys.argv[1:], os.environ.get("OBJKV_NAMED"), os.environ.get("HOME"), os.getsid(0)]
print(json.dumps([*told, os.getpid(), "wave" in sys.modules, sys.stdin.read(), os.getcwd()]))
""")
    one = fork(
        "timeit", "-n1", "-r1", f"import runpy; runpy.run_path({str(script)!r})", folder=tmp_path
    )
    assert one.wait(PATIENCE_S) == 0
    arguments, named, home, session, pid, knows_wave, typed, folder = json.loads(
        (tmp_path / "log").read_text().splitlines()[0]
    )
    assert arguments[:2] == ["-n1", "-r1"]
    assert (named, home) == ("this one", None)
    assert session == pid == one.pid
    assert knows_wave
    assert typed == ""
    assert folder == str(tmp_path)


def test_it_can_be_waited_for_with_a_limit_and_killed(fork: Callable[..., Fork]) -> None:
    one = fork("timeit", *SLEEP)
    other = fork("timeit", *SLEEP)
    with pytest.raises(subprocess.TimeoutExpired):
        one.wait(0.05)
    os.kill(one.pid, signal.SIGKILL)
    assert one.wait(PATIENCE_S) == one.wait() == -signal.SIGKILL
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(0.05)
    os.kill(other.pid, signal.SIGTERM)
    assert other.wait(PATIENCE_S) == -signal.SIGTERM
