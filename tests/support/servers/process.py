"""Servers in processes of their own: started, ended, frozen."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from objkv.ops.programs import die_with_parent
from tests.support.servers import ROOT

_STOPS_S = 60.0


def start_server(name: str, *arguments: str) -> tuple["subprocess.Popen[str]", str]:
    """Run ``tests.support.servers.NAME`` until it is killed; the line that it prints when it
    listens. Ctrl-C is for its maker, who still needs it to clean up."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"tests.support.servers.{name}", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent,
        start_new_session=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line, f"{name} ended before it listened"
    return process, line


def freeze(pid: int) -> None:
    """Stop a process until it gets SIGCONT. When this returns, none of its threads runs any more:
    on a busy machine they do for some milliseconds after the signal, and answer."""
    os.kill(pid, signal.SIGSTOP)
    threads, end = Path(f"/proc/{pid}/task"), time.monotonic() + _STOPS_S
    while {_state(file) for file in threads.glob("*/stat")} != {"T"}:
        assert time.monotonic() < end, "it was not stopped in time"
        time.sleep(0.001)


def has_ended(pid: int) -> bool:
    return _state(Path(f"/proc/{pid}/stat")) in ("", "Z", "X")


def _state(stat: Path) -> str:
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
