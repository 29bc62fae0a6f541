"""``objkv completion``: the completion script of a shell.

The scripts are files of this package, written by ``scripts/write_completion.py``. They hold every
command, option and choice, so that TAB starts no Python.
"""

import sys
from importlib.resources import files
from typing import Annotated, Final, Literal

import typer

from objkv.cli.command import guarded

SCRIPTS: Final = {"bash": "objkv.bash", "zsh": "objkv.zsh", "fish": "objkv.fish"}


def completion(
    ctx: typer.Context,
    shell: Annotated[
        Literal["bash", "zsh", "fish"], typer.Argument(help="The shell.", metavar="SHELL")
    ],
) -> None:
    """Print the completion script of a shell.

    Add eval "$(objkv completion bash)" to ~/.bashrc.
    """
    raise typer.Exit(print_script(shell, debug=ctx.obj.debug))


def print_script(shell: str, *, debug: bool = False) -> int:
    """Print the script and return the exit code."""

    def work() -> int:
        script = files("objkv.cli").joinpath("completions", SCRIPTS[shell])
        sys.stdout.write(script.read_text("utf-8"))
        return 0

    return guarded(work, debug=debug)
