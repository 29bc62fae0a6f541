"""``objkv completion``: what a shell needs to complete commands and options."""

from typing import Annotated, Literal

import typer

# Typer's own, through the module that has had it in every version that objkv runs with.
from typer.completion import completion_init, get_completion_script  # type: ignore[attr-defined]

from objkv.cli.command import guarded

completion_init()  # else typer answers shells only where its own options for this are shown
PROGRAM = "objkv"
VARIABLE = "_OBJKV_COMPLETE"
"""Set by the scripts when they ask the program what comes next."""


def completion(
    ctx: typer.Context,
    shell: Annotated[
        Literal["bash", "zsh", "fish"],
        typer.Argument(help="Whose script to print.", metavar="SHELL"),
    ],
) -> None:
    """Print the completion script of a shell.

    In ~/.bashrc: eval "$(objkv completion bash)"
    """
    raise typer.Exit(guarded(lambda: _print_script(shell), debug=bool(ctx.obj)))


def _print_script(shell: str) -> int:
    typer.echo(get_completion_script(prog_name=PROGRAM, complete_var=VARIABLE, shell=shell))
    return 0
