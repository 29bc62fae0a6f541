"""Tables fit a terminal of 80 columns: short hashes, whole numbers. A pipe gets everything."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from objkv.assembly.backends import Backends
from objkv.cli.output import rich_table
from tests.cli.conftest import Machine, Run
from tests.contracts.damage import DamagedStore, Defects
from tests.support.samples import NAMESPACE, TOKENS

COLUMNS = 80
HASH = re.compile(r"[0-9a-f]{32,}")
PROGRAM = """
import json, sys
from objkv.cli.app import app
from objkv.cli.output import Printer
table = Printer.table
def marked(self, columns, rows):
    print("<table>", flush=True)
    table(self, columns, rows)
    print("</table>", flush=True)
Printer.table = marked
for line in json.loads(sys.argv[1]):
    print("$", *line, flush=True)
    try:
        app(line)
    except SystemExit as ended:
        assert ended.code in (0, 1), (line, ended.code)
"""


def on_terminal(lines: list[list[str]], home: Path) -> dict[str, list[list[str]]]:
    """Run commands in one process whose standard output is a terminal; each one's tables."""
    screen, output = pty.openpty()
    fcntl.ioctl(output, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    environment = {**os.environ, "XDG_CACHE_HOME": str(home), "NO_COLOR": "1", "TERM": "xterm"}
    environment.pop("COLUMNS", None)
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(lines)],
        stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.PIPE, env=environment,
    ) as child:  # fmt: skip
        os.close(output)
        written = b""
        try:
            while piece := os.read(screen, 1 << 16):
                written += piece
        except OSError:  # the terminal's last writer has ended
            pass
        os.close(screen)
        assert child.stderr is not None
        errors = child.stderr.read().decode()
    assert child.returncode == 0, errors
    text = re.sub(r"\x1b\[[0-9;]*m", "", written.decode().replace("\r\n", "\n"))
    return {
        part.partition("\n")[0]: [
            one.partition("</table>")[0].strip("\n").split("\n")
            for one in part.split("<table>\n")[1:]
        ]
        for part in text.split("$ ")[1:]
    }


def test_numbers_are_whole_beside_long_names() -> None:
    columns = ("namespace", "model", "tenant", ">bytes", ">payloads")
    row = ("a" * 32, "organisation/a-model-with-a-very-long-name", "search-team", "129 KiB", 1_234)
    shown = Console(width=60, file=StringIO())
    shown.print(rich_table(columns, [row], 60))
    assert isinstance(shown.file, StringIO)
    head, first, *_ = shown.file.getvalue().splitlines()
    assert head.split()[-2:] == ["bytes", "payloads"]
    assert first.split()[-3:] == ["129", "KiB", "1,234"]


@pytest.mark.slow
def test_each_table_fits_a_terminal_and_is_whole_in_a_pipe(
    run: Run, ends: Backends, machine: Machine, home: Path
) -> None:
    whole, *_ = machine.fill()
    DamagedStore(ends).plant(
        Defects(good=20, frame=2, header=1, orphan=3, missing=2, unidentified=2)
    )
    prompt = home / "prompt.json"
    prompt.write_text(json.dumps(TOKENS))
    [leaf] = [one["leaf"] for one in run("ls", NAMESPACE, "--json").document["prefixes"]][:1]
    assert run("pin", leaf, "--by", "platform team of the search group", "-n", NAMESPACE).code == 0
    lines = [
        ["ls"],
        ["ls", "--bulk"],
        ["ls", "--prefixes"],
        ["ls", "--tree"],
        ["show", whole],
        ["match", "--tokens", str(prompt), "--namespace", NAMESPACE],
        ["pin", "--list"],
        ["verify", "--all"],
        ["audit"],
        ["sweep", "--grace", "0"],
        ["rebuild"],
        ["doctor", "--all"],
        ["size", "--list"],
        ["size", "--model", "llama-3.1-8b"],
    ]
    shown = on_terminal(lines, home)
    for line in lines:
        tables = shown[" ".join(line)]
        assert tables, line
        assert all(len(row) <= COLUMNS for table in tables for row in table), (line, tables)
        if line[0] != "doctor":  # its text may quote some
            assert not HASH.search(str(tables)), (line, tables)
    assert re.search(r"\d\d:\d\d UTC  ", shown["pin --list"][0][1]), "the date is whole"
    head, first, *_ = shown["ls --bulk"][0]
    assert head.split()[:5] == ["namespace", "model", "tenant", "bytes", "payloads"]
    assert first.split()[0] in {name[:12] for name in ends.index.namespaces()}
    assert len(head.split()) < len(run("ls", "--bulk").out.splitlines()[0].split()), (
        "the last ones are gone"
    )
    piped = run("ls", "--prefixes").out
    assert NAMESPACE in piped
    assert max(map(len, piped.splitlines())) > COLUMNS
    wide = on_terminal([["ls", "--prefixes", "-o", "wide"]], home)
    assert "\n".join(next(iter(wide.values()))[0]).replace(" ", "") in piped.replace(" ", "")


def test_a_pipe_has_no_width_even_with_forced_colors(
    run: Run, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.fill()
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    out = run("ls", "--prefixes").out
    assert NAMESPACE in out
    assert "\x1b[3" not in out, "no color"
