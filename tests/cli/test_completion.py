"""Completion in real shells: the candidates are those of the command line, and no Python starts."""

from pathlib import Path

import pytest

from objkv.cli.completion import SCRIPTS
from tests.cli.conftest import Run, refused

ROOT = Path(__file__).parents[2]
SCRIPT = {shell: ROOT / "objkv/cli/completions" / name for shell, name in SCRIPTS.items()}


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_command_prints_the_script(run: Run, shell: str) -> None:
    ran = run("completion", shell)
    assert (ran.code, ran.err, ran.out) == (0, "", SCRIPT[shell].read_text())


def test_another_shell_is_wrong_usage(run: Run) -> None:
    refused(run("completion", "tcsh"), "'tcsh' is not one of 'bash', 'zsh', 'fish'")
