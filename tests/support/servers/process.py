"""A server of this package in a process of its own."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from objkv.ops.programs import die_with_parent
from tests.support.servers import ROOT


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


@contextmanager
def running_server(name: str, *arguments: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """As ``start_server``; the process is killed at the end."""
    process, line = start_server(name, *arguments)
    with process:
        try:
            yield process, line
        finally:
            process.kill()
