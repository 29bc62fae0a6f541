"""``objkv top``: once, for machines, and on a terminal."""

import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import suppress
from fcntl import ioctl
from pathlib import Path

import pytest

from tests.agent.world import Node, http_of
from tests.cli.conftest import Machine, Run
from tests.monitoring.prometheus import serving
from tests.support.waiting import wait_until


def told_by_a_replica(number: int) -> str:
    """What it says when it is asked for the ``number``-th time: 100 tokens more, 25 of them hit."""
    counters = {"query_tokens": 100, "hit_bulk_tokens": 25, "load_bytes": 1 << 20}
    lines = []
    for name, each in counters.items():
        lines.append(f"# TYPE vllm:objkv_{name}_total counter")
        lines.append(f'vllm:objkv_{name}_total{{engine="0"}} {number * each}')
    return "\n".join(lines) + "\n"


PAGES = [told_by_a_replica(number) for number in range(2_000)]


def test_once_shows_totals_since_the_start(run: Run, machine: Machine) -> None:
    machine.fill()
    with serving(PAGES[4:]) as url:
        ran = run("top", "--once", "--endpoint", url)
    with serving(PAGES[4:]) as url:
        document = run("top", "--json", "--endpoint", url).document
    assert (ran.code, ran.err) == (0, "")
    first, second, *_ = ran.out.splitlines()
    assert first.startswith("1 replica, 0 down; hit rate 25 %; 400 prompt tokens:")
    assert "local 0 %, hot 0 %, bulk 25 %" in first
    assert second == "loads 4.0 MiB; saves 0; dropped 0"
    assert "127.0.0.1:" in ran.out
    assert "stored " in ran.out
    [row] = document["rows"]
    assert list(row) == ["name", "state", "problem", "values", "breakers_open"]
    assert row["state"] == "up"
    assert document["hit_rate"] == pytest.approx(0.25)
    assert document["agents"] == []


@pytest.fixture
def agent() -> Iterator[Path]:
    """The socket of an agent."""
    node = Node()
    with http_of(node):
        yield node.path
    node.close()


def test_a_nodes_agent_is_a_row_of_its_own(run: Run, home: Path, agent: Path) -> None:
    with serving(PAGES) as url:
        words = ("top", "--endpoint", url, "--agent", f"unix://{agent}")
        ran, document = run(*words, "--once"), run(*words, "--json").document
    assert (ran.code, ran.err) == (0, "")
    [line] = [line for line in ran.out.splitlines() if str(agent) in line]
    assert line.split()[1:8] == ["up", "1.0", "MiB", "0", "%", "0", "–"]
    [row] = document["agents"]
    assert (row["name"], row["state"], row["values"]["clients"]) == (str(agent), "up", 7)


def test_a_replica_that_is_down_is_a_row_and_1(run: Run, home: Path) -> None:
    with serving(PAGES) as url:
        gone = ("--endpoint", "127.0.0.1:1", "--agent", str(home / "gone"))
        ran = run("top", "--once", "--endpoint", url, *gone)
    assert ran.code == 1
    assert "a node agent does not answer: is objkv agent running there?" in ran.out
    assert "2 replicas, 1 down" in ran.out
    [row] = [line for line in ran.out.splitlines() if line.startswith("127.0.0.1:1 ")]
    assert "down" in row
    assert "refused" in row


def test_words_of_a_server_cannot_drive_the_terminal(run: Run, home: Path) -> None:
    with serving(["\x1b[31mhello\x07 }{\n"]) as url:
        ran = run("top", "--once", "--endpoint", url)
    assert ran.code == 3
    assert "\x1b" not in ran.out
    assert "\x07" not in ran.out


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_the_terminal_as_it_was(
    machine: Machine, number: signal.Signals, status: int
) -> None:
    machine.fill()
    screen, terminal = pty.openpty()
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 170, 0, 0))
    os.set_blocking(screen, False)
    settings, shown = termios.tcgetattr(terminal), bytearray()

    def shows(words: bytes) -> bool:
        with suppress(BlockingIOError):
            shown.extend(os.read(screen, 65_536))
        return words in shown

    with serving(PAGES) as url:
        process = subprocess.Popen(
            [sys.executable, "-m", "objkv", "top", "--endpoint", url],
            env=os.environ | {"TERM": "xterm-256color", "NO_COLOR": "1"},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
        try:
            wait_until(lambda: shows(b"hit rate 25 %"), "rates")
            process.send_signal(number)
            # What it still prints is read, or it would wait.
            wait_until(lambda: shows(b"") and process.poll() is not None, "its end")
        finally:
            process.kill()
            process.wait()
    assert (process.returncode, termios.tcgetattr(terminal)) == (status, settings)
    os.close(screen)
    os.close(terminal)
