"""``objkv top``: once, for machines, and on a terminal."""

import itertools
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fcntl import ioctl
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Self

import pyte
import pytest

from tests.agent.world import Node, http_of
from tests.cli.conftest import Machine, Run
from tests.support.samples import NAMESPACE

OBJKV = Path(sys.executable).with_name("objkv")
COLUMNS, LINES = 170, 40
BOUND_S = 120.0
QUICK = ("--every", "0.2")


def told_by_a_replica(number: int) -> str:
    """What it says when it is asked for the ``number``-th time: 100 tokens more, 25 of them hit."""
    counters = {"query_tokens": 100, "hit_bulk_tokens": 25, "bulk_load_bytes": 1 << 20}
    lines = []
    for name, each in counters.items():
        lines.append(f"# TYPE vllm:objkv_{name}_total counter")
        lines.append(f'vllm:objkv_{name}_total{{engine="0"}} {number * each}')
    lines.append("# TYPE vllm:objkv_breaker_open_bulk_write gauge")
    lines.append("vllm:objkv_breaker_open_bulk_write 1")
    return "\n".join(lines) + "\n"


@contextmanager
def replica(text: Callable[[int], str] = told_by_a_replica) -> Iterator[str]:
    """The address of something that tells metrics over HTTP, as a replica does."""
    numbers = itertools.count()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = text(next(numbers)).encode()
            self.send_response(200 if self.path == "/metrics" else 404)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_once_tells_what_happened_between_two_looks(run: Run, machine: Machine) -> None:
    machine.fill()
    with replica() as url:
        ran = run("top", "--once", *QUICK, "--endpoint", url)
    assert (ran.code, ran.err) == (0, "")
    first, second, *_ = ran.out.splitlines()
    assert first.startswith("1 replica, 0 down; hit rate 25%;")
    assert "computed 75%, local 0%, hot 0%, bulk 25%" in first
    assert "/s bulk" in second
    assert f"{url}" in ran.out
    assert "circuit open: bulk write" in ran.out
    assert NAMESPACE[:8] in ran.out, "the hottest prefixes, from the index"
    assert "stored " in ran.out


def test_machines_get_one_document(run: Run, home: Path) -> None:
    with replica() as url:
        document = run("top", "--json", *QUICK, "--endpoint", url, "--no-index").document
    assert list(document) == [
        "rows", "total", "hit_rates", "stored", "ends", "prefixes", "problems", "nodes",
        "hit_rate", "every_s",
    ]  # fmt: skip
    [row] = document["rows"]
    assert list(row) == ["name", "state", "problem", "flow", "breakers_open", "switched"]
    assert (row["state"], row["breakers_open"]) == ("up", ["bulk_write"])
    assert document["hit_rate"] == pytest.approx(0.25)
    assert document["prefixes"] is None
    assert document["nodes"] == []


@pytest.fixture
def agent() -> Iterator[Path]:
    """The socket of an agent."""
    node = Node()
    with http_of(node):
        yield node.path
    node.close()


def test_a_nodes_agent_is_a_row_of_its_own(run: Run, home: Path, agent: Path) -> None:
    with replica() as url:
        words = ("top", *QUICK, "--endpoint", url, "--no-index", "--agent", str(agent))
        ran, document = run(*words, "--once"), run(*words, "--json").document
    assert (ran.code, ran.err) == (0, "")
    [line] = [line for line in ran.out.splitlines() if str(agent) in line]
    assert line.split()[1:6] == ["up", "1.0", "MiB", "0%", "0%"]
    [row] = document["nodes"]
    assert (row["name"], row["state"], row["clients"]) == (str(agent), "up", 7)


def test_a_replica_that_is_down_is_a_row_and_1(run: Run, home: Path) -> None:
    with replica() as url:
        ran = run("top", "--once", *QUICK, "--endpoint", url, "--endpoint", "127.0.0.1:1")
    assert ran.code == 1
    assert "2 replicas, 1 down" in ran.out
    [row] = [line for line in ran.out.splitlines() if line.startswith("127.0.0.1:1 ")]
    assert "down" in row
    assert "refused" in row


def test_words_of_a_server_cannot_drive_the_terminal(run: Run, home: Path) -> None:
    with replica(lambda _: "\x1b[31mhello\x07 }{\n") as url:
        ran = run("top", "--once", *QUICK, "--endpoint", url)
    assert ran.code == 3
    assert "\x1b" not in ran.out
    assert "\x07" not in ran.out


class Terminal:
    """A real terminal with the command in it, drawn by an emulator."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self.screen = pyte.Screen(COLUMNS, LINES)
        self._stream = pyte.ByteStream(self.screen)
        self.primary, secondary = pty.openpty()
        ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        self.settings = termios.tcgetattr(secondary)
        environ = {n: v for n, v in os.environ.items() if not n.startswith("OBJKV_")}
        self.process = subprocess.Popen(
            [str(OBJKV), "top", *arguments],
            env={**environ, "XDG_CACHE_HOME": str(home), "TERM": "xterm-256color"},
            stdin=secondary,
            stdout=secondary,
            stderr=secondary,
            start_new_session=True,
        )
        self.secondary = secondary

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.primary)
        os.close(self.secondary)

    def shows(self, words: str) -> str:
        """What is shown, once these words are."""
        deadline = time.monotonic() + BOUND_S
        while words not in (shown := "\n".join(self.screen.display)):
            assert time.monotonic() < deadline, f"no {words!r} in:\n{shown}"
            self._read(1.0)
        return shown

    def _read(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self.primary, select.POLLIN)
        if poll.poll(1000 * seconds):
            self._stream.feed(os.read(self.primary, 65_536))

    def end(self) -> int:
        """Its exit status; what it still prints is read, or it would wait."""
        deadline = time.monotonic() + BOUND_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline
            self._read(0.1)
        return self.process.returncode


@pytest.fixture(scope="module")
def quiet_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    Machine(home).fill()
    return home


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_signal_leaves_the_terminal_as_it_was(
    quiet_home: Path, number: signal.Signals, status: int
) -> None:
    with replica() as url, Terminal(quiet_home, *QUICK, "--endpoint", url) as terminal:
        terminal.shows("hit rate 25%")
        terminal.process.send_signal(number)
        assert terminal.end() == status
        assert termios.tcgetattr(terminal.secondary) == terminal.settings
