"""The shared parts of all commands: errors, exit codes, interrupts, colors."""

import errno
import json

import pytest

from objkv.cli.app import COMMANDS
from objkv.cli.command import exit_code, guarded
from objkv.cli.output import Printer, age, size
from objkv.errors import (
    ConfigError,
    ObjkvError,
    PayloadError,
    StoreDenied,
    StoreError,
    StoreUnavailable,
    TransferError,
)
from objkv.ops.doctor.access import ROLES
from objkv.ops.formats import printable
from tests.cli.conftest import Machine, Run, refused
from tests.support.samples import NAMESPACE


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError(), 2),
        (StoreDenied(), 2),
        (StoreUnavailable(), 3),
        (StoreError(), 3),
        (PayloadError(), 1),
        (TransferError(), 70),
    ],
)
def test_every_error_has_its_exit_code(error: ObjkvError, code: int) -> None:
    assert exit_code(error) == code


def test_a_misspelt_command_is_wrong_usage_with_a_suggestion(run: Run) -> None:
    refused(run("verfy"), "No such command 'verfy'", "'verify'")


def test_a_choice_that_is_none_is_told_without_the_names_of_libraries(run: Run) -> None:
    refused(run("access", "--role", "wirter"), "--role': 'wirter' is not one of")


def raising(error: BaseException) -> int:
    def work() -> int:
        raise error

    return guarded(work, debug=False)


def test_on_a_terminal_an_interrupt_is_told_on_a_line_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert guarded(interrupted, debug=False) == 130
    assert capsys.readouterr().err == "\nobjkv: interrupted\n"


def test_an_interrupt_ends_cleanly(capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "objkv: interrupted\n"


def test_a_bug_is_a_sentence_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(ZeroDivisionError("by zero")) == 70
    told = capsys.readouterr()
    assert told.err.startswith("objkv: a bug in objkv: ZeroDivisionError: by zero; objkv --debug")
    assert told.out == ""


def test_what_the_machine_refuses_is_no_bug(capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(OSError(errno.ENOSPC, "No space left on device", "/full")) == 2
    assert capsys.readouterr().err == "objkv: /full: No space left on device\n"


def test_an_error_cannot_drive_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    raising(ConfigError("bad \x1b[31m\nname"))
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert err.count("\n") == 1


def test_debug_shows_where_an_error_comes_from(run: Run) -> None:
    ran = run("--debug", "ls", "--index-url", "redis://127.0.0.1:1")
    assert ran.code == 3
    assert "Traceback (most" in ran.err
    assert ran.err.splitlines()[-1].startswith("objkv: redis index")


def test_debug_shows_no_name_that_a_terminal_would_obey(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def work() -> int:
        raise StoreDenied("scan a\x1b]0;b\x07")

    assert guarded(work, debug=True) == 2
    told = capsys.readouterr().err
    assert "Traceback (most" in told
    assert told.count("\n") > 3
    assert "\x1b" not in told
    assert "\x07" not in told


def test_a_settings_file_that_is_not_there_is_2(run: Run) -> None:
    refused(run("ls", "--config", "/nowhere.toml"), "/nowhere.toml: No such file")


def test_the_version_is_told(run: Run) -> None:
    ran = run("--version")
    assert ran.code == 0
    assert ran.out.startswith("objkv 0.")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_common_options_and_a_sentence(name: str, run: Run) -> None:
    ran = run(name, "--help")
    assert ran.code == 0
    for option in ("--bulk-url", "--index-url", "--config", "--json", "--no-color"):
        assert option in ran.out


@pytest.mark.parametrize("how", ["option", "variable"])
def test_colours_can_be_switched_off_on_a_terminal(
    how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    Printer(machine=False, color=True).line("x", "red")
    assert "\x1b[31m" in capsys.readouterr().out
    if how == "variable":
        monkeypatch.setenv("NO_COLOR", "1")
    Printer(machine=False, color=how == "variable").line("x", "red")
    assert "\x1b[31m" not in capsys.readouterr().out


def test_long_rows_are_not_cut_where_there_is_no_terminal(run: Run, machine: Machine) -> None:
    digest = machine.fill()[2]
    row = run("ls", NAMESPACE).out.splitlines()[1]
    assert digest in row


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


def test_a_role_must_be_named_and_known(run: Run) -> None:
    assert run("access", *PLACE).code == 2
    assert run("access", "--role", "root", *PLACE).code == 2


def test_places_without_rights_are_told_as_such(run: Run) -> None:
    ran = run("access", "--role", "reader")
    assert ran.code == 0
    assert "No IAM policy: the bulk store is not an S3 bucket" in ran.out
    assert "No Redis ACL: the index is not Redis" in ran.out


def test_a_tenant_that_no_policy_can_name_is_wrong_usage(run: Run) -> None:
    refused(run("access", "--role", "reader", "--tenant", "a*", *PLACE), "tenant")


def test_sizes_and_ages_are_for_people() -> None:
    assert [size(n) for n in (None, 0, 1023, 1536, 3 << 30, 5 << 40)] == [
        "-", "0 B", "1023 B", "1.5 KiB", "3.0 GiB", "5.0 TiB",
    ]  # fmt: skip
    assert [age(s, 100_000) for s in (None, 100_000, 99_999, 99_000, 90_000, 1, 200_000)] == [
        "-", "0 s", "1 s", "16 min", "2 h", "1 d", "0 s",
    ]  # fmt: skip
    assert printable("a\x00b") == "a\N{REPLACEMENT CHARACTER}b"
