"""``objkv completion``: the scripts, and one of them in a real shell."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run

PROGRAMS = Path(sys.executable).parent


def completed(*words: str) -> list[str]:
    """What bash offers for the last of ``words``."""
    script = (
        'eval "$(objkv completion bash)" && COMP_WORDS=("$@") && '
        "COMP_CWORD=$(($# - 1)) && _objkv_completion objkv && printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    ran = subprocess.run(
        ["/bin/bash", "-euc", script, "bash", *words],
        env={**os.environ, "PATH": f"{PROGRAMS}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout.split()


def test_bash_completes_commands_and_options() -> None:
    assert completed("objkv", "do") == ["doctor"]
    assert set(completed("objkv", "ls", "--pre")) == {"--prefixes"}


@pytest.mark.parametrize(
    ("shell", "registers"),
    [
        ("bash", "complete -o default -F _objkv_completion objkv"),
        ("zsh", "#compdef objkv"),
        ("fish", "complete --command objkv"),
    ],
)
def test_each_shell_gets_a_script_of_its_own(run: Run, shell: str, registers: str) -> None:
    ran = run("completion", shell)
    assert (ran.code, ran.err) == (0, "")
    assert registers in ran.out


def test_another_shell_is_wrong_usage(run: Run) -> None:
    ran = run("completion", "tcsh")
    assert (ran.code, ran.out) == (2, "")
    assert "tcsh" in ran.err
