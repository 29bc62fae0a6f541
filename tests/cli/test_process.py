"""The installed command, as a process: the default folder and SQLite file, end to end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from objkv import __version__
from tests.cli.conftest import Machine

pytestmark = pytest.mark.usefixtures("home")
OBJKV = Path(sys.executable).with_name("objkv")


def objkv(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(OBJKV), *arguments], input=stdin, capture_output=True, text=True, timeout=280
    )


HEAVY = {
    "asyncio", "blosc2", "boto3", "botocore", "cryptography", "httpx", "jinja2", "numpy",
    "opentelemetry", "prometheus_client", "redis", "safetensors", "tokenizers", "torch", "urllib3",
    "vllm",
}  # fmt: skip
SLOW = HEAVY | {"pydantic", "rich", "lz4", "sqlite3", "ssl", "xxhash"}
MODULES_MAX = 200
"""Mostly those of Python and typer: 148 on 2026-11-22. All commands together import 1,000."""
HELP_MODULES_MAX = 500
IMPORTED = """
import sys
from objkv.cli.__main__ import main
sys.argv[0] = "objkv"
try:
    main()
finally:
    print(*sys.modules, file=sys.stderr)
"""


def imported(*arguments: str) -> set[str]:
    """The modules that a process imports in which a command succeeds."""
    ran = subprocess.run(
        [sys.executable, "-c", IMPORTED, *arguments], capture_output=True, text=True, timeout=280
    )
    assert ran.returncode == 0, ran.stderr
    return set(ran.stderr.split())


def at_tab(monkeypatch: pytest.MonkeyPatch, typed: str) -> None:
    """Let the command complete the last word of ``typed``, as bash does."""
    monkeypatch.setenv("_OBJKV_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(typed.count(" ")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("objkv ad", ["admission"]),
        ("objkv --v", ["--version"]),
        ("objkv help ad", ["admission"]),
        ("objkv audit --ht", ["--html"]),
        ("objkv access --role w", ["writer"]),
    ],
)
def test_a_tab_offers_what_fits(
    typed: str, offered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_tab(monkeypatch, typed)
    ran = objkv()
    assert (ran.stdout.split(), ran.stderr) == (offered, "")


@pytest.mark.slow
@pytest.mark.parametrize("argument", ["--version", "--help", "TAB"])
def test_what_only_prints_imports_almost_nothing(
    argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if argument == "TAB":
        at_tab(monkeypatch, "objkv a")
    modules = imported(*[argument] * (argument != "TAB"))
    assert len(modules) <= MODULES_MAX
    assert not modules & SLOW


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["access", "audit", "diff", "doctor", "ls", "match", "sweep", "verify", "warm"]
)
def test_the_help_of_a_command_opens_no_client(name: str) -> None:
    modules = imported(name, "--help")
    assert len(modules) <= HELP_MODULES_MAX
    assert modules & HEAVY <= {"tokenizers"}


def test_a_folder_and_a_file_need_no_client_of_a_server(machine: Machine) -> None:
    machine.fill()
    assert not imported("ls") & {"boto3", "botocore", "redis", "httpx", "jinja2", "torch"}


@pytest.mark.parametrize("start", [("-m", "objkv"), ("-m", "objkv.cli")])
def test_python_runs_the_command_too(start: tuple[str, str]) -> None:
    ran = subprocess.run(
        [sys.executable, *start, "--version"], capture_output=True, text=True, timeout=280
    )
    assert (ran.returncode, ran.stdout) == (0, f"objkv {__version__}\n")


def test_a_reader_that_goes_away_is_not_what_a_check_found() -> None:
    process = subprocess.Popen(
        [str(OBJKV), "doctor"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(280) == 141
    assert process.stderr is not None
    with process.stderr:
        assert process.stderr.read() == b""


def ran_by_a_shell(arguments: str, **environ: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(  # noqa: S602  # what the shell leaves open is what is tested
        f"{OBJKV} {arguments}",
        shell=True,
        env=os.environ | environ,
        capture_output=True,
        timeout=280,
    )


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("ls >&-", 0),
        ("ls --json >&- 2>&-", 0),
        ("doctor >&-", 0),
        ("--version <&- >&- 2>&-", 0),
        ("match <&-", 2),
    ],
)
def test_streams_that_the_caller_has_closed_are_no_error(arguments: str, code: int) -> None:
    ran = ran_by_a_shell(arguments)
    assert ran.returncode == code, ran.stderr
    assert ran.stderr == (b"objkv: the prompt is empty (no token ids)\n" if code else b"")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", b"mod\\xe8le\\u2192"), ("latin-1", b"mod\xe8le\\u2192")]
)
def test_characters_that_the_output_lacks_are_escaped(encoding: str, shown: bytes) -> None:
    environ = {"PYTHONIOENCODING": encoding, "OBJKV_MODEL_ID": "modèle→"}
    ran = ran_by_a_shell("doctor", **environ)
    assert ran.returncode == 0, ran.stderr
    assert shown in ran.stdout


def test_input_that_is_no_text_is_said(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_bytes(b"\xff")
    strict = {"PYTHONIOENCODING": "utf-8:strict"}
    ran = ran_by_a_shell(f"match < {tmp_path / 'tokens'}", **strict)
    assert (ran.returncode, ran.stderr.split(b";")[0]) == (2, b"objkv: '\\udcff' is not a token id")
