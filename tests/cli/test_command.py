"""The shared parts of all commands: options, errors, exit codes, interrupts, colors; and how those
log and end that serve until they are stopped."""

import errno
import json
import logging
import signal
import subprocess
import sys
from typing import Any

import pytest

from objkv.cli import agent as agent_module
from objkv.cli.app import COMMANDS
from objkv.cli.command import end_signals, guarded
from objkv.errors import (
    ConfigError,
    NotStored,
    PayloadError,
    StoreDenied,
    StoreError,
    StoreUnavailable,
    TransferError,
)
from objkv.ops.doctor.access import ROLES
from tests.cli.conftest import Machine, Run, refused


def raising(error: BaseException, *, debug: bool = False) -> int:
    def work() -> int:
        raise error

    return guarded(work, debug=debug)


def test_an_interrupt_is_told_on_a_line_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_terminal in (False, True):
        monkeypatch.setattr("sys.stderr.isatty", lambda is_it=is_terminal: is_it)
        assert raising(KeyboardInterrupt()) == 130
        assert capsys.readouterr().err == "\n" * is_terminal + "objkv: interrupted\n"


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ConfigError("why"), 2, "why\n"),
        (NotStored("why"), 1, "why\n"),
        (StoreDenied("why"), 2, "why\n"),
        (StoreUnavailable("why"), 3, "why; objkv doctor"),
        (StoreError("why"), 3, "why; objkv doctor"),
        (PayloadError("why"), 1, "why\n"),
        (TransferError("why"), 70, "why\n"),
        (OSError(errno.ENOSPC, "No space left on device", "/full"), 2, "/full: No space left on"),
        (ZeroDivisionError("why"), 70, "a bug in objkv: ZeroDivisionError: why; --debug"),
    ],
)
def test_every_error_is_a_sentence_and_a_code(
    capsys: pytest.CaptureFixture[str], error: Exception, code: int, told: str
) -> None:
    assert raising(error) == code
    printed = capsys.readouterr()
    assert (printed.out, printed.err.startswith(f"objkv: {told}")) == ("", True)


def test_debug_shows_where_an_error_comes_from(run: Run) -> None:
    ran = run("ls", "--debug", "--index-url", "redis://127.0.0.1:1")
    assert ran.code == 3
    assert "Traceback (most" in ran.err
    assert ran.err.splitlines()[-1].startswith("objkv: redis index")


@pytest.mark.parametrize("debug", [False, True])
def test_an_error_cannot_drive_the_terminal(
    capsys: pytest.CaptureFixture[str], debug: bool
) -> None:
    assert raising(StoreDenied("scan a\x1b]0;b\x07\nname"), debug=debug) == 2
    told = capsys.readouterr().err
    assert ("Traceback (most" in told) == debug == (told.count("\n") > 3)
    assert not {"\x1b", "\x07"} & set(told)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_common_options_and_a_sentence(name: str, run: Run) -> None:
    ran = run(name, "--help")
    assert ran.code == 0
    for option in ("--bulk-url", "--index-url", "--config", "--json"):
        assert option in ran.out


PLACE = ("--bulk-url", "s3://bucket/objkv", "--index-url", "rediss://me:hunter2@h/1")


@pytest.mark.parametrize("role", ROLES)
def test_what_is_printed_can_be_pasted(run: Run, role: str) -> None:
    ran = run("access", "--role", role, "--tenant", "a", *PLACE)
    assert ran.code == 0
    document = run("access", "--role", role, "--tenant", "a", *PLACE, "--json").document
    start, end = ran.out.index("{"), ran.out.rindex("}") + 1
    assert json.loads(ran.out[start:end]) == document["iam"]
    assert document["acl"] in ran.out.splitlines()
    assert f"OBJKV_ROLE={role}" in ran.out.splitlines()
    assert "OBJKV_BULK_URL=s3://bucket/objkv/a" in ran.out.splitlines()
    assert "hunter2" not in ran.out


def test_places_without_rights_are_told_as_such(run: Run) -> None:
    ran = run("access", "--role", "reader")
    assert ran.code == 0
    assert "No IAM policy: the bulk store is not an S3 bucket" in ran.out
    assert "No Redis ACL: the index is not Redis" in ran.out


def test_every_form_of_output_is_an_option_of_every_command(run: Run, machine: Machine) -> None:
    machine.fill()
    for form in (("--json",), ("-o", "json"), ("--output=json", "--json")):
        assert run("ls", *form).document["namespaces"][0]["payloads"] == 6
    tables = [run("ls", "--prefixes", *form).out for form in ((), ("-o", "table"), ("-o", "wide"))]
    assert len(set(tables)) == 1, "a pipe gets everything"
    for form in ("table", "wide"):
        refused(run("ls", "--json", "-o", form), f"--json and -o {form} exclude each other")
    refused(run("ls", "-o", "yaml"), "'yaml' is not one of", "wide")


def test_a_line_that_is_logged_too_often_is_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, text, limit = 0.0, list[str](), agent_module.LogLimit()
    for name, value in {"_LINES_MAX": 2, "_WITHIN_S": 10.0, "monotonic": lambda: now}.items():
        monkeypatch.setattr(agent_module, name, value)
    for now in (0.0, 1.0, 2.0, 3.0, 11.0):
        record = logging.LogRecord(
            "objkv", logging.WARNING, "x.py", 7, "refused n=%d", (int(now),), None
        )
        if limit.filter(record):
            text.append(record.getMessage())
    assert limit.filter(logging.LogRecord("objkv", logging.WARNING, "x.py", 8, "other", None, None))
    assert text == ["refused n=0", "refused n=1", "refused n=11 (and 2 more before)"]


def test_routine_lines_of_libraries_are_not_logged_as_objkvs() -> None:
    program = (
        "import logging, sys\nfrom objkv.cli import agent, app\n"
        "class Quick:\n"
        "    def __init__(self, *_, **__): pass\n"
        "    def __enter__(self):\n"
        "        logging.getLogger('numexpr').info('2 threads')\n"
        "        logging.getLogger('objkv.agent').info('ready')\n"
        "        sys.exit()\n"
        "    def __exit__(self, *_): pass\n"
        "agent.NodeAgent = Quick\napp.app(['agent', '--socket', '/none'])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert [line.partition("objkv: ")[2] for line in ran.stderr.splitlines()] == ["ready"]


def test_a_signal_takes_no_lock_which_the_thread_that_it_interrupts_may_hold() -> None:
    called: list[str] = []

    def seen(frame: Any, event: str, function: Any) -> None:
        called.append(function.__name__ if event.startswith("c_") else frame.f_code.co_name)

    before = signal.getsignal(signal.SIGTERM)
    with end_signals() as ended:
        assert not ended.wait(0)
        handler: Any = signal.getsignal(signal.SIGTERM)
        sys.setprofile(seen)
        handler(signal.SIGTERM, None)
        sys.setprofile(None)
        assert set(called) == {"end", "eventfd_write", "setprofile"}
        assert ended.wait()
        assert ended.wait(), "for ever"
    assert signal.getsignal(signal.SIGTERM) is before
