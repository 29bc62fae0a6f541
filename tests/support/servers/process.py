"""Servers in processes of their own: started, ended, frozen."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from objkv.ops.programs import die_with_parent
from tests.support.servers import ROOT
from tests.support.waiting import wait_until

END_S = 30.0


class Daemon:
    """A server's process, which dies with the thread that started it."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.command, self.log = tuple(command), log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Any:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, preexec_fn=die_with_parent
            )
        return self

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def check(self) -> None:
        """Raises RuntimeError if it ended by itself."""
        if not self.is_running:
            text = self.log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{' '.join(self.command)} ended by itself: {text}")

    def kill(self) -> None:
        self.end(signal.SIGKILL)

    def end(self, how: signal.Signals) -> None:
        """End it, even if it is frozen. Idempotent."""
        process, self.process = self.process, None
        if process is None:
            return
        process.send_signal(how)
        process.send_signal(signal.SIGCONT)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


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
    threads = Path(f"/proc/{pid}/task")
    wait_until(lambda: {_state(file) for file in threads.glob("*/stat")} == {"T"}, "it to stop")


def has_ended(pid: int) -> bool:
    return _state(Path(f"/proc/{pid}/stat")) in ("", "Z", "X")


def _state(stat: Path) -> str:
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
